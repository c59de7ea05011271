"""Computes the learning rate of a step from the step's number, so that a schedule has no state."""

from __future__ import annotations

import math
from typing import Literal

Schedule = Literal["constant", "cosine", "linear"]


def compute_lr_factor(
    schedule: Schedule, step: int, steps: int, warmup_steps: int, final_factor: float = 0.0
) -> float:
    """Return the factor by which a schedule multiplies the learning rate in one step.

    The factor rises linearly over the first `warmup_steps`, the last of which has factor 1. Then `linear` and
    `cosine` fall to `final_factor`, which the step after the last would have (Loshchilov and Hutter, "SGDR",
    ICLR 2017, without restarts).

    Args:
        schedule: Name of the schedule.
        step: Number of the step, from 0.
        steps: Number of steps of the whole training.
        warmup_steps: Number of steps of the warm-up.
        final_factor: Factor at the end.
    """
    if step < warmup_steps:
        return (step + 1) / warmup_steps
    # The profiler runs steps after the training. Without `min`, their share would be above 1.
    done_share = min(1.0, (step - warmup_steps) / max(1, steps - warmup_steps))
    match schedule:
        case "cosine":
            return final_factor + (1 - final_factor) * (1 + math.cos(math.pi * done_share)) / 2
        case "linear":
            return final_factor + (1 - final_factor) * (1 - done_share)
    return 1.0
