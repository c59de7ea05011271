"""Decides which strategy to choose for each model, how sure the choice is, and what would change it."""
