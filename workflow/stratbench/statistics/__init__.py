"""Statistics that verdicts, tables and comparisons share."""
