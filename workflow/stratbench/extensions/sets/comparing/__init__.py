"""Compares result sets: matches their cells, and writes ratios, figures and a page."""
