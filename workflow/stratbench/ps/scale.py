"""Dynamic loss scaling of one worker, for fp16: the scale, and the pass that undoes it."""

from __future__ import annotations

from typing import ClassVar

import torch
from torch import Tensor

from stratbench.workload.torch_internals import unscale


class LossScale:
    """A worker's factor on its loss: torch.amp.GradScaler's rule with its defaults.

    Each worker has its own: its push is applied or dropped as a whole, whatever the others do. The scale has
    a lower limit: in a run that diverges it would otherwise be halved down to 0.
    """

    MINIMUM: ClassVar[float] = 2.0**-24
    START: ClassVar[float] = 65536.0
    GROWTH_STEPS: ClassVar[int] = 2000

    def __init__(self) -> None:
        self.reset()

    def reset(self) -> None:
        """Start over."""
        self.value, self.skipped, self._good = self.START, 0, 0

    def update(self, overflowed: bool) -> None:
        """A step is through; `overflowed`: a gradient was not finite, the step was skipped."""
        if overflowed:
            self.value, self._good = max(self.value / 2, self.MINIMUM), 0
            self.skipped += 1
            return
        self._good += 1
        if self._good == self.GROWTH_STEPS:
            self.value, self._good = self.value * 2, 0


class Unscaler:
    """Divides by a loss scale and finds overflows in one pass over the gradients, on their device.

    The pass is GradScaler's own kernel. Nothing here waits for the device.
    """

    def __init__(self, device: torch.device) -> None:
        #: Shape [1]: not 0 as soon as something that was unscaled since `begin` was not finite.
        self.found = torch.zeros(1, device=device)
        self._inverse = torch.ones(1, device=device)

    def begin(self, scale: LossScale) -> None:
        """The gradients that come now carry this scale."""
        self.found.zero_()
        self._inverse.fill_(1 / scale.value)

    def unscale(self, grads: Tensor) -> None:
        """Divide `grads` by the scale, in place."""
        unscale([grads], self.found, self._inverse)
