"""How a cell's processes are run: the gang's runner, which others override, and the totals."""
