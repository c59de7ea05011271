"""A network whose training steps sleep for a time of each worker's own: for `projection_jitter.py`."""

from __future__ import annotations

import math
import os
import random
import time
from collections.abc import Iterator
from itertools import count
from pathlib import Path

from torch import Tensor, is_grad_enabled, nn

#: Of the seconds that a forward sleeps: the mean, and how its logarithm is correlated with the last one's.
MEAN_S, LAG = 0.25, 0.7
#: Names the folder in which a cell's workers take their numbers; without it no forward sleeps.
VARIABLE = "SLEEPING_NET_NUMBERS"


class SleepingNet(nn.Module):
    """A dense layer that sleeps before it computes, in training steps of a cell.

    `variation`: of the times, the standard deviation over the mean; `stays`: of the variance of their
    logarithms, the share that is the worker's own in all its steps.
    """

    def __init__(
        self, classes: int, channels: int, image_size: int, variation: float, stays: float, seed: int
    ) -> None:  # fmt: skip
        super().__init__()
        self.layer = nn.Linear(channels * image_size**2, classes)
        self.jitter = (variation, stays, seed)
        self.times: Iterator[float] | None = None

    def forward(self, x: Tensor) -> Tensor:
        if self.training and is_grad_enabled() and VARIABLE in os.environ:
            if self.times is None:
                self.times = times_s(*self.jitter, own_number(Path(os.environ[VARIABLE])))
            time.sleep(next(self.times))
        return self.layer(x.flatten(1))


def times_s(variation: float, stays: float, seed: int, worker: int) -> Iterator[float]:
    """Seconds of a worker's steps, MEAN_S in the mean of all workers."""
    draw = random.Random(1000 * seed + worker)
    variance = math.log1p(variation**2)
    own, varying = draw.gauss(0, 1), draw.gauss(0, 1)
    while True:
        log = math.sqrt(stays) * own + math.sqrt(1 - stays) * varying
        yield MEAN_S * math.exp(math.sqrt(variance) * log - variance / 2)
        varying = LAG * varying + math.sqrt(1 - LAG**2) * draw.gauss(0, 1)


def own_number(folder: Path) -> int:
    """The smallest number that no other worker of the cell has taken; a file in the folder takes it."""
    for number in count():
        try:
            (folder / str(number)).touch(exist_ok=False)
        except FileExistsError:
            continue
        return number
    raise AssertionError("numbers do not end")
