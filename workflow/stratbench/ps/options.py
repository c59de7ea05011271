"""The options of each parameter-server policy: names, types, defaults, limits and memory.

Nothing here imports torch: the Snakefile validates a study's options and the memory planner counts
buffers without it. `policies.py` takes these same objects.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import Field, dataclass, field, fields
from typing import Any, ClassVar

LR_SCALES = ("full", "1/N")


def option(
    default: Any,
    help: str,
    least: float | None = None,
    below: float | None = None,
    choices: tuple[str, ...] = (),
) -> Any:
    """A dataclass field that says what it means (`help`) and which values it takes."""
    limits = {"least": least, "below": below, "choices": choices}
    return field(default=default, metadata={"help": help, **limits})


def lr_scale_option(default: str) -> Any:
    """The field for what each asynchronous push multiplies the learning rate by."""
    return option(
        default,
        "learning rate of one push: 'full' (the study's own, so N workers move N times as far per "
        "global batch) or '1/N' (N pushes move as far as one averaged update)",
        choices=LR_SCALES,
    )


@dataclass(frozen=True)
class PolicyOptions:
    """Base of all options. A policy without a field of its own takes none."""

    #: Weight-sized tensors kept whatever the number of workers, and for each worker.
    fixed_buffers: ClassVar[int] = 1
    buffers_per_worker: ClassVar[int] = 0
    #: False: losing a worker ends the run (a barrier can no longer be met honestly).
    tolerates_loss: ClassVar[bool] = True
    #: Whether every update is the mean of one push of each worker, on the same weights.
    averages_all: ClassVar[bool] = False

    @property
    def synchronous_alone(self) -> bool:
        """Whether one worker by itself trains as torch.optim.SGD does."""
        return False

    def waits_for_slowest(self, workers: int) -> bool:
        """Whether, in the long run, all go at the slowest worker's pace."""
        return True

    def updates_per_step(self, workers: int) -> float | None:
        """Updates that a global batch makes; None where that is not fixed."""
        return None

    @property
    def pushes_per_ticket(self) -> int:
        """Into how many pushes a worker splits one ticket (batch)."""
        return 1

    def lr_factor(self, workers: int) -> float:
        """What `Hyper.lr_scale` is for `workers`: 1.0, or 1/workers where the options say '1/N'."""
        return 1.0 / workers if getattr(self, "lr_scale", "full") == "1/N" else 1.0

    def optimizer_buffers(self, workers: int) -> int:
        """Weight-sized tensors the policy keeps beside the weights, with momentum switched on."""
        return self.fixed_buffers + self.buffers_per_worker * workers

    def momentum_buffers(self, workers: int) -> int:
        """How many of these only momentum needs."""
        return 1


@dataclass(frozen=True)
class SyncOptions(PolicyOptions):
    """ps-sync: none."""

    tolerates_loss: ClassVar[bool] = False
    averages_all: ClassVar[bool] = True
    synchronous_alone: ClassVar[bool] = True

    def updates_per_step(self, workers: int) -> float:
        return 1.0

    def optimizer_buffers(self, workers: int) -> int:
        """Momentum, and the gradients of all workers but the last of a step."""
        return 1 + (workers - 1)


@dataclass(frozen=True)
class BackupOptions(PolicyOptions):
    """ps-backup."""

    backups: int = option(1, "workers a step does not wait for (at most workers - 1)", least=0)

    synchronous_alone: ClassVar[bool] = True  # whatever `backups` is: the one push is waited for

    def waits_for_slowest(self, workers: int) -> bool:
        return self.quorum(workers) == workers

    def quorum(self, workers: int) -> int:
        """How many pushes make a step of `workers` workers."""
        return max(1, workers - self.backups)

    def optimizer_buffers(self, workers: int) -> int:
        """Momentum, and the gradients of a step but its last."""
        return 1 + (self.quorum(workers) - 1)


@dataclass(frozen=True)
class KBatchOptions(PolicyOptions):
    """ps-kbatch."""

    k: int = option(0, "pushes averaged into one update; 0: as many as there are workers", least=0)

    @property
    def synchronous_alone(self) -> bool:
        return self.pushes_per_update(1) == 1

    def waits_for_slowest(self, workers: int) -> bool:
        return False

    def updates_per_step(self, workers: int) -> float:
        return workers / self.pushes_per_update(workers)

    def pushes_per_update(self, workers: int) -> int:
        """`k`, or the number of workers where it is 0."""
        return self.k or workers

    def optimizer_buffers(self, workers: int) -> int:
        """Momentum, and the running sum where an update takes more than one push."""
        return 1 + (self.pushes_per_update(workers) > 1)


@dataclass(frozen=True)
class EveryPushOptions(PolicyOptions):
    """Base of the policies that make every push an update; nobody waits for anybody."""

    synchronous_alone: ClassVar[bool] = True

    def waits_for_slowest(self, workers: int) -> bool:
        return False

    def updates_per_step(self, workers: int) -> float:
        return float(workers * self.pushes_per_ticket)


