"""What a cell is trained with: every setting resolved, as its launcher gets it and its record keeps it."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass
from typing import Any


@dataclass(frozen=True)
class Settings:
    """Everything a cell is trained with, defaults resolved. Changing any of it retrains the cell.

    The cell's time limit is left out on purpose: raising it must not retrain what has finished.
    """

    strategy: str
    options: dict[str, Any]
    model: str
    dataset: str
    gpus: int
    seed: int
    epochs: int
    global_batch: int
    per_worker_batch: int
    lr: float
    momentum: float
    weight_decay: float
    nesterov: bool
    precision: str
    augment: bool
    warmup_steps: int
    device: str
    threads: int | None
    slowdown: dict[str, Any] | None
    profile: bool = False

    def as_json(self) -> str:
        """Canonical JSON: equal settings give equal text."""
        return json.dumps(asdict(self), sort_keys=True)

    def as_parameter(self, key: str) -> str:
        """One setting as a text, `lr=0.1`: equal settings give equal text."""
        return f"{key}={json.dumps(getattr(self, key), sort_keys=True)}"

    @classmethod
    def from_json(cls, text: str) -> Settings:
        """The settings that `as_json` wrote."""
        return cls(**json.loads(text))
