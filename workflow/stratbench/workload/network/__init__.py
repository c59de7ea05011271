"""Builds models, built-in and a user's own, with precision, activation checkpointing and sharding."""
