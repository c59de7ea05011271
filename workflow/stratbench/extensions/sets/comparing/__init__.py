"""Comparison of two result sets: matched cells, ratios, figures and the page."""
