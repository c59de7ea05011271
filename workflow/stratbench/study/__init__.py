"""config.yaml becomes cells: schema, validation, resources. No torch."""
