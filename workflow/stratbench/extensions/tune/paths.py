"""Defines where the study of the combinations to measure is stored."""

#: Path of that study's config, relative to results/<study>.
TUNED = ("tune", "config.yaml")
