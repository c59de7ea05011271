"""Defines the path of the config that `tune` writes."""

#: Path of the config that `tune` writes, relative to results/<study>.
TUNING_CONFIG_PATH = ("tune", "config.yaml")
