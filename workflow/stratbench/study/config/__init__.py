"""Turns a config into a study: checks the schema, fills in defaults, and reports all mistakes at once."""
