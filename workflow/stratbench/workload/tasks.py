"""Defines training tasks: the loss to minimise, and the score of a model's outputs.

A user's own task is a class with the same attributes and methods, named as `package.module:Task`. torch is
imported inside functions, since the Snakefile imports this module.
"""

from __future__ import annotations

import inspect
import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal, NamedTuple

from stratbench.workload.users_code import (
    ERRORS,
    ModelError,
    format_user_error,
    import_user_callable,
    invalid_call_reason,
)

if TYPE_CHECKING:
    from torch import Tensor

    from stratbench.cell.settings import Settings


class LossKind(NamedTuple):
    """How the loss of a batch follows from the losses of the parts into which the batch is divided."""

    #: Whether the task returns the sum of losses and a weight to divide it by, instead of a mean loss.
    weighs: bool = False
    #: Whether the loss of a batch is the mean (or the sum) of the losses of its equal parts.
    adds_up: bool = True


class Task:
    """A training task: loss and score of a model's outputs [batch, ...] for targets [batch, ...].

    The score of a model is the mean over the test set of each answer's score. Workers can therefore divide
    the test set, and the score's standard error is known.
    """

    #: Name of the score in tables and on axes, such as accuracy.
    score_name: str
    #: Unit of the score. A score with the unit `share` is shown in percent.
    unit: str
    #: Whether a higher or a lower score is better.
    better: Literal["higher", "lower"]
    #: Noun for what throughput counts per second, such as images or tokens.
    counts: str
    #: Largest difference in score at which a decision still accepts a strategy, in the unit as shown.
    tolerance: float
    #: Kind of the targets: class numbers (int64), or real values to predict (float, [batch, values]).
    targets: Literal["classes", "values"] = "classes"
    #: How a batch's loss follows from its parts. For a user's own task it is found out before the training.
    loss_kind = LossKind()

    def outputs(self, targets: Sequence[int], classes: int) -> Sequence[int]:
        """Return the shape that a model's outputs must have for targets of a given shape.

        Args:
            targets: Shape of the targets.
            classes: Number of classes, or of values per target.
        """
        return targets if self.targets == "values" else (*targets, classes)

    def loss(
        self, outputs: Tensor, targets: Tensor
    ) -> Tensor | tuple[Tensor, Tensor | int | float]:
        """Return the mean loss of a batch, or a sum of losses and a weight.

        The sum is later divided by the weight.

        All are scalars. A sum is divided by the weight of the whole global batch, such as its number of
        counted targets. The loss then does not depend on how the batch is divided.
        """
        raise NotImplementedError

    def score(self, outputs: Tensor, targets: Tensor) -> Tensor:
        """Return the score of each prediction: [batch], or [batch, ...] with several per sample.

        A prediction whose score is NaN does not count.
        """
        raise NotImplementedError

    def guess(self, classes: int) -> float | None:
        """Return the expected score of random guessing, or None if unknown."""
        return None


class _CrossEntropy(Task):
    """A task that is trained by the cross-entropy of class scores.

    Outputs are [batch, ..., classes], and targets are class numbers [batch, ...].
    """

    def loss(self, outputs: Tensor, targets: Tensor) -> Tensor:
        """Return the mean cross-entropy over all targets, in nats."""
        from torch.nn.functional import cross_entropy

        return cross_entropy(outputs.flatten(0, -2), targets.flatten())


class Classification(_CrossEntropy):
    """The task of predicting the class of each image; the score is the share of right predictions."""

    score_name, unit, better, counts, tolerance = "accuracy", "share", "higher", "images", 1.0

    def score(self, outputs: Tensor, targets: Tensor) -> Tensor:
        """Return 1 for each sample whose class has the highest score, else 0."""
        return (outputs.argmax(-1) == targets).double()

    def guess(self, classes: int) -> float:
        return 1 / classes


class TextClassification(Classification):
    """The task of predicting the class of each text."""

    counts = "samples"


class AudioClassification(Classification):
    """The task of predicting the class of each waveform."""

    counts = "samples"


