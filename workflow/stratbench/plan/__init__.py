"""The wing that plans: what each cell of a study will need and cost, told before anything runs."""
