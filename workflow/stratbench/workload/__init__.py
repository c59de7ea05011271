"""Models, data sets, training tasks and number formats of cells."""
