"""One module per target, and what several of them share."""
