"""Cells whose workers are jobs of their own: who keeps them, and how synchronous ones meet again."""
