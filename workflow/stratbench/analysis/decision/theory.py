"""Chooses a strategy by rules from theory, if nothing was measured."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import MISSING, fields

from stratbench.analysis.decision.constraints import Constraints
from stratbench.cell.settings import Settings
from stratbench.cell.text.words import GIB
from stratbench.strategies import REGISTRY, option_defaults, strategy_class
from stratbench.workload.network.models import MODELS

#: Bytes per parameter in training with fp32 weights: weight, gradient and SGD's momentum, or AdamW's two
#: moments, of 4 bytes each. Mixed precision by autocast keeps all of them in fp32.
STATE_BYTES_PER_PARAMETER = {"sgd": 12, "adamw": 16}
#: The states that the optimizer keeps, in words.
MOMENTS = {"sgd": "momentum", "adamw": "two moments"}


def choice_by_theory(
    model: str, constraints: Constraints, optimizer: str = "sgd"
) -> tuple[str | None, list[str]]:
    """A strategy (None if none can hold the model), and the reasons in sentences."""
    gpus = constraints.gpus
    several = gpus is None or gpus > 1
    whole = state_bytes(model, optimizer)
    limit = constraints.gpu_memory_gib and constraints.gpu_memory_gib * GIB
    room = limit and limit / (1 + constraints.memory_margin)
    too_large = bool(whole and room and whole > room)
    if not several and not too_large:
        return first_choice_in("one worker", optimizer), [
            "With one GPU there is nothing to distribute."
        ]
    reasons = list(sentences_on_size(model, optimizer, whole, limit, too_large))
    if too_large:
        shards = -(-whole // room)
        if not several or (gpus is not None and gpus < shards):
            given = "a number not given" if gpus is None else str(gpus)
            text = f"Sharded, they need at least {shards:.0f} GPUs, and {given} is at hand."
            return None, [*reasons, text]
        return first_choice_in("states too large", optimizer), [
            *reasons,
            "Only sharding divides the model states among the GPUs.",
        ]
    if not constraints.homogeneous or not constraints.gang_scheduled:
        why = (
            "A collective strategy waits for its slowest worker at every step."
            if constraints.gang_scheduled
            else "A collective job stops when a worker leaves."
        )
        return first_choice_in("unequal workers", optimizer), [
            *reasons,
            why,
            "An asynchronous server does not; of these, one that corrects for staleness loses the "
            "least accuracy. Measure the score before you rely on it.",
        ]
    return first_choice_in("equal workers", optimizer), [
        *reasons,
        "Among equal GPUs that stay, it moves the fewest bytes a step of those that keep a whole "
        "replica current (2(N-1)/N of the gradients; FSDP 3(N-1)/N), and overlaps them with the "
        "backward pass.",
    ]


def first_choice_in(situation: str, optimizer: str) -> str | None:
    """The strategy that states it is the first choice in `situation` and takes the optimizer; or None."""
    names = (name for name in REGISTRY if strategy_class(name).first_choice == situation)
    return next((name for name in names if takes(name, optimizer)), None)


def takes(name: str, optimizer: str) -> bool:
    """Whether the strategy, with its default options, can train with the optimizer."""
    defaults = {f.name: f.default for f in fields(Settings) if f.default is not MISSING}
    values = defaults | {"optimizer": optimizer, "precision": "fp32"}
    return not any(strategy_class(name).refusals(option_defaults(name), values))


def state_bytes(model: str, optimizer: str) -> int | None:
    """Bytes of the model's training states on one GPU without sharding; None if unknown."""
    known = MODELS.get(model)
    return known.parameters * STATE_BYTES_PER_PARAMETER[optimizer] if known else None


def sentences_on_size(
    model: str, optimizer: str, whole: int | None, limit: float | None, too_large: bool
) -> Iterator[str]:
    """Sentences on whether the model's states fit on one GPU."""
    if whole is None:
        yield f"The size of {model} is not known."
        return
    text = (
        f"The states of {model} (weights, gradients, {MOMENTS[optimizer]} in fp32, 1000 classes) take "
        f"{whole / GIB:.2f} GiB"
    )
    if limit is None:
        yield f"{text}; the memory of a GPU is not given."
    else:
        fit = "with a reserve more than one GPU has" if too_large else "which one GPU holds"
        yield f"{text}, {fit} ({limit / GIB:g} GiB); activations come on top."