@dataclass(frozen=True)
class BoundedOptions(EveryPushOptions):
    """The same within a bound of staleness, at which the fast wait for the slowest."""

    def waits_for_slowest(self, workers: int) -> bool:
        return True


@dataclass(frozen=True)
class AsyncOptions(EveryPushOptions):
    """ps-async."""

    lr_scale: str = lr_scale_option("full")


@dataclass(frozen=True)
class StalenessLrOptions(EveryPushOptions):
    """ps-staleness-lr. `full`, because 1/(1 + staleness) already divides by about N."""

    lr_scale: str = lr_scale_option("full")


@dataclass(frozen=True)
class SspOptions(BoundedOptions):
    """ps-ssp."""

    staleness_bound: int = option(
        3, "pushes a worker may be ahead of the slowest one when it starts a batch", least=0
    )
    lr_scale: str = lr_scale_option("1/N")


@dataclass(frozen=True)
class AsyncModifiedOptions(BoundedOptions):
    """ps-async-modified. The bound counts pushes, that is sub-batches."""

    staleness_bound: int = option(
        1, "pushes a worker may be ahead of the slowest one when it starts a sub-batch", least=0
    )
    pushes_per_batch: int = option(4, "sub-batches, each pushed by itself, of one batch", least=1)
    lr_scale: str = lr_scale_option("full")

    @property
    def pushes_per_ticket(self) -> int:
        return self.pushes_per_batch

    @property
    def synchronous_alone(self) -> bool:
        """Not with several pushes a batch: each is an update on a smaller batch."""
        return self.pushes_per_batch == 1


@dataclass(frozen=True)
class DcAsgdOptions(EveryPushOptions):
    """ps-dcasgd. Keeps momentum, mean square, a scratch tensor and each worker's last view."""

    fixed_buffers: ClassVar[int] = 3
    buffers_per_worker: ClassVar[int] = 1

    dc_lambda: float = option(2.0, "strength of the delay compensation", least=0.0)
    dc_decay: float = option(0.95, "decay of the gradient's running mean square", 0.0, below=1.0)
    lr_scale: str = lr_scale_option("1/N")


@dataclass(frozen=True)
class GapAwareOptions(EveryPushOptions):
    """ps-gap-aware. Keeps momentum, mean square, a scratch tensor and each worker's last view."""

    fixed_buffers: ClassVar[int] = 3
    buffers_per_worker: ClassVar[int] = 1

    step_decay: float = option(0.999, "decay of the step's running mean square", 0.0, below=1.0)
    lr_scale: str = lr_scale_option("1/N")


@dataclass(frozen=True)
class DanaOptions(EveryPushOptions):
    """ps-dana. Keeps one momentum per worker."""

    fixed_buffers: ClassVar[int] = 0
    buffers_per_worker: ClassVar[int] = 1

    def momentum_buffers(self, workers: int) -> int:
        return workers

    lr_scale: str = lr_scale_option("1/N")


#: Every policy by its strategy name, with the class of its options.
OPTIONS: dict[str, type[PolicyOptions]] = {
    "ps-sync": SyncOptions,
    "ps-async": AsyncOptions,
    "ps-async-modified": AsyncModifiedOptions,
    "ps-ssp": SspOptions,
    "ps-backup": BackupOptions,
    "ps-kbatch": KBatchOptions,
    "ps-dcasgd": DcAsgdOptions,
    "ps-gap-aware": GapAwareOptions,
    "ps-staleness-lr": StalenessLrOptions,
    "ps-dana": DanaOptions,
}


def parse_options(strategy: str, given: Mapping[str, Any] | None = None) -> PolicyOptions:
    """The options of `strategy` from its block in the config; defaults where a key is missing.

    Raises ValueError, naming the strategy, the key and what it takes, for an unknown strategy or
    key or a value of the wrong type or range.
    """
    if strategy not in OPTIONS:
        raise ValueError(f"{strategy!r} is no parameter-server policy; known: {', '.join(OPTIONS)}")
    known = {f.name: f for f in fields(OPTIONS[strategy])}
    given = given or {}
    for key in given:
        if key not in known:
            takes = ", ".join(known) or "none"
            raise ValueError(f"{strategy}: unknown option {key!r}; options it takes: {takes}")
    return OPTIONS[strategy](**{k: _checked(strategy, known[k], v) for k, v in given.items()})


def _checked(strategy: str, spec: Field, value: Any) -> Any:
    """`value` in the field's type, or ValueError."""
    kind = type(spec.default)
    least, below, choices = (spec.metadata[name] for name in ("least", "below", "choices"))
    expected = {int: "a whole number", float: "a number", str: "text"}[kind]
    if choices:
        expected = f"one of {', '.join(choices)}"
    if least is not None:
        expected += f", at least {least:g}"
    if below is not None:
        expected += f", below {below:g}"
    right_type = type(value) is kind or (kind is float and type(value) is int)
    if not (
        right_type
        and (not choices or value in choices)
        and (least is None or value >= least)
        and (below is None or value < below)
    ):
        raise ValueError(f"{strategy}: {spec.name} is {value!r}; expected {expected}")
    return kind(value)
