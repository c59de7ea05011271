"""Parameter servers that can be restarted, and whose workers join and leave during the training."""
