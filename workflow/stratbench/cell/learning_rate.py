"""Computes the learning rate of a step from the step's number, so that a schedule has no state."""

from __future__ import annotations

import math
from typing import Literal

Schedule = Literal["constant", "cosine", "linear"]


def compute_lr_factor(
    schedule: Schedule, step: int, steps: int, warmup: int, final: float = 0.0
) -> float:
    """Return the factor on the learning rate in step number `step`, from 0, of `steps`.

    The factor rises linearly over the first `warmup` steps, the last of which has factor 1. Then `linear` and
    `cosine` fall to `final`, which the step after the last would have (Loshchilov and Hutter, "SGDR", ICLR
    2017, without restarts).

    Args:
        schedule: Name of the schedule.
        step: Number of the step, from 0.
        steps: Number of steps of the whole training.
        warmup: Number of steps of the warm-up.
        final: Factor at the end.
    """
    if step < warmup:
        return (step + 1) / warmup
    # Profiled steps follow the last step of the training.
    done = min(1.0, (step - warmup) / max(1, steps - warmup))
    match schedule:
        case "cosine":
            return final + (1 - final) * (1 + math.cos(math.pi * done)) / 2
        case "linear":
            return final + (1 - final) * (1 - done)
    return 1.0