class NextToken(_CrossEntropy):
    """The task of predicting each next token of a text; the score is the mean cross-entropy."""

    score_name, unit, better, counts, tolerance = "loss", "nats/token", "lower", "tokens", 0.05

    def score(self, outputs: Tensor, targets: Tensor) -> Tensor:
        """Return the cross-entropy of each token, in nats."""
        from torch.nn.functional import cross_entropy

        each = cross_entropy(outputs.flatten(0, -2), targets.flatten(), reduction="none")
        return each.view(targets.shape)

    def guess(self, classes: int) -> float:
        return math.log(classes)


class MaskedToken(NextToken):
    """The task of predicting masked tokens of a text; the score is their mean cross-entropy.

    Tokens that are not masked have the target IGNORED.
    """

    loss_kind = LossKind(weighs=True)

    def loss(self, outputs: Tensor, targets: Tensor) -> tuple[Tensor, Tensor]:
        """Return the sum of the masked tokens' cross-entropies in nats, and a weight.

        The weight is the number of masked tokens.
        """
        from torch.nn.functional import cross_entropy

        pairs = outputs.flatten(0, -2), targets.flatten()
        total = cross_entropy(*pairs, ignore_index=IGNORED, reduction="sum")
        return total, (targets != IGNORED).sum()

    def score(self, outputs: Tensor, targets: Tensor) -> Tensor:
        """Return the cross-entropy of each masked token in nats, and NaN for other tokens."""
        import torch

        hidden = targets != IGNORED
        each = super().score(outputs, torch.where(hidden, targets, 0))
        return torch.where(hidden, each, math.nan)

    def guess(self, classes: int) -> float:
        # The mask is one of the classes, but a guess is never the mask.
        return math.log(classes - 1)


#: Target of a token that has no loss. PyTorch's cross_entropy ignores this number by default.
IGNORED = -100
#: Pattern that the name and the unit of a user's score must match, because pages and figures show them.
_WORD = re.compile(r"[A-Za-z0-9 %/._^()+-]{1,40}", re.ASCII)
#: Built-in tasks by their names in config.yaml.
TASKS: dict[str, type[Task]] = {
    "classification": Classification,
    "next-token": NextToken,
    "masked-token": MaskedToken,
    "text-classification": TextClassification,
    "audio-classification": AudioClassification,
}
#: Words for a data set's samples in messages, by its usual task.
_SAMPLES = {
    "classification": "images",
    "next-token": "a text",
    "masked-token": "a masked text",
    "text-classification": "labelled texts",
    "audio-classification": "waveforms",
}
#: Task of a data set that names none, by the number of dimensions of a sample.
_NATURAL = {1: "next-token", 2: "audio-classification", 3: "classification"}


@dataclass(frozen=True)
class OwnTask:
    """Specification of a user's own task: a class without arguments, as `module:name`."""

    call: str

    def __str__(self) -> str:
        return f"task {self.call!r}"


def get_default_task_name(shape: Sequence[int]) -> str:
    """Return the name of the default task for samples of a given shape."""
    return _NATURAL[len(shape)]


def unsuitable_task_reason(task_name: str, usual_task: str | None) -> str | None:
    """Return why a task does not suit a data set, or None if it does. No user code is imported.

    Args:
        task_name: Name of the task.
        usual_task: Name of the data set's usual task, or None if the data set has not been read.
    """
    if task_name in TASKS:
        if usual_task in (None, task_name):
            return None
        return f"the data set is {_SAMPLES[usual_task]}, whose task is {usual_task}"
    if usual_task == "text-classification":
        return "only text-classification is possible for texts with one label each"
    if invalid_call_reason(task_name):
        return f"is neither one of {', '.join(TASKS)} nor a class of yours, such as my_tasks:MyTask"
    return None


def get_task_name(settings: Settings, shape: Sequence[int]) -> str:
    """Return the name of a cell's task. The name of a user's own task is `module:Class`."""
    return (
        settings.own_task["call"]
        if settings.own_task
        else settings.task or get_default_task_name(shape)
    )


