"""config.yaml becomes cells, and cells become jobs: validation, resources, schedulers. No torch."""
