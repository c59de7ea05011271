"""The base of strategies whose workers train by themselves, and exchange weights between their updates."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, ClassVar

from stratbench.cell.text.words import names_text
from stratbench.strategies import base

if TYPE_CHECKING:
    from torch import Tensor, nn


#: Numbers of which a distance is summed up at once: temporary tensors stay small.
SUMMED_NUMBERS = 1 << 20


class Local(base.Collective):
    """Base of strategies whose workers update their own weights and exchange them at times.

    Weights and BatchNorm's statistics are views of flat tensors, so that an exchange copies nothing. The
    optimizer's state stays each worker's own. The mean of all workers is evaluated.
    """

    family = "own weights"
    rigid = "each worker has weights of its own, which end with the worker"
    buffers_note = "each worker keeps its own, and they are averaged with the weights"
    evaluated_on = "the workers' mean weights and BatchNorm statistics"
    breakdown_note: ClassVar[str] = (
        "exposed_communication is the exchange of weights after the update, waiting for slower workers "
        "included, as a mean over all steps"
    )

    @classmethod
    def refusals(cls, options: dict[str, Any], values: Mapping[str, Any]) -> Iterator[str]:
        if values["precision"] == "fp16":
            yield (
                ".precision = 'fp16': a worker whose gradient overflows would skip its step alone, since "
                "workers that train by themselves share no loss scale; use bf16"
            )

    def refusals_of_model(self, model: nn.Module, worker: base.Worker) -> Iterator[str]:
        yield from super().refusals_of_model(model, worker)
        if names := [name for name, p in model.named_parameters() if p.is_complex()]:
            yield (
                f"how far workers are apart is summed in real numbers, and {names_text(names)} is complex; "
                "keep its real and imaginary part as two parameters"
            )

    def wrap(self, model: nn.Module, worker: base.Worker) -> nn.Module:
        self.weights = flattened([p for p in model.parameters() if p.requires_grad])
        buffers = [b for b in model.buffers() if b.is_floating_point()]
        self.statistics = flattened([*buffers, *self.frozen_written()])
        return model

    @property
    def exchanged(self) -> list[Tensor]:
        """The flat tensors that the workers exchange."""
        return [*self.weights, *self.statistics]

    def reset(self) -> None:
        super().reset()
        self.sent_bytes = 0.0
        self.distances: list[Tensor] = []

    def counts(self) -> dict[str, Any]:
        distances = [float(d) for d in self.distances]
        return super().counts() | {"sent_bytes": self.sent_bytes, "distances": distances}

    def go_on(self, counts: dict[str, Any]) -> None:
        import torch

        super().go_on(counts)
        self.sent_bytes = counts["sent_bytes"]
        self.distances = [torch.tensor(d, dtype=torch.float64) for d in counts["distances"]]

    def step(self, x: Tensor, y: Tensor) -> Tensor:
        loss = super().step(x, y)
        self.worker.mark("optimizer")
        self.exchange()
        self.worker.mark("exposed_communication")
        return loss

    def mean_weight(self, own: Tensor) -> Tensor:
        """Return its own: each worker trains by the mean over its own batch."""
        return own

    def exchange(self) -> None:
        """Exchange weights with the other workers, if it is due after `self.steps` steps."""
        raise NotImplementedError

    def is_due(self, period: int, start: int = 0) -> bool:
        """Return whether a period of steps from `start`, or the training, has ended."""
        since = self.steps - start
        return since > 0 and (since % period == 0 or self.steps == self.worker.total_steps)

    def average(self, tensors: Sequence[Tensor]) -> None:
        """Replace flat tensors by their mean over the workers."""
        import torch.distributed as dist

        workers = self.worker.world_size
        for flat in tensors if workers > 1 else ():
            dist.all_reduce(flat)
            flat /= workers
            self.sent_bytes += 2 * (workers - 1) / workers * flat.nbytes

    @contextmanager
    def evaluating(self) -> Iterator[nn.Module]:
        own, sent_bytes = [flat.clone() for flat in self.exchanged], self.sent_bytes
        self.average(self.exchanged)
        self.sent_bytes = sent_bytes  # no part of a step
        self.distances.append(self.distance_from_mean(own[: len(self.weights)]))
        with super().evaluating() as model:
            yield model
        for flat, before in zip(self.exchanged, own, strict=True):
            flat.copy_(before)

    def distance_from_mean(self, own: Sequence[Tensor]) -> Tensor:
        """Return the relative distance of the workers' weights from their mean.

        The root of the mean square over the workers: the consensus distance of Kong et al., "Consensus
        Control for Decentralized Deep Learning", ICML 2021, divided by the norm of the mean. The model has
        the mean, and `own` are this worker's weights.
        """
        import torch
        import torch.distributed as dist

        squares = torch.zeros(2, dtype=torch.float64, device=self.worker.device)
        for mine, mean in zip(own, self.weights, strict=True):
            for a, b in zip(mine.split(SUMMED_NUMBERS), mean.split(SUMMED_NUMBERS), strict=True):
                squares[0] += (a - b).square().sum()
                squares[1] += b.square().sum()
        if self.worker.world_size > 1:
            dist.all_reduce(squares)
        return (squares[0] / squares[1]).sqrt()

    def communication(self) -> dict[str, Any]:
        return base.ring_traffic(self.sent_bytes / max(1, self.steps))

    def report(self) -> dict[str, Any]:
        report = super().report()
        distances = [float(d) for d in self.distances]
        report["details"]["consensus_distance"] = [
            d if d < float("inf") else None for d in distances
        ]
        return report


def flattened(tensors: Sequence[Tensor]) -> list[Tensor]:
    """Return a flat tensor per number format, and make `tensors` views of it, with their strides."""
    import torch

    from stratbench.workload.flat import copied_into, offsets_of

    by_dtype: dict[torch.dtype, list[Tensor]] = {}
    for t in tensors:
        by_dtype.setdefault(t.dtype, []).append(t)
    flats = []
    with torch.no_grad():
        for dtype, group in by_dtype.items():
            starts, numel = offsets_of(group)
            flat = torch.zeros(numel, dtype=dtype, device=group[0].device)
            for t, start in zip(group, starts, strict=True):
                t.data = copied_into(t.data, flat, start)
            flats.append(flat)
    return flats


def periods(steps: int, period: int) -> int:
    """Return the number of periods that end in `steps` steps; the last may be shorter."""
    return -(-max(0, steps) // period)
