"""Seeds, saves and restores the random generators of Python, NumPy and PyTorch."""

from __future__ import annotations

import math
import random
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

#: Message on a model that gets different initial weights from the same seed.
OTHER_START = (
    "its workers have built it with different initial weights from the same seed; draw weights only from "
    "the generators of torch, numpy and Python's random"
)
#: Number of integers in the state of Python's random generator.
_PYTHON = 625


def seed_random_generators(seed: int) -> None:
    """Seed the generators of Python, numpy and torch, on every device."""
    random.seed(seed)
    np.random.seed(seed % 2**32)
    if torch.backends.cuda.is_built():
        torch.manual_seed(seed)
    else:
        # `torch.manual_seed` would also store a stack trace, for the seeding of CUDA later.
        torch.default_generator.manual_seed(seed)


class Generators(NamedTuple):
    """The states of the random generators of Python, NumPy and PyTorch at one time."""

    python: tuple[Any, ...]
    numpy: tuple[Any, ...]
    torch: Tensor
    cuda: Tensor | None

    @classmethod
    def capture_states(cls, device: torch.device | None = None) -> Generators:
        """Return the present states of all random generators, including that of a CUDA device."""
        on_cuda = device is not None and device.type == "cuda"
        return cls(
            random.getstate(),
            np.random.get_state(),
            torch.get_rng_state(),
            torch.cuda.get_rng_state(device) if on_cuda else None,
        )

    def restore_states(self, device: torch.device | None = None) -> None:
        """Set all random generators to these states."""
        random.setstate(self.python)
        np.random.set_state(self.numpy)
        torch.set_rng_state(self.torch)
        if self.cuda is not None:
            torch.cuda.set_rng_state(self.cuda, device)

    def differ_from(self, others: Generators) -> bool:
        """Return whether these states differ from other states."""
        pairs = zip(self.convert_to_tensors(), others.convert_to_tensors(), strict=True)
        return not all(torch.allclose(a, b, rtol=0, atol=0, equal_nan=True) for a, b in pairs)

    def differ_in_python_or_numpy(self, others: Generators) -> bool:
        """Return whether numbers were drawn from Python's or NumPy's generator between two states.

        Both states must follow from one seed.
        """
        # These parts of NumPy's state change with each draw: a position, and a stored normal number.
        return self.python != others.python or self.numpy[2:] != others.numpy[2:]

    def convert_to_tensors(self) -> list[Tensor]:
        """Return the states as tensors of fixed length, which `from_tensors` converts back.

        Python and numpy draw two normal numbers together and store the second; NaN stands for none.
        """
        _, python, half = self.python
        _, keys, position, has_half, other = self.numpy
        halves = [math.nan if half is None else half, other if has_half else math.nan]
        numbers = torch.tensor([*python, *keys.tolist(), position])
        states = [numbers, torch.tensor(halves, dtype=torch.float64), self.torch, self.cuda]
        return [t for t in states if t is not None]

    @classmethod
    def from_tensors(cls, tensors: Sequence[Tensor]) -> Generators:
        """Return the states that were converted to these tensors."""
        numbers, halves, of_torch, *of_cuda = tensors
        half, other = (None if math.isnan(h) else h for h in halves.tolist())
        *ints, position = numbers.tolist()
        python, keys = ints[:_PYTHON], np.array(ints[_PYTHON:], dtype=np.uint32)
        return cls(
            (3, tuple(python), half),
            ("MT19937", keys, position, int(other is not None), other or 0.0),
            of_torch,
            of_cuda[0] if of_cuda else None,
        )


@contextmanager
def preserve_random_generators(device: torch.device | None = None) -> Iterator[Generators]:
    """Restore the states of all random generators after the block. Yield these states."""
    states = Generators.capture_states(device)
    try:
        yield states
    finally:
        states.restore_states(device)
