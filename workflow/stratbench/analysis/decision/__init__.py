"""The decision: which strategy to choose, how sure that is, and what would change it."""
