"""Servers that can be restarted, and whose workers come, leave and return during the training."""