def get_task(settings: Settings, shape: Sequence[int], has_values: bool | None = None) -> Task:
    """Return the task of a cell: a built-in task, or one of the user's.

    Args:
        settings: Settings of the cell.
        shape: Shape of a sample.
        has_values: Whether targets are values instead of class numbers; None if unknown.

    Raises:
        ModelError: If a user's own task is invalid, or if the task does not suit the targets.
    """
    name = get_task_name(settings, shape)
    task = create_own_task(name) if settings.own_task else TASKS[name]()
    if has_values is not None and has_values != has_value_targets(task):
        label = OwnTask(name) if settings.own_task else f"task {name!r}"
        raise ModelError(f"{label}: {describe_unsuitable_targets(has_values)}")
    return task


def has_value_targets(task: Task) -> bool:
    """Return whether a task's targets are real values. By default they are class numbers."""
    return getattr(task, "targets", "classes") == "values"


def describe_unsuitable_targets(are_values: bool) -> str:
    """Return a message on a task that does not suit the data set's targets. The message has the remedy.

    Args:
        are_values: Whether the targets are values instead of class numbers.
    """
    if are_values:
        return (
            "it learns class numbers, but the targets of the data set are values (float32); use a task of "
            'your own with targets = "values"'
        )
    return (
        "it learns values (float32), but the targets of the data set are class numbers; return float32 "
        'targets, or remove targets = "values"'
    )


def compute_output_shape(task: Task, target_shape: Sequence[int], classes: int) -> list[int]:
    """Return the shape that a model's outputs must have for targets of a given shape.

    A task's method `outputs` determines the shape. Without this method, there is a default.

    Args:
        task: The task.
        target_shape: Shape of the targets.
        classes: Number of classes.
    """
    if not hasattr(task, "outputs"):
        return list(target_shape if has_value_targets(task) else (*target_shape, classes))
    what = OwnTask(f"{type(task).__module__}:{type(task).__name__}")
    try:
        shape = list(task.outputs(tuple(target_shape), classes))
    except ERRORS as e:
        raise ModelError(
            f"{what}: its method outputs raised {format_user_error(e)} for targets of shape "
            f"{list(target_shape)}"
        ) from e
    if not shape or any(type(n) is not int or n < 1 for n in shape) or shape[0] != target_shape[0]:
        raise ModelError(
            f"{what}: its method outputs returned {shape} for targets of shape {list(target_shape)}; return "
            f"the shape of the model's outputs, [{target_shape[0]}, ...]"
        )
    return shape


def create_own_task(call: str) -> Task:
    """Create a user's own task. Check that it has the attributes and methods of a task.

    Raises:
        ModelError: If the task lacks an attribute or method that a task must have.
    """
    what = OwnTask(call)
    cls = import_user_callable(what)
    try:
        task = cls()
    except ERRORS as e:
        raise ModelError(f"{what}: called without arguments, raised {format_user_error(e)}") from e
    wanted = {
        "score_name": (str, "a short text, the score's name"),
        "unit": (str, "a short text: share, or the score's unit"),
        "better": (str, "higher or lower"),
        "counts": (str, "a short text, the things that throughput counts, such as images"),
        "tolerance": ((int, float), "a number, by which the score may be worse in a decision"),
    }
    for name, (kind, means) in wanted.items():
        value = getattr(task, name, None)
        good = isinstance(value, kind) and not isinstance(value, bool)
        if name == "better":
            good = value in ("higher", "lower")
        elif name == "tolerance":
            good = good and math.isfinite(value) and value >= 0
        else:
            good = good and bool(_WORD.fullmatch(value))
        if not good:
            raise ModelError(f"{what}: its attribute {name} is {value!r}; it must be {means}")
    if getattr(task, "targets", "classes") not in ("classes", "values"):
        raise ModelError(
            f"{what}: its attribute targets is {task.targets!r}; it must be classes or values"
        )
    for name in ("loss", "score"):
        if not inspect.ismethod(getattr(task, name, None)):
            raise ModelError(f"{what}: has no method {name}(outputs, targets); add it")
    return task


