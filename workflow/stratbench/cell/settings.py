"""What a cell is trained with: every setting resolved, as its launcher gets it and its record keeps it."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass
from typing import Any

from stratbench.cell.learning_rate import share_of_lr


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
    #: Passes over the training set; None where `steps` says how long.
    epochs: int | None
    global_batch: int
    #: Samples of a step that a worker computes on: those of the copy of the network that it has or shares.
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
    optimizer: str = "sgd"
    #: Of AdamW; None with SGD.
    betas: list[float] | None = None
    eps: float | None = None
    schedule: str = "constant"
    lr_warmup_steps: int = 0
    #: What the schedule falls to.
    final_lr: float = 0.0
    clip_norm: float | None = None
    #: Of a model that is not built in: call, kwargs, shard, and the sha256 of its code or its version.
    own_model: dict[str, Any] | None = None
    #: Of a task that is not built in: call, and the sha256 of its code or its version. None: the data
    #: set's own.
    own_task: dict[str, Any] | None = None
    #: Parts in which a worker computes a step's batch, one after the other.
    accumulate: int = 1
    #: iid: all workers draw from the whole training set; by-class: each has few classes of its own.
    partition: str = "iid"
    #: device: the data lie there; host: in host memory, from where batches are copied ahead.
    placement: str = "device"
    #: What decides the samples of the data set, defaults resolved: source, sizes and seed; of a user's
    #: own its kind and keys, and the sha256 of its files or code, or a version. None: its name says all.
    data_spec: dict[str, Any] | None = None
    #: Whether blocks compute their activations again in backward.
    activation_checkpointing: bool = False
    #: Whether the training step's forward and backward go through torch.compile.
    compile: bool = False

    def share_of_lr(self, step: int, steps: int) -> float:
        """What the learning rate is multiplied by in `step` (from 0) of `steps`."""
        return share_of_lr(
            self.schedule, step, steps, self.lr_warmup_steps, self.final_lr / self.lr
        )

    @property
    def changes_lr(self) -> bool:
        """Whether the learning rate is not the same in all steps."""
        return self.schedule != "constant" or self.lr_warmup_steps > 0

    #: Steps of the whole training, which is then not evaluated; None: `epochs` says how long.
    steps: int | None = None

    def total_steps(self, train_samples: int) -> int:
        """Steps of the whole training, on a set of so many samples."""
        return self.steps or self.epochs * (train_samples // self.global_batch)

    def passes(self, train_samples: int) -> int:
        """Passes over the training set; with `steps` the last may be left before its end."""
        return self.epochs or -(-self.steps // (train_samples // self.global_batch))

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
