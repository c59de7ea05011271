"""Reads facts on the machine of a run: hardware, environment variables, and other programs."""
