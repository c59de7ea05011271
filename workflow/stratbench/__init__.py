"""stratbench: measures distributed-training strategies for deep learning against each other."""

__version__ = "0.1.0"
