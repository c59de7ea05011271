"""The learning rate of a step by its number: a closed formula, so that no state is kept or lost."""

from __future__ import annotations

import math
from typing import Literal

Schedule = Literal["constant", "cosine", "linear"]


def share_of_lr(
    schedule: Schedule, step: int, steps: int, warmup: int, final: float = 0.0
) -> float:
    """Return the factor on the learning rate in `step` (from 0) of `steps`.

    It rises in equal parts over the first `warmup` steps, the last of which has the full rate. Then `linear`
    and `cosine` fall to `final`, which the step after the last would have (Loshchilov and Hutter, "SGDR",
    ICLR 2017, without restarts).

    Args:
        schedule: Name of the schedule.
        step: Number of the step, from 0.
        steps: Steps of the whole training.
        warmup: Steps of the warm-up.
        final: Factor at the end.
    """
    if step < warmup:
        return (step + 1) / warmup
    done = min(1.0, (step - warmup) / max(1, steps - warmup))  # a profile continues after the last
    match schedule:
        case "cosine":
            return final + (1 - final) * (1 + math.cos(math.pi * done)) / 2
        case "linear":
            return final + (1 - final) * (1 - done)
    return 1.0
