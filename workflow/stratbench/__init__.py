"""stratbench: measures distributed-training strategies for deep learning against each other."""

from typing import Any

__version__ = "0.1.0"


def __getattr__(name: str) -> Any:
    """Import `estimate` on first access, since it needs PyTorch and most commands do not."""
    if name == "estimate":
        from stratbench.extensions.plan.one_model.estimate import estimate

        return estimate
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
