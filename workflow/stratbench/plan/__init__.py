"""Predicts what each cell of a study will need and cost, before anything runs."""