def describe_task(
    task: Task,
    name: str,
    classes: int,
    shape: Sequence[int],
    min_loss: float | None,
    kind: LossKind | None = None,
) -> Mapping[str, Any]:
    """Return a record's entry `task`, with the names that tables, figures and decisions use.

    Args:
        task: The task.
        name: Name of the task.
        classes: Number of classes.
        shape: Shape of a sample.
        min_loss: Least possible mean loss of any model, if known.
        kind: Kind of the task's loss, or None if it was not tried.
    """
    guess = getattr(task, "guess", lambda classes: None)(classes)
    of_whole_text = isinstance(task, TextClassification)
    return {
        "name": name,
        "score": task.score_name,
        "unit": task.unit,
        "better": task.better,
        "tolerance": task.tolerance,
        "guess": None if guess is None else float(guess),
        "counts": task.counts,
        # Throughput counts the tokens of a text, except if a whole text has one label.
        "counts_per_sample": shape[0] if len(shape) == 1 and not of_whole_text else 1,
        # The least possible loss of generated data is known only if the loss is a cross-entropy.
        "least_loss": min_loss if isinstance(task, _CrossEntropy) else None,
        "loss_weighs": kind and kind.weighs,
        "loss_adds_up": kind and kind.adds_up,
    }


def compute_loss_and_weight(
    task: Task, outputs: Tensor, targets: Tensor
) -> tuple[Tensor, Tensor | None]:
    """Return the loss of a batch and its weight.

    Without a weight, they are the mean loss and None. With a weight, they are the sum of the losses and the
    weight in float64.

    Args:
        task: The task.
        outputs: Outputs of the model.
        targets: Targets.
    """
    loss = task.loss(outputs, targets)
    if not isinstance(loss, tuple):
        return loss, None
    total, weight = loss
    if isinstance(weight, (int, float)):
        # `new_full` creates the weight on the device, without a copy from the host.
        return total, total.detach().new_full((), weight).double()
    return total, weight.detach().to(total.device).double()


def divide_or_zero(value: float | Tensor, weight: Tensor) -> Tensor:
    """Return a value divided by a weight, or 0 where the weight is 0."""
    import torch

    some = weight > 0
    return torch.where(some, value / torch.where(some, weight, 1.0), 0.0)


class EvaluationResult(NamedTuple):
    """The mean loss and score of an evaluation over the test set."""

    #: Mean loss over the test set.
    loss: float
    #: Mean score of all predictions that have a score.
    score: float
    #: Standard error of this mean score.
    error: float
    #: Number of predictions without a score (NaN).
    left_out: int


def compute_loss_and_score_sums(task: Task, outputs: Tensor, targets: Tensor) -> Tensor:
    """Return sums over a test batch, from which `compute_test_loss_and_score` computes loss and score.

    The caller adds up these sums over batches and workers. The result is float64 [8]: the sum of losses, and
    its weight. Then, with the sum a of a sample's scores and the number n of its predictions, the sums of a,
    n, a², a n and n². The last value is the number of predictions without a score. float64 avoids rounding
    errors over a large test set.

    Args:
        task: The task.
        outputs: Outputs of the model.
        targets: Targets.
    """
    import torch

    outputs = outputs.double()
    targets = targets.double() if targets.is_floating_point() else targets
    loss, weight = compute_loss_and_weight(task, outputs, targets)
    if weight is None:
        weight = loss.new_full((), len(targets))
        loss = loss * weight
    each = task.score(outputs, targets).double()
    each = each.flatten(1) if each.dim() > 1 else each[:, None]
    counts = ~each.isnan()
    a, n = torch.where(counts, each, 0.0).sum(1), counts.sum(1).double()
    left_out = counts.logical_not().sum().double()
    return torch.stack([loss.double(), weight, a.sum(), n.sum(), a @ a, a @ n, n @ n, left_out])


def compute_test_loss_and_score(batch_sums: Sequence[float]) -> EvaluationResult:
    """Return the mean loss and the mean score over the test set.

    They follow from the sums of all batches. Samples are independent, but predictions within a sample are
    not. The standard error is that of a ratio of two sums over samples (Cochran, Sampling techniques, 1977,
    section 6.4). With equal numbers of predictions per sample, it is that of a mean over samples.
    """
    loss, weight, a, n, aa, an, nn, left_out = batch_sums
    score = a / n if n else math.nan
    deviation = math.sqrt(max(0.0, aa - 2 * score * an + score**2 * nn)) / n if n else math.nan
    return EvaluationResult(loss / weight if weight else 0.0, score, deviation, round(left_out))
