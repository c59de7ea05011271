"""A config becomes a study: its schema, its defaults, and every mistake in one message."""
