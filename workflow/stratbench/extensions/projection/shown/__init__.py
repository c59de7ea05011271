"""Use of `projection.csv`, on unmeasured worker counts, in decisions and the report."""
