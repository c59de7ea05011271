"""stratbench, a benchmark that compares distributed-training strategies for deep learning."""

from typing import Any

__version__ = "0.1.0"


def __getattr__(name: str) -> Any:
    """Import the function `estimate` on first access, since PyTorch is slow to import."""
    if name == "estimate":
        from stratbench.extensions.plan.one_model.estimate import estimate

        return estimate
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
