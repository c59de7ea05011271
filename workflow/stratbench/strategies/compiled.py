"""Checks, in the warm-up, that compiled code computes the same gradients as uncompiled (eager) code."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch
import torch.distributed as dist

from stratbench.cell.text.help_page import format_help_address
from stratbench.workload.generators import Generators
from stratbench.workload.users_code import Refused

if TYPE_CHECKING:
    from torch import Tensor

    from stratbench.strategies.base import Strategy, Worker

#: Largest accepted relative difference between compiled and eager (uncompiled) gradients. The second bound is
#: for 16 bits and TensorFloat-32, whose sums depend more on their order.
BOUND, ROUNDED_BOUND = 1e-2, 0.2
#: Largest accepted factor between the norms of compiled and eager gradients if forward draws random numbers.
#: Compiled code draws other random numbers.
RANDOM_FACTOR = 10.0
#: The check is skipped if the compiled step used more than this share of the device's memory. Its eager step
#: needs more memory than a compiled step.
MAX_COMPILED_MEMORY_SHARE = 0.5


def check_compiled_gradients(strategy: Strategy, worker: Worker, x: Tensor, y: Tensor) -> None:
    """Raise Refused if compiled code and eager code compute different gradients of a batch.

    All workers must call it. `Strategy.restore` undoes its changes, except for the random generators.

    Args:
        strategy: The strategy.
        worker: This worker.
        x: Inputs.
        y: Targets.
    """
    if not _has_memory_for_eager_step(worker):
        print(
            "compiled gradients were not compared with eager ones, whose step may not fit into memory",
            flush=True,
        )
        return
    before = Generators.capture_states(worker.device)
    compiled, strategy.compiled = strategy.compiled, getattr(strategy, "module", strategy.model)
    eager = strategy.gradients_of(x, y)
    strategy.compiled = compiled
    if not eager:
        return
    is_random = before.differ_from(Generators.capture_states(worker.device))
    compiled_gradients = strategy.gradients_of(x, y)
    if is_random:
        error, bound = _compute_largest_norm_ratio(compiled_gradients, eager), RANDOM_FACTOR
        how_they_differ = "whose norms differ from eager ones by a factor of {:.3g}"
    else:
        s = worker.settings
        is_rounded = s.precision not in ("fp32", "fp64")
        error, bound = (
            _compute_relative_distance(compiled_gradients, eager),
            ROUNDED_BOUND if is_rounded else BOUND,
        )
        how_they_differ = "which differ from eager ones by {:.3g} of their norm"
    if not (worst := _find_largest_over_workers(error, worker)) <= bound:
        raise Refused(
            f"model {worker.settings.model!r}: compile = true: code compiled by PyTorch {torch.__version__} "
            f"computes wrong gradients, {how_they_differ.format(worst)}; set compile to false "
            f"{format_help_address('computes wrong gradients')}"
        )


def _compute_relative_distance(actual: Sequence[Tensor], expected: Sequence[Tensor]) -> Tensor:
    """Return the norm of the gradients' difference, relative to the norm of the expected gradients.

    The result is 0 if the expected norm is 0 or not finite.
    """
    size = _compute_total_norm(expected)
    if not size.isfinite() or size == 0:
        return torch.zeros_like(size)
    return _compute_total_norm([a - b for a, b in zip(actual, expected, strict=True)]) / size


def _compute_largest_norm_ratio(actual: Sequence[Tensor], expected: Sequence[Tensor]) -> Tensor:
    """Return the largest factor by which the norms of one parameter's two gradients differ.

    Gradients with a negligible norm are ignored.
    """
    norms = torch.stack(
        [
            torch.stack([_compute_total_norm([a]), _compute_total_norm([b])])
            for a, b in zip(actual, expected, strict=True)
        ]
    )
    size = _compute_total_norm(expected)
    norms = norms[norms[:, 1] > 1e-3 * size]
    if not size.isfinite() or not len(norms):
        return torch.ones_like(size)
    ratio = norms[:, 0] / norms[:, 1]
    return torch.maximum(ratio, 1 / ratio).max()


def _compute_total_norm(tensors: Sequence[Tensor]) -> Tensor:
    """Return the Euclidean norm of all tensors as one vector, in float64."""
    each = [t.detach().to_dense() if t.is_sparse else t.detach() for t in tensors]
    wide = [t.to(torch.complex128 if t.is_complex() else torch.float64) for t in each]
    return torch.stack([torch.linalg.vector_norm(t) for t in wide]).norm()


def _has_memory_for_eager_step(worker: Worker) -> bool:
    """Return whether all workers have enough free memory for an eager step."""
    share = torch.zeros((), dtype=torch.float64, device=worker.device)
    if worker.device.type == "cuda":
        most = torch.cuda.max_memory_allocated(worker.device)
        share += most / torch.cuda.get_device_properties(worker.device).total_memory
    return _find_largest_over_workers(share, worker) <= MAX_COMPILED_MEMORY_SHARE


def _find_largest_over_workers(value: Tensor, worker: Worker) -> float:
    """Return the largest of the workers' values; NaN counts as infinity.

    Without a process group, it is this worker's value.
    """
    value = value.nan_to_num(nan=torch.inf)
    if worker.world_size > 1 and dist.is_initialized():
        dist.all_reduce(value, op=dist.ReduceOp.MAX)
    return float(value)
