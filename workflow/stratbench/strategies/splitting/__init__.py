"""Strategies that split the model itself over workers."""
