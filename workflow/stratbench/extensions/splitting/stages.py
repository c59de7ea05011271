"""Divides a model into stages of a pipeline, and computes the stages by PyTorch's schedules.

Importing this file imports torch.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from contextlib import AbstractContextManager
from copy import deepcopy
from itertools import accumulate, pairwise
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks
from torch.distributed.pipelining import PipelineStage, schedules
from torch.utils.flop_counter import FlopCounterMode

from stratbench.extensions.splitting.pieces import Piece
from stratbench.workload.torch_internals import get_storage_key, is_view, make_flop_formulas

#: Class of torch.distributed.pipelining for each schedule.
SCHEDULES = {
    "gpipe": schedules.ScheduleGPipe,
    "1f1b": schedules.Schedule1F1B,
    "interleaved": schedules.ScheduleInterleaved1F1B,
    "zero-bubble": schedules.ScheduleInterleavedZeroBubble,
}


#: Size of a parameter with its training states in multiples of its own size: gradient and AdamW's two
#: moments.
STATES = 4


class MeasuredUnit(NamedTuple):
    """Cost of one unit of a model per sample.

    The cost has the operations of forward, the bytes of its parameters, the shape of its output, and the
    bytes that forward saves for backward.
    """

    flops: int
    parameter_bytes: int
    shape: tuple[int, ...]
    kept_bytes: int = 0


def measure_units(model: nn.Module, units: list[list[Piece]], x: Tensor) -> list[MeasuredUnit]:
    """Measure the cost of each unit of a model for one sample.

    The model runs on fake tensors of the active mode.

    Args:
        model: The model.
        units: Units of the model, each a list of pieces.
        x: Input of one sample.
    """
    tensors = [*model.parameters(), *model.buffers()]
    empty = {id(t): torch.empty(t.shape, dtype=t.dtype) for t in tensors}
    memo = {k: nn.Parameter(t) if t.is_floating_point() else t for k, t in empty.items()}
    like = deepcopy(model, memo)
    figures = []
    for unit in units:
        own = {p for piece in unit for p in piece.iter_parameters(like)}
        weights = {get_storage_key(p.untyped_storage()) for p in own}
        kept: dict[int, int] = {}

        def record_kept_tensor(
            t: Tensor, kept: dict[int, int] = kept, weights: set[int] = weights
        ) -> Tensor:
            storage = t.untyped_storage()
            if (key := get_storage_key(storage)) not in weights:
                kept[key] = storage.nbytes()
            return t

        with (
            saved_tensors_hooks(record_kept_tensor, lambda t: t),
            FlopCounterMode(display=False, custom_mapping=make_flop_formulas()) as counter,
        ):
            for piece in unit:
                x = piece.call(like, x)
        n_bytes = sum(p.nbytes for p in own)
        flops, shape = counter.get_total_flops(), tuple(x.shape[1:])
        figures.append(MeasuredUnit(flops, n_bytes, shape, sum(kept.values())))
        x = x.detach()
    return figures


def balance_stages(units: Sequence[MeasuredUnit], waiting: Sequence[int]) -> list[int]:
    """Divide consecutive units into stages of balanced work.

    The stage with the most work has the least possible work. Among equal divisions, the stage with the most
    memory has the least. Memory is that of states and of micro-batches of one sample, so that no cut depends
    on the batch. The result is the number of units of each stage.

    Args:
        units: The measured units.
        waiting: For each stage, the largest number of micro-batches whose backward is pending at once.

    Raises:
        ValueError: If there are fewer units than stages.
    """
    stages = len(waiting)
    if len(units) < stages:
        raise ValueError(f"{len(units)} units cannot be divided into {stages} stages")
    flops, saved_bytes = (
        [0, *accumulate(each)] for each in zip(*((u[0], u[3]) for u in units), strict=True)
    )
    held = [0, *accumulate(STATES * u.parameter_bytes for u in units)]

    def compute_stage_work(_stage: int, start: int, end: int) -> float:
        return flops[end] - flops[start]

    most, _ = _minimize_max_cost(compute_stage_work, len(units), stages)

    def compute_stage_memory(stage: int, start: int, end: int) -> float:
        if compute_stage_work(stage, start, end) > most:
            return math.inf
        return held[end] - held[start] + waiting[stage] * (saved_bytes[end] - saved_bytes[start])

    _, ends = _minimize_max_cost(compute_stage_memory, len(units), stages)
    return [end - start for start, end in pairwise((0, *ends))]


def _minimize_max_cost(
    cost: Callable[[int, int, int], float], n: int, stages: int
) -> tuple[float, tuple[int, ...]]:
    """Find the division into stages whose largest cost is smallest.

    The result is that cost and the ends of the stages.

    Args:
        cost: Returns the cost of a stage with units from `start` to before `end`, or infinity if forbidden.
        n: Number of units.
        stages: Number of stages.
    """
    # The best division of the first units into the stages so far, by number of units.
    best: dict[int, tuple[float, tuple[int, ...]]] = {0: (0, ())}
    for stage in range(1, stages + 1):
        ways = {
            end: [
                (max(dearest, cost(stage - 1, start, end)), (*ends, end))
                for start, (dearest, ends) in best.items()
                if start < end
            ]
            for end in range(stage, n - stages + stage + 1)
        }
        best = {end: min(cuts) for end, cuts in ways.items() if cuts}
    return best[n]


class StageModule(nn.Module):
    """The modules of one stage of the pipeline.

    The module's output is contiguous and has the dtype of the weights. `precision` makes a context of mixed
    precision for training, and `layout` is the memory format of images.
    """

    def __init__(
        self,
        model: nn.Module,
        pieces: Iterable[Piece],
        is_last: bool,
        dtype: torch.dtype,
        layout: torch.memory_format,
        precision: Callable[[], AbstractContextManager],
    ) -> None:
        super().__init__()
        self.pieces, self._is_last, self._dtype = list(pieces), is_last, dtype
        self._layout, self._precision = layout, precision
        # Schedules read the parameters of a stage here; the model itself has the names of all parameters.
        own = dict.fromkeys(p for piece in self.pieces for p in piece.iter_parameters(model))
        self.held = nn.ParameterList(own)
        self._model = (model,)

    def compute_modules(self, x: Tensor) -> Tensor:
        """Compute the modules in sequence, without mixed precision."""
        (model,) = self._model
        if x.dim() == 4:
            x = x.contiguous(memory_format=self._layout)
        for piece in self.pieces:
            x = piece.call(model, x)
        if self._is_last:
            return x
        x = x.to(self._dtype).contiguous()
        # Zero-bubble frees the autograd graph in place, which is not possible for views.
        return x.clone() if is_view(x) else x

    def forward(self, x: Tensor) -> Tensor:
        with self._precision():
            return self.compute_modules(x)


class Stage(PipelineStage):
    """A pipeline stage that reports when it computes, and when its gradients are complete.

    `mark` is called with the name of the phase that has ended. `last` is called with whether the next
    backward is the last of the step.
    """

    mark: Callable[[str], None]
    last: Callable[[bool], None]

    def _validate_fwd_input(self, *_: Any) -> None:
        """Accept any strides of the model's input, as PyTorch does from 2.13 on."""

    def _get_init_p2p_neighbors_ops(self) -> list[Any]:
        """Return no operations, because `Pipeline._open_connections` has already connected the workers."""
        return []

    def forward_one_chunk(self, *args: Any, **kwargs: Any) -> Any:
        self.mark("bubble")
        output = super().forward_one_chunk(*args, **kwargs)
        self.mark("forward")
        return output

    def backward_one_chunk(self, bwd_chunk_id: int, *args: Any, **kwargs: Any) -> None:
        self.mark("bubble")
        self.last(kwargs.get("last_backward", False))
        super().backward_one_chunk(bwd_chunk_id, *args, **kwargs)
        if not self.is_first and bwd_chunk_id in self.bwd_cache:
            gradients = self.bwd_cache[bwd_chunk_id]
            self.bwd_cache[bwd_chunk_id] = tuple(
                g if g is None else g.contiguous() for g in gradients
            )
        self.mark("backward")

    def backward_weight_one_chunk(self, *args: Any, **kwargs: Any) -> None:
        self.mark("bubble")
        self.last(kwargs.get("last_backward", False))
        super().backward_weight_one_chunk(*args, **kwargs)
        self.mark("backward")
