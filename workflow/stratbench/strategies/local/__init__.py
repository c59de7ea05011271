"""Strategies whose workers train on their own between exchanges."""
