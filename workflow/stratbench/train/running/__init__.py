"""How a cell's processes come to be: the gang's runner, which others override, and what totals come of it."""
