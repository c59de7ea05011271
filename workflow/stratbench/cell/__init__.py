"""What a cell is: its coordinates and paths, its settings, its record, and the folder its processes share."""
