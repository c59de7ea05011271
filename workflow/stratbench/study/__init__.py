"""Turns config.yaml into training runs (cells), and cells into jobs of a scheduler. Never imports torch."""
