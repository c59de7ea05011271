"""Tries a user's own task before any training: its loss, its score, and how losses of parts add up.

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
    get_default_task_name,
    get_task,
    has_value_targets,
)
from stratbench.workload.users_code import ERRORS, ModelError, format_user_error

if TYPE_CHECKING:
    from torch import Tensor

    from stratbench.cell.settings import Settings

#: Approximate number of elements of the random outputs with which the loss of a task is tried.
TRIED_NUMBERS = 1 << 21
#: Number of positions of a text with which a task is tried. It is small, because each position has a score
#: for each token of the vocabulary.
TRIED_POSITIONS = 16


#: Message on a task whose loss for a batch is not the mean of the losses of the batch's parts.
NO_SUM = (
    "its loss over a batch is not the mean over the batch's parts: the training depends on the size of "
    "each worker's batch, of its parts (gradient_accumulation_steps) and of micro-batches; return (sum, "
    f"weight), or compare equal parts only {format_help_address('is not the mean over')}"
)


def run_task_trial(
    settings: Settings, shape: Sequence[int], classes: int, has_values: bool
) -> tuple[Task, LossKind]:
    """Return a cell's task and the kind of its loss. A user's own task is tried first.

    Cells do this before they train, and so does `stratbench check`. The trial
    takes `TRIED_POSITIONS` positions of a text, or all if the task does not take fewer.

    Args:
        settings: Settings of the cell.
        shape: Shape of a sample.
        classes: Number of classes, or values of a target.
        has_values: Whether the targets are values instead of class numbers.

    Raises:
        ModelError: If the task fails.
    """
    task = get_task(settings, shape, has_values)
    if not settings.own_task:
        return task, task.loss_kind
    what = OwnTask(settings.own_task["call"])
    each = (
        shape if get_default_task_name(shape) == "next-token" else (classes,) if has_values else ()
    )
    if get_default_task_name(shape) == "next-token" and shape[0] > TRIED_POSITIONS:
        try:
            return task, check_task_outputs(task, what, classes, (2, TRIED_POSITIONS))
        except ModelError:
            if not _accepts_fake_tensors(task, classes, (2, *each)):
                raise
    return task, check_task_outputs(task, what, classes, (2, *each))


def _accepts_fake_tensors(task: Task, classes: int, target_shape: Sequence[int]) -> bool:
    """Return whether a task's loss and score run on fake tensors. The targets have the given shape."""
    import torch

    from stratbench.workload.known_values import KnownValueFakeMode

    with KnownValueFakeMode():
        y = torch.empty(
            target_shape, dtype=torch.float32 if has_value_targets(task) else torch.int64
        )
        x = torch.empty(compute_output_shape(task, target_shape, classes), requires_grad=True)
        try:
            task.loss(x, y), task.score(x, y)
        except ERRORS:  # the user's code may raise any exception
            return False
    return True


def check_task_outputs(
    task: Task, own_task: OwnTask, classes: int, target_shape: Sequence[int]
) -> LossKind:
    """Try a user's task on random outputs, and return the kind of its loss.

    The task is tried in float32 as in training, and in float64 as in evaluation.

    Args:
        task: The task.
        own_task: Specification of the task.
        classes: Number of classes.
        target_shape: Shape of the targets.

    Raises:
        ModelError: If the task fails, or does not return a loss and scores.
    """
    import torch

    shape = compute_output_shape(task, target_shape, classes)
    for dtype in (torch.float32, torch.float64):
        y = torch.zeros(target_shape, dtype=dtype if has_value_targets(task) else torch.int64)
        x = torch.randn(
            shape, dtype=dtype, generator=torch.Generator().manual_seed(0)
        ).requires_grad_()
        shapes = _describe_arguments(x, y, ", all 0" if has_value_targets(task) else "")
        loss, _ = _compute_loss(task, own_task, x, y, shapes)
        if loss.dim() or not loss.requires_grad:
            raise ModelError(
                f"{own_task}: its method loss, called with {shapes}, returned a tensor "
                f"{list(loss.shape)}{'' if loss.requires_grad else ' without a gradient'}; return the mean "
                "as a scalar with a gradient, or (sum, weight)"
            )
        try:
            score = task.score(x, y)
        except ERRORS as e:
            raise ModelError(
                f"{own_task}: its method score, called with {shapes}, raised {format_user_error(e)}"
            ) from e
        if not isinstance(score, torch.Tensor):
            raise ModelError(
                f"{own_task}: its method score returned a {type(score).__name__}; return a tensor"
            )
        if list(score.shape[:1]) != list(target_shape[:1]):
            raise ModelError(
                f"{own_task}: its method score, called with {shapes}, returned a tensor "
                f"{list(score.shape)}; return a score per sample, [{target_shape[0]}] or "
                f"[{target_shape[0]}, ...]"
            )
    return _determine_loss_kind(task, own_task, classes, target_shape)


