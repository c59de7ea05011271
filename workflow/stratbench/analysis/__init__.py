"""Analysis of the records: tables, statistics, figures and the report. Never imports torch."""
