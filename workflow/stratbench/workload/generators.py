"""The generators of random numbers that a network may draw from: Python's, numpy's and torch's."""

from __future__ import annotations

import random
from collections.abc import Iterator
from contextlib import contextmanager
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor


def seed_generators(seed: int) -> None:
    """Seed all of them, on every device."""
    random.seed(seed)
    np.random.seed(seed % 2**32)
    torch.manual_seed(seed)


class Generators(NamedTuple):
    """Their states, as tensors in host memory: integers of Python's and numpy's, bytes of torch's.

    Python and numpy keep the second of two normal numbers that they draw together: `halves`, NaN for none.
    """

    python: Tensor
    numpy: Tensor
    halves: Tensor
    torch: Tensor
    cuda: Tensor | None

    @classmethod
    def now(cls, device: torch.device | None = None) -> Generators:
        """The states now; `device`: a CUDA device whose generator counts, too."""
        _, python, half = random.getstate()
        _, keys, position, has_half, other = np.random.get_state()
        halves = [np.nan if half is None else half, other if has_half else np.nan]
        on_cuda = device is not None and device.type == "cuda"
        return cls(
            torch.tensor(python),
            torch.tensor([*keys.tolist(), position]),
            torch.tensor(halves, dtype=torch.float64),
            torch.get_rng_state(),
            torch.cuda.get_rng_state(device) if on_cuda else None,
        )

    def put_back(self, device: torch.device | None = None) -> None:
        """Make the generators what they were."""
        half, other = (None if np.isnan(h) else h for h in self.halves.tolist())
        random.setstate((3, tuple(self.python.tolist()), half))
        *keys, position = self.numpy.tolist()
        np.random.set_state(("MT19937", keys, position, int(other is not None), other or 0.0))
        torch.set_rng_state(self.torch)
        if self.cuda is not None:
            torch.cuda.set_rng_state(self.cuda, device)

    def differ_from(self, others: Generators) -> bool:
        """Whether numbers were drawn between the two."""
        pairs = zip(self.tensors(), others.tensors(), strict=True)
        return not all(torch.allclose(a, b, rtol=0, atol=0, equal_nan=True) for a, b in pairs)

    def tensors(self) -> list[Tensor]:
        """All that there are, to be written, or read into."""
        return [t for t in self if t is not None]


@contextmanager
def generators_put_back(device: torch.device | None = None) -> Iterator[Generators]:
    """All generators are after the block what they were before; yields their states then."""
    kept = Generators.now(device)
    try:
        yield kept
    finally:
        kept.put_back(device)