def _describe_arguments(outputs: Tensor, targets: Tensor, values: str) -> str:
    """Return a text on outputs and targets for messages."""
    dtype = str(outputs.dtype).removeprefix("torch.")
    return f"outputs {list(outputs.shape)} in {dtype} and targets {list(targets.shape)}{values}"


def _compute_loss(
    task: Task, own_task: OwnTask, outputs: Tensor, targets: Tensor, shapes_text: str
) -> tuple[Tensor, Tensor | None]:
    """Call a task's method `loss`. Return the loss and its weight, or the loss and None if it has no weight.

    Args:
        task: The task.
        own_task: Specification of the task.
        outputs: Outputs.
        targets: Targets.
        shapes_text: Text on the shapes of both, for messages.

    Raises:
        ModelError: If the call fails, or does not return a loss.
    """
    import torch

    try:
        result = task.loss(outputs, targets)
    except ERRORS as e:
        raise ModelError(
            f"{own_task}: its method loss, called with {shapes_text}, raised {format_user_error(e)}"
        ) from e
    parts = result if isinstance(result, tuple) else (result,)
    number = isinstance(parts[-1], torch.Tensor) or (
        len(parts) == 2 and type(parts[-1]) in (int, float)
    )
    if not (len(parts) <= 2 and isinstance(parts[0], torch.Tensor) and number):
        kinds = ", ".join(type(part).__name__ for part in parts)
        kinds = f"({kinds})" if isinstance(result, tuple) else kinds
        raise ModelError(
            f"{own_task}: its method loss returned a {kinds}; return a tensor, or (sum, weight)"
        )
    loss, weight = compute_loss_and_weight(task, outputs, targets)
    if weight is not None and (weight.dim() or not 0 <= float(weight) < math.inf):
        raise ModelError(
            f"{own_task}: its method loss, called with {shapes_text}, returned the weight "
            f"{weight.tolist()}; return a number of at least 0"
        )
    return loss, weight


def _determine_loss_kind(
    task: Task, own_task: OwnTask, classes: int, target_shape: Sequence[int]
) -> LossKind:
    """Return the kind of a task's loss. It is found by comparing the losses of a batch and its halves."""
    import torch

    draw = torch.Generator().manual_seed(0)
    if has_value_targets(task):
        whole = (6, *target_shape[1:])
        y = torch.randn(whole, dtype=torch.float64, generator=draw)
        try:
            return _compare_losses(task, own_task, classes, y, ", random numbers")
        except ModelError:
            # Some losses take no such targets: the binary cross-entropy, or one of a class number.
            y = torch.randint(2, whole, dtype=torch.float64, generator=draw)
            return _compare_losses(task, own_task, classes, y, ", 0 or 1")
    each = math.prod(target_shape[1:])
    most = min(classes // each + 1, TRIED_NUMBERS // (2 * classes * each))
    half = max(3 if each == 1 else 1, most)
    number = torch.arange(half * each)
    # Labels alternate from the first and from the last: a loss that ignores a label usually ignores one of
    # these.
    varied = torch.where(number % 2 == 0, number // 2, -1 - number // 2) % classes
    # The second half has only the label 0. So each label occurs unequally often in the two halves, which
    # shows whether a loss ignores it.
    y = torch.cat([varied, torch.zeros_like(varied)]).view(2 * half, *target_shape[1:])
    return _compare_losses(task, own_task, classes, y, "")


def _compare_losses(
    task: Task, own_task: OwnTask, classes: int, targets: Tensor, values: str
) -> LossKind:
    """Return the kind of a task's loss by these targets and random outputs.

    Args:
        task: The task.
        own_task: Specification of the task.
        classes: Number of classes.
        targets: Targets of a batch, whose first and second half are compared with it.
        values: Text on the values of the targets, for messages.

    Raises:
        ModelError: If the loss does not take these targets.
    """
    import torch

    half = len(targets) // 2
    x = torch.randn(
        compute_output_shape(task, targets.shape, classes),
        dtype=torch.float64,
        generator=torch.Generator().manual_seed(1),
    )
    arguments = _describe_arguments(x, targets, values)
    losses = []
    for part in (slice(None), slice(half), slice(half, None)):
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(0)
            loss, weight = _compute_loss(
                task, own_task, x[part].requires_grad_(), targets[part], arguments
            )
        losses.append((float(loss.detach()), 1.0 if weight is None else float(weight)))
    weighs = weight is not None
    (loss, weight), *halves = losses
    sums = [sum(each) / (1 if weighs else 2) for each in zip(*halves, strict=True)]
    adds_up = all(
        math.isclose(whole, of_parts, rel_tol=1e-9, abs_tol=1e-12)
        for whole, of_parts in zip((loss, weight), sums, strict=True)
    )
    return LossKind(weighs, adds_up)
