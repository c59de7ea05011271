"""Compares result sets: matches their cells, and writes time ratios, figures and a page."""
