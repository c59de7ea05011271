"""Rules that compare cells: what differs between them, and what was measured only together."""
