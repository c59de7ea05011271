"""Base class of strategies whose workers train separately and exchange their weights periodically."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, ClassVar

from stratbench.cell.text.words import format_names
from stratbench.strategies import base, collective

if TYPE_CHECKING:
    from torch import Tensor, nn


#: Number of weights whose distances are summed at a time. Larger numbers need larger temporary tensors.
SUMMED_NUMBERS = 1 << 20


class Local(collective.Collective):
    """Base class of strategies whose workers train separately and exchange their weights periodically.

    Weights and BatchNorm's statistics are views of flat tensors, so that an exchange copies nothing. Each
    worker keeps its own optimizer state. The mean of all workers' weights is evaluated.
    """

    family = "own weights"
    rigid = "each worker has its own weights, which are lost with the worker"
    buffers_note = "each worker has its own; they are averaged together with the weights"
    evaluated_on = "the workers' mean weights and BatchNorm statistics"
    breakdown_note: ClassVar[str] = (
        "exposed_communication is the exchange of weights after the update, including waits for slower "
        "workers, as a mean over all steps"
    )

    @classmethod
    def iter_refused_values(
        cls, options: dict[str, Any], values: Mapping[str, Any]
    ) -> Iterator[str]:
        if values["precision"] == "fp16":
            yield (
                ".precision = 'fp16': a worker whose gradients overflow would skip its step alone, because "
                "these workers do not share a loss scale; use bf16"
            )

    def iter_model_refusals(self, model: nn.Module, worker: base.Worker) -> Iterator[str]:
        yield from super().iter_model_refusals(model, worker)
        if names := [name for name, p in model.named_parameters() if p.is_complex()]:
            yield (
                f"{format_names(names)} is complex, but the distance of workers is computed in real numbers; "
                "keep the real and imaginary parts as two parameters"
            )

    def wrap(self, model: nn.Module, worker: base.Worker) -> nn.Module:
        self.weights = flatten_tensors([p for p in model.parameters() if p.requires_grad])
        buffers = [b for b in model.buffers() if b.is_floating_point()]
        self.statistics = flatten_tensors([*buffers, *self.list_changed_frozen_parameters()])
        return model

    @property
    def exchanged_tensors(self) -> list[Tensor]:
        """Flat tensors that the workers exchange: weights and BatchNorm statistics."""
        return [*self.weights, *self.statistics]

    def reset(self) -> None:
        super().reset()
        self.sent_bytes = 0.0
        self.distances: list[Tensor] = []

    def export_step_counts(self) -> dict[str, Any]:
        distances = [float(d) for d in self.distances]
        return super().export_step_counts() | {
            "sent_bytes": self.sent_bytes,
            "distances": distances,
        }

    def load_step_counts(self, counts: dict[str, Any]) -> None:
        import torch

        super().load_step_counts(counts)
        self.sent_bytes = counts["sent_bytes"]
        self.distances = [torch.tensor(d, dtype=torch.float64) for d in counts["distances"]]

    def step(self, x: Tensor, y: Tensor) -> Tensor:
        loss = super().step(x, y)
        self.worker.mark_phase_end("optimizer")
        self.exchange_weights()
        self.worker.mark_phase_end("exposed_communication")
        return loss

    def average_target_weight_over_replicas(self, own_weight: Tensor) -> Tensor:
        """Return the weight of this worker's batch, without an average over workers.

        Each worker trains by the mean loss over its own batch.
        """
        return own_weight

    def exchange_weights(self) -> None:
        """Exchange weights with other workers, if an exchange is due after `self.steps` steps."""
        raise NotImplementedError

    def is_exchange_due(self, period: int, start: int = 0) -> bool:
        """Return whether workers exchange their weights after the present step.

        They do so every `period` steps from step `start` on, and after the last step of the training.
        """
        since = self.steps - start
        return since > 0 and (since % period == 0 or self.steps == self.worker.total_steps)

    def average_tensors(self, tensors: Sequence[Tensor]) -> None:
        """Replace flat tensors by their mean over all workers."""
        import torch.distributed as dist

        workers = self.worker.world_size
        for flat in tensors if workers > 1 else ():
            dist.all_reduce(flat)
            flat /= workers
            self.sent_bytes += 2 * (workers - 1) / workers * flat.nbytes

    @contextmanager
    def open_evaluation_model(self) -> Iterator[nn.Module]:
        own, sent_bytes = [flat.clone() for flat in self.exchanged_tensors], self.sent_bytes
        self.average_tensors(self.exchanged_tensors)
        # Averaging for an evaluation does not count as traffic of the training.
        self.sent_bytes = sent_bytes
        self.distances.append(self.compute_distance_from_mean(own[: len(self.weights)]))
        with super().open_evaluation_model() as model:
            yield model
        for flat, before in zip(self.exchanged_tensors, own, strict=True):
            flat.copy_(before)

    def compute_distance_from_mean(self, own_weights: Sequence[Tensor]) -> Tensor:
        """Return the distance of the workers' weights from their mean, divided by the mean's norm.

        The distance is the root mean square over the workers, the consensus distance of Kong et al.,
        "Consensus Control for Decentralized Deep Learning", ICML 2021. `own_weights` are this worker's
        weights. The model has the mean weights when this method is called.
        """
        import torch
        import torch.distributed as dist

        squares = torch.zeros(2, dtype=torch.float64, device=self.worker.device)
        for mine, mean in zip(own_weights, self.weights, strict=True):
            for a, b in zip(mine.split(SUMMED_NUMBERS), mean.split(SUMMED_NUMBERS), strict=True):
                squares[0] += (a - b).square().sum()
                squares[1] += b.square().sum()
        if self.worker.world_size > 1:
            dist.all_reduce(squares)
        return (squares[0] / squares[1]).sqrt()

    def communication(self) -> dict[str, Any]:
        return collective.describe_ring_traffic(self.sent_bytes / max(1, self.steps))

    def report(self) -> dict[str, Any]:
        report = super().report()
        distances = [float(d) for d in self.distances]
        report["details"]["consensus_distance"] = [
            d if d < float("inf") else None for d in distances
        ]
        return report


def flatten_tensors(tensors: Sequence[Tensor]) -> list[Tensor]:
    """Return one flat tensor per dtype, of which `tensors` become views.

    The tensors keep their values and strides.
    """
    import torch

    from stratbench.workload.flat import compute_element_offsets_and_count, copy_into_flat_tensor

    by_dtype: dict[torch.dtype, list[Tensor]] = {}
    for t in tensors:
        by_dtype.setdefault(t.dtype, []).append(t)
    flats = []
    with torch.no_grad():
        for dtype, group in by_dtype.items():
            starts, numel = compute_element_offsets_and_count(group)
            flat = torch.zeros(numel, dtype=dtype, device=group[0].device)
            for t, start in zip(group, starts, strict=True):
                t.data = copy_into_flat_tensor(t.data, flat, start)
            flats.append(flat)
    return flats


def count_periods(steps: int, period: int) -> int:
    """Return the number of periods in `steps` steps. An incomplete last period counts."""
    return -(-max(0, steps) // period)
