"""Analysis of the records: flat tables, statistics, figures and the report. Never imports torch."""
