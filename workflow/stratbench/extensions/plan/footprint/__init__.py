"""Memory and traffic of a cell, traced on fake tensors in separate processes, and cached."""
