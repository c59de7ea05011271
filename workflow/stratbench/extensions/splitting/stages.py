"""Divides a model into pipeline stages of similar work, and computes these stages.

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

#: Class in torch.distributed.pipelining for each value of the option `schedule`.
SCHEDULES = {
    "gpipe": schedules.ScheduleGPipe,
    "1f1b": schedules.Schedule1F1B,
    "interleaved": schedules.ScheduleInterleaved1F1B,
    "zero-bubble": schedules.ScheduleInterleavedZeroBubble,
}


#: Bytes of a parameter's training states per byte of the parameter: itself, its gradient and AdamW's two
#: moments.
STATES = 4


class MeasuredUnit(NamedTuple):
    """Cost per sample of one unit, a part of a model that a pipeline cannot divide further.

    The cost has the floating-point operations of forward, the bytes of the parameters, the shape of the
    output, and the bytes of activations that forward keeps for backward.
    """

    flops: int
    parameter_bytes: int
    shape: tuple[int, ...]
    kept_bytes: int = 0


def measure_unit_costs(model: nn.Module, units: list[list[Piece]], x: Tensor) -> list[MeasuredUnit]:
    """Return the cost of each unit of a model for one sample.

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
        own = {p for piece in unit for p in piece.iter_used_parameters(like)}
        weights = {get_storage_key(p.untyped_storage()) for p in own}
        kept: dict[int, int] = {}

        def record_saved_tensor(
            saved_tensor: Tensor,
            saved_bytes: dict[int, int] = kept,
            weight_storages: set[int] = weights,
        ) -> Tensor:
            storage = saved_tensor.untyped_storage()
            if (key := get_storage_key(storage)) not in weight_storages:
                saved_bytes[key] = storage.nbytes()
            return saved_tensor

        with (
            saved_tensors_hooks(record_saved_tensor, lambda t: t),
            FlopCounterMode(display=False, custom_mapping=make_flop_formulas()) as counter,
        ):
            for piece in unit:
                x = piece.compute_output(like, x)
        n_bytes = sum(p.nbytes for p in own)
        flops, shape = counter.get_total_flops(), tuple(x.shape[1:])
        figures.append(MeasuredUnit(flops, n_bytes, shape, sum(kept.values())))
        x = x.detach()
    return figures


def choose_unit_count_per_stage(
    units: Sequence[MeasuredUnit], pending_microbatches: Sequence[int]
) -> list[int]:
    """Return the number of consecutive units in each stage, such that the work is balanced.

    The largest work of a stage is as small as possible. Among such divisions, the largest memory of a stage
    is as small as possible. Memory is that of training states and of micro-batches of one sample, so that the
    division does not depend on the batch.

    Args:
        units: The measured units.
        pending_microbatches: For each stage, the largest number of micro-batches whose backward is pending at
            once.

    Raises:
        ValueError: If there are fewer units than stages.
    """
    stages = len(pending_microbatches)
    if len(units) < stages:
        raise ValueError(
            f"the model's {len(units)} units cannot be divided into {stages} pipeline stages; use fewer "
            "workers"
        )
    flops, saved_bytes = (
        [0, *accumulate(each)] for each in zip(*((u[0], u[3]) for u in units), strict=True)
    )
    held = [0, *accumulate(STATES * u.parameter_bytes for u in units)]

    def compute_stage_flops(_stage: int, first_unit: int, end_unit: int) -> float:
        return flops[end_unit] - flops[first_unit]

    most, _ = _minimize_largest_stage_cost(compute_stage_flops, len(units), stages)

    def compute_stage_memory_bytes(stage: int, first_unit: int, end_unit: int) -> float:
        if compute_stage_flops(stage, first_unit, end_unit) > most:
            return math.inf
        return (
            held[end_unit]
            - held[first_unit]
            + pending_microbatches[stage] * (saved_bytes[end_unit] - saved_bytes[first_unit])
        )

    _, ends = _minimize_largest_stage_cost(compute_stage_memory_bytes, len(units), stages)
    return [end - start for start, end in pairwise((0, *ends))]


def _minimize_largest_stage_cost(
    compute_cost: Callable[[int, int, int], float], num_units: int, num_stages: int
) -> tuple[float, tuple[int, ...]]:
    """Divide units into stages so that the largest stage cost is as small as possible.

    The result is this cost, and the index after the last unit of each stage.

    Args:
        compute_cost: Returns the cost of a stage with units from `start` to before `end`, or infinity if
            forbidden.
        num_units: Number of units.
        num_stages: Number of stages.
    """
    # For each number n: the best division of the first n units into the stages so far, as its largest stage
    # cost and the ends of the stages.
    best: dict[int, tuple[float, tuple[int, ...]]] = {0: (0, ())}
    for stage in range(1, num_stages + 1):
        ways = {
            end: [
                (max(dearest, compute_cost(stage - 1, start, end)), (*ends, end))
                for start, (dearest, ends) in best.items()
                if start < end
            ]
            for end in range(stage, num_units - num_stages + stage + 1)
        }
        best = {end: min(cuts) for end, cuts in ways.items() if cuts}
    return best[num_units]


class StageModule(nn.Module):
    """A module that computes one stage of a pipeline.

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
        # PyTorch's pipeline stage finds its parameters in this list, since the model is not a submodule.
        own = dict.fromkeys(p for piece in self.pieces for p in piece.iter_used_parameters(model))
        self.held = nn.ParameterList(own)
        self._model = (model,)

    def compute_stage_output(self, x: Tensor) -> Tensor:
        """Compute the stage's pieces one after the other, without mixed precision."""
        (model,) = self._model
        if x.dim() == 4:
            x = x.contiguous(memory_format=self._layout)
        for piece in self.pieces:
            x = piece.compute_output(model, x)
        if self._is_last:
            return x
        x = x.to(self._dtype).contiguous()
        # The schedule `zero-bubble` detaches the output in place, which PyTorch forbids for views.
        return x.clone() if is_view(x) else x

    def forward(self, x: Tensor) -> Tensor:
        with self._precision():
            return self.compute_stage_output(x)


class Stage(PipelineStage):
    """A pipeline stage that reports its phases of computation and its last backward.

    `mark` is called with the name of the phase that has ended. `last` is called with whether the next
    backward is the last of the step.
    """

    mark: Callable[[str], None]
    last: Callable[[bool], None]

    def _validate_fwd_input(self, *_: Any) -> None:
        """Accept any strides of the model's input, as PyTorch does from 2.13 on."""

    def _get_init_p2p_neighbors_ops(self) -> list[Any]:
        """Return no operations, because `Pipeline` has already connected the workers."""
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
