"""Uses `projection.csv` in decisions and in the report, for unmeasured worker counts."""
