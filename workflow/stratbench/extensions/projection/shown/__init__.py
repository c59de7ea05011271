"""Uses projection.csv in decisions and in the report, for worker counts that were not measured."""
