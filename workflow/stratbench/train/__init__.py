"""The wing that trains: launches a cell's processes, times the training, classifies the end."""
