"""Formats numbers and values as text, and fills in the templates of HTML pages."""
