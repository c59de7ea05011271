"""Statistics for verdicts, tables and comparisons."""
