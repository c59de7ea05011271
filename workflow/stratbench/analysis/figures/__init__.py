"""The figures of a study: their data, their panels, and how they are drawn."""
