"""Finds the fastest strategy from short paired blocks instead of complete trainings."""
