"""Dynamic loss scaling of a worker in fp16: its loss scale, and the division of gradients by this scale."""

from __future__ import annotations

from typing import ClassVar

import torch
from torch import Tensor

from stratbench.workload.torch_internals import unscale_gradients


class LossScale:
    """The loss scale of one worker, which changes as that of torch.amp.GradScaler by default.

    Each worker has a scale of its own, because the servers apply or skip each push as a whole. The scale has
    a lower limit, because a run that diverges would otherwise halve it down to 0.
    """

    MINIMUM: ClassVar[float] = 2.0**-24
    START: ClassVar[float] = 65536.0
    GROWTH_STEPS: ClassVar[int] = 2000

    def __init__(self) -> None:
        self.reset()

    def reset(self) -> None:
        """Set the scale to its initial value, and the number of skipped steps to 0."""
        self.value, self.skipped, self._good = self.START, 0, 0

    def update(self, overflowed: bool) -> None:
        """Halve the scale if a gradient overflowed, or double it after many steps without overflow."""
        if overflowed:
            self.value, self._good = max(self.value / 2, self.MINIMUM), 0
            self.skipped += 1
            return
        self._good += 1
        if self._good == self.GROWTH_STEPS:
            self.value, self._good = self.value * 2, 0


class Unscaler:
    """Divides gradients by the loss scale and detects overflows in the same pass, on the device.

    The class calls GradScaler's own kernel, and never waits for the device.
    """

    def __init__(self, device: torch.device) -> None:
        #: Overflow flag, shape [1]. It is not 0 if a gradient of the present step was not finite.
        self.overflow_flag = torch.zeros(1, device=device)
        self._inverse = torch.ones(1, device=device)

    def begin_step(self, scale: LossScale) -> None:
        """Start a new step, whose gradients are multiplied by this scale."""
        self.overflow_flag.zero_()
        self._inverse.fill_(1 / scale.value)

    def unscale(self, grads: Tensor) -> None:
        """Divide the gradients `grads` by the loss scale, in place."""
        unscale_gradients([grads], self.overflow_flag, self._inverse)
