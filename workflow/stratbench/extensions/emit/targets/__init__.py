"""Writers of one file format per target such as Accelerate, and code that they share."""
