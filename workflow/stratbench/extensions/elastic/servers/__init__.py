"""Servers whose workers come, leave and return while it trains, and that are started again themselves."""
