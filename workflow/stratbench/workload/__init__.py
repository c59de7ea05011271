"""What a cell trains: models, data sets and their precision."""
