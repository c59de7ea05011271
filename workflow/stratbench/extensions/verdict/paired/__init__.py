"""The verdict: which strategy is fastest, from short paired blocks instead of whole trainings."""
