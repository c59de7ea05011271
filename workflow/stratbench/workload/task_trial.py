"""Tries a cell's task before any training: its loss, its score, and whether losses of parts add up.

torch is imported inside functions, since the plan's pages import this module.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import TYPE_CHECKING

from stratbench.cell.text.help_page import format_help_address
from stratbench.workload.tasks import (
    LossKind,
    OwnTask,
    Task,
    compute_loss_and_weight,
    compute_output_shape,
    get_default_task,
    get_task,
    has_value_targets,
)
from stratbench.workload.users_code import ModelError, format_user_error

if TYPE_CHECKING:
    from torch import Tensor

    from stratbench.cell.settings import Settings

#: Approximate number of elements of the outputs whose loss is compared with the mean over their halves.
TRIED_NUMBERS = 1 << 21
#: Largest number of positions of a text with which a task is tried: each has scores for the whole vocabulary.
TRIED_POSITIONS = 16


#: Message on a loss that does not add up over the parts of a batch, with the remedy.
NO_SUM = (
    "its loss over a batch is not the mean over the batch's parts: the training depends on the size of "
    "each worker's batch, of its parts (gradient_accumulation_steps) and of micro-batches; return (sum, "
    f"weight), or compare equal parts only {format_help_address('is not the mean over')}"
)


def run_task_trial(
    s: Settings, shape: Sequence[int], classes: int, values: bool
) -> tuple[Task, LossKind]:
    """Return a cell's task and the kind of its loss.

    A user's own task is tried first. Cells do this before they train, and `check` does it, too. The trial
    takes `TRIED_POSITIONS` positions of a text, or all if the task does not take fewer.

    Args:
        s: Settings of the cell.
        shape: Shape of a sample.
        classes: Number of classes, or values of a target.
        values: Whether the targets are values instead of class numbers.

    Raises:
        ModelError: If the task fails.
    """
    task = get_task(s, shape, values)
    if not s.own_task:
        return task, task.loss_kind
    what = OwnTask(s.own_task["call"])
    each = shape if get_default_task(shape) == "next-token" else (classes,) if values else ()
    if get_default_task(shape) == "next-token" and shape[0] > TRIED_POSITIONS:
        try:
            return task, check_task_outputs(task, what, classes, (2, TRIED_POSITIONS))
        except ModelError:
            if not _accepts_fakes(task, classes, (2, *each)):
                raise
    return task, check_task_outputs(task, what, classes, (2, *each))


def _accepts_fakes(task: Task, classes: int, targets: Sequence[int]) -> bool:
    """Return whether a task takes outputs for targets of a shape, as fake tensors."""
    import torch

    from stratbench.workload.known_values import KnownFakes

    with KnownFakes():
        y = torch.empty(targets, dtype=torch.float32 if has_value_targets(task) else torch.int64)
        x = torch.empty(compute_output_shape(task, targets, classes), requires_grad=True)
        try:
            task.loss(x, y), task.score(x, y)
        except Exception:  # a user's task may raise anything
            return False
    return True


def check_task_outputs(task: Task, what: OwnTask, classes: int, targets: Sequence[int]) -> LossKind:
    """Try a task with random outputs for targets of a shape. Return the kind of its loss.

    It is tried in float32 as in training, and in float64 as in evaluation.

    Args:
        task: The task.
        what: Specification of the task.
        classes: Number of classes.
        targets: Shape of the targets.

    Raises:
        ModelError: If the task fails, or does not return a loss and scores.
    """
    import torch

    shape = compute_output_shape(task, targets, classes)
    for dtype in (torch.float32, torch.float64):
        y = torch.zeros(targets, dtype=dtype if has_value_targets(task) else torch.int64)
        x = torch.randn(
            shape, dtype=dtype, generator=torch.Generator().manual_seed(0)
        ).requires_grad_()
        shapes = f"outputs {list(x.shape)} in {str(dtype).removeprefix('torch.')} and targets {list(y.shape)}"
        loss, _ = _compute_loss(task, what, x, y, shapes)
        if loss.dim() or not loss.requires_grad:
            raise ModelError(
                f"{what}: loss of {shapes} returned a tensor {list(loss.shape)}"
                f"{'' if loss.requires_grad else ' without a gradient'}; return the mean as a scalar with a "
                "gradient, or (sum, weight)"
            )
        try:
            score = task.score(x, y)
        except Exception as e:
            raise ModelError(f"{what}: score of {shapes} raised {format_user_error(e)}") from e
        if not isinstance(score, torch.Tensor):
            raise ModelError(f"{what}: score returned a {type(score).__name__}; return a tensor")
        if list(score.shape[:1]) != list(targets[:1]):
            raise ModelError(
                f"{what}: score of {shapes} returned a tensor {list(score.shape)}; return a score per "
                f"sample, [{targets[0]}] or [{targets[0]}, ...]"
            )
    return _determine_loss_kind(task, what, classes, targets)


def _compute_loss(
    task: Task, what: OwnTask, x: Tensor, y: Tensor, shapes: str
) -> tuple[Tensor, Tensor | None]:
    """Call a task's loss, and return the loss and its weight, if any.

    Args:
        task: The task.
        what: Specification of the task.
        x: Outputs.
        y: Targets.
        shapes: Text on the shapes of both, for messages.

    Raises:
        ModelError: If the call fails, or does not return a loss.
    """
    import torch

    try:
        result = task.loss(x, y)
    except Exception as e:
        raise ModelError(f"{what}: loss of {shapes} raised {format_user_error(e)}") from e
    parts = result if isinstance(result, tuple) else (result,)
    number = isinstance(parts[-1], torch.Tensor) or (
        len(parts) == 2 and type(parts[-1]) in (int, float)
    )
    if not (len(parts) <= 2 and isinstance(parts[0], torch.Tensor) and number):
        kinds = ", ".join(type(part).__name__ for part in parts)
        kinds = f"({kinds})" if isinstance(result, tuple) else kinds
        raise ModelError(f"{what}: loss returned a {kinds}; return a tensor, or (sum, weight)")
    loss, weight = compute_loss_and_weight(task, x, y)
    if weight is not None and (weight.dim() or not 0 <= float(weight) < math.inf):
        raise ModelError(
            f"{what}: loss of {shapes} returned the weight {weight.tolist()}; return a number of at least 0"
        )
    return loss, weight


def _determine_loss_kind(
    task: Task, what: OwnTask, classes: int, targets: Sequence[int]
) -> LossKind:
    """Return the kind of a task's loss, by comparing a batch with its halves."""
    import torch

    draw = torch.Generator().manual_seed(0)
    if has_value_targets(task):
        half = 3
        y = torch.randn((2 * half, *targets[1:]), dtype=torch.float64, generator=draw)
    else:
        each = math.prod(targets[1:])
        most = min(classes // each + 1, TRIED_NUMBERS // (2 * classes * each))
        half = max(3 if each == 1 else 1, most)
        number = torch.arange(half * each)
        # Labels that a loss ignores usually are the first or the last, so these labels come first.
        varied = torch.where(number % 2 == 0, number // 2, -1 - number // 2) % classes
        # Whichever label is ignored, its number differs between the halves.
        y = torch.cat([varied, torch.zeros_like(varied)]).view(2 * half, *targets[1:])
    x = torch.randn(
        compute_output_shape(task, y.shape, classes), dtype=torch.float64, generator=draw
    )
    shapes = f"outputs {list(x.shape)} in float64 and targets {list(y.shape)}"
    losses = []
    for a, b in ((x, y), (x[:half], y[:half]), (x[half:], y[half:])):
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(0)
            loss, weight = _compute_loss(task, what, a.requires_grad_(), b, shapes)
        losses.append((float(loss.detach()), 1.0 if weight is None else float(weight)))
    weighs = weight is not None
    (loss, weight), *halves = losses
    sums = [sum(each) / (1 if weighs else 2) for each in zip(*halves, strict=True)]
    adds_up = all(
        math.isclose(whole, of_parts, rel_tol=1e-9, abs_tol=1e-12)
        for whole, of_parts in zip((loss, weight), sums, strict=True)
    )
    return LossKind(weighs, adds_up)
