"""The fastest configuration of a network: combinations, sieves, and a study of what they leave."""

#: The config of that study, below results/<study>.
TUNED = ("tune", "config.yaml")
