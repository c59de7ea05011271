"""The tables of a study: measures, summaries of repeats, and the paper's numbered tables."""
