"""Where the study of combinations lies."""

#: The config of that study, below results/<study>.
TUNED = ("tune", "config.yaml")
