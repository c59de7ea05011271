"""Builds built-in models and users' models, and prepares them for training."""
