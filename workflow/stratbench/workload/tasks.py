"""Tasks of a model: a loss, a score, and which answers the score counts.

A user's own is a class with the same attributes and methods, named as `package.module:Task`. torch is
imported where a loss is computed, not before: the Snakefile reads this file.
"""

from __future__ import annotations

import inspect
import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal, NamedTuple

from stratbench.workload.users_code import ModelError, callable_of, error_text, fault_of_call

if TYPE_CHECKING:
    from torch import Tensor

    from stratbench.cell.settings import Settings


class LossKind(NamedTuple):
    """How the loss of a batch follows from those of its parts."""

    #: Whether the task gives a sum and its weight, and no mean.
    weighs: bool = False
    #: Whether the loss of a batch is the mean over equal parts of it, or its sum and weight are their sums.
    adds_up: bool = True


class Task:
    """A loss and a score of a model's outputs [batch, ...] against targets [batch, ...].

    The score is the mean over the test set of a value that each answer has. So workers can divide the test
    set, and its standard error is known.
    """

    #: The score's name, in tables and on axes.
    score_name: str
    #: `share` of 1, shown in percent, or any other unit, shown as it is.
    unit: str
    better: Literal["higher", "lower"]
    #: What throughput counts: images, tokens.
    counts: str
    #: By how much the score may be worse before a decision excludes a strategy, in the unit as shown.
    tolerance: float
    #: What targets are: class numbers (int64), or values (float, [batch, values]).
    targets: Literal["classes", "values"] = "classes"
    #: How the loss of a batch is made of those of its parts; of a task of one's own that is tried.
    loss_kind = LossKind()

    def outputs(self, targets: Sequence[int], classes: int) -> Sequence[int]:
        """The shape of the outputs for targets of a shape.

        `classes`, or how many values a target has.
        """
        return targets if self.targets == "values" else (*targets, classes)

    def loss(
        self, outputs: Tensor, targets: Tensor
    ) -> Tensor | tuple[Tensor, Tensor | int | float]:
        """Return the mean loss, a scalar, to be minimized.

        Or return a sum and its weight.

        The sum, also a scalar, is divided by the weight of the whole global batch, such as its number of
        counted targets. So the loss does not depend on how the batch is divided.
        """
        raise NotImplementedError

    def score(self, outputs: Tensor, targets: Tensor) -> Tensor:
        """Return the score of each answer: [batch], or [batch, ...] for several answers per sample.

        An answer with NaN does not count.
        """
        raise NotImplementedError

    def guess(self, classes: int) -> float | None:
        """Return the score of random guessing, or None if unknown."""
        return None


class _CrossEntropy(Task):
    """Outputs are scores [batch, ..., classes] of the classes, targets are classes [batch, ...]."""

    def loss(self, outputs: Tensor, targets: Tensor) -> Tensor:
        """Return the mean cross-entropy over all targets, in nats."""
        from torch.nn.functional import cross_entropy

        return cross_entropy(outputs.flatten(0, -2), targets.flatten())


class Classification(_CrossEntropy):
    """The class of each image; the score is the share that is right."""

    score_name, unit, better, counts, tolerance = "accuracy", "share", "higher", "images", 1.0

    def score(self, outputs: Tensor, targets: Tensor) -> Tensor:
        """1 where the class with the highest score is the right one, else 0."""
        return (outputs.argmax(-1) == targets).double()

    def guess(self, classes: int) -> float:
        return 1 / classes


class TextClassification(Classification):
    """The class of each text."""

    counts = "samples"


class AudioClassification(Classification):
    """The class of each waveform."""

    counts = "samples"


class NextToken(_CrossEntropy):
    """The token after each token of a text; the score is the mean cross-entropy."""

    score_name, unit, better, counts, tolerance = "loss", "nats/token", "lower", "tokens", 0.05

    def score(self, outputs: Tensor, targets: Tensor) -> Tensor:
        """Return the cross-entropy of each token, in nats."""
        from torch.nn.functional import cross_entropy

        each = cross_entropy(outputs.flatten(0, -2), targets.flatten(), reduction="none")
        return each.view(targets.shape)

    def guess(self, classes: int) -> float:
        return math.log(classes)


class MaskedToken(NextToken):
    """The tokens that a text hides; the score is the mean cross-entropy. Labels of the others are IGNORED."""

    loss_kind = LossKind(weighs=True)

    def loss(self, outputs: Tensor, targets: Tensor) -> tuple[Tensor, Tensor]:
        """Return the cross-entropies of the hidden tokens added up, in nats, and their number."""
        from torch.nn.functional import cross_entropy

        pairs = outputs.flatten(0, -2), targets.flatten()
        total = cross_entropy(*pairs, ignore_index=IGNORED, reduction="sum")
        return total, (targets != IGNORED).sum()

    def score(self, outputs: Tensor, targets: Tensor) -> Tensor:
        """Return the cross-entropy of each hidden token, in nats; NaN of the others."""
        import torch

        hidden = targets != IGNORED
        each = super().score(outputs, torch.where(hidden, targets, 0))
        return torch.where(hidden, each, math.nan)

    def guess(self, classes: int) -> float:
        return math.log(classes - 1)  # the token that hides others is no answer


#: The target of a token that is not asked for, as torch's cross_entropy leaves it out.
IGNORED = -100
#: How a name or a unit of a user's is written: axes, tables and pages print it.
_WORD = re.compile(r"[A-Za-z0-9 %/._^()+-]{1,40}", re.ASCII)
#: The tasks by the names that config.yaml has for them.
TASKS: dict[str, type[Task]] = {
    "classification": Classification,
    "next-token": NextToken,
    "masked-token": MaskedToken,
    "text-classification": TextClassification,
    "audio-classification": AudioClassification,
}
#: Each task's samples, in words.
_SAMPLES = {
    "classification": "images",
    "next-token": "a text",
    "masked-token": "a masked text",
    "text-classification": "labelled texts",
    "audio-classification": "waveforms",
}
#: The task of samples with so many dimensions, where the data set names no other.
_NATURAL = {1: "next-token", 2: "audio-classification", 3: "classification"}


@dataclass(frozen=True)
class OwnTask:
    """A task that a user brings: the class that is called without arguments."""

    call: str

    def __str__(self) -> str:
        return f"task {self.call!r}"


def natural_task(shape: Sequence[int]) -> str:
    """Return the name of the default task for a sample's shape."""
    return _NATURAL[len(shape)]


def fault_of_task(name: str, natural: str | None) -> str | None:
    """Return why a task does not suit some data, or None if it does.

    Imports nothing.

    `natural`: the data set's own task, or None if the data are not read yet.
    """
    if name in TASKS:
        if natural in (None, name):
            return None
        return f"the data set is {_SAMPLES[natural]}, whose task is {natural}"
    if natural == "text-classification":
        return "texts that each have one label are learnt by text-classification alone"
    if fault_of_call(name):
        return f"is neither of {', '.join(TASKS)} nor a class of your own; write my_tasks:MyTask"
    return None


def name_of_task(s: Settings, shape: Sequence[int]) -> str:
    """Return the name of a cell's task: a built-in one's, or the user's call."""
    return s.own_task["call"] if s.own_task else s.task or natural_task(shape)


def task_of(s: Settings, shape: Sequence[int], values: bool | None = None) -> Task:
    """Return a cell's task.

    ModelError if a user's is invalid or does not suit the targets.

    Args:
        s: Settings of the cell.
        shape: Shape of a sample.
        values: Whether targets are values, not class numbers; None if unknown.
    """
    name = name_of_task(s, shape)
    task = own_task(name) if s.own_task else TASKS[name]()
    if values is not None and values != takes_values(task):
        label = OwnTask(name) if s.own_task else f"task {name!r}"
        raise ModelError(f"{label}: {wrong_targets(values)}")
    return task


def takes_values(task: Task) -> bool:
    """Return whether the task's targets are values and no class numbers, the default of a user's."""
    return getattr(task, "targets", "classes") == "values"


def wrong_targets(values: bool) -> str:
    """Return the message on a task for the other kind of targets, with the remedy."""
    if values:
        return (
            "it learns class numbers, and the targets of the data set are values (float32); name a task of "
            'your own that says targets = "values"'
        )
    return (
        "it learns values (float32), and the targets of the data set are class numbers; return float32 "
        'targets, or leave targets = "values" out'
    )


def outputs_of(task: Task, targets: Sequence[int], classes: int) -> list[int]:
    """Return the shape of a model's outputs for targets of this shape, by the task or the default.

    Args:
        task: The task.
        targets: Shape of the targets.
        classes: Number of classes.
    """
    if not hasattr(task, "outputs"):
        return list(targets if takes_values(task) else (*targets, classes))
    what = OwnTask(f"{type(task).__module__}:{type(task).__name__}")
    try:
        shape = list(task.outputs(tuple(targets), classes))
    except Exception as e:
        raise ModelError(f"{what}: its outputs of {list(targets)} raised {error_text(e)}") from e
    if not shape or any(type(n) is not int or n < 1 for n in shape) or shape[0] != targets[0]:
        raise ModelError(
            f"{what}: its outputs of targets {list(targets)} are {shape}; return the shape of the "
            f"network's outputs, [{targets[0]}, ...]"
        )
    return shape


def own_task(call: str) -> Task:
    """Return the task that a user's class makes.

    Raises:
        ModelError: For what lacks something of the protocol.
    """
    what = OwnTask(call)
    cls = callable_of(what)
    try:
        task = cls()
    except Exception as e:
        raise ModelError(f"{what}: called without arguments, it raised {error_text(e)}") from e
    wanted = {
        "score_name": (str, "a short text, the score's name"),
        "unit": (str, "a short text: share, or the score's unit"),
        "better": (str, "higher or lower"),
        "counts": (str, "a short text, what throughput counts: images, tokens"),
        "tolerance": ((int, float), "a number, what a decision lets the score lose"),
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
            raise ModelError(f"{what}: its {name} is {value!r}; it must be {means}")
    if getattr(task, "targets", "classes") not in ("classes", "values"):
        raise ModelError(f"{what}: its targets is {task.targets!r}; it must be classes or values")
    for name in ("loss", "score"):
        if not inspect.ismethod(getattr(task, name, None)):
            raise ModelError(f"{what}: it has no method {name}(outputs, targets)")
    return task


def facts_of_task(
    task: Task,
    name: str,
    classes: int,
    shape: Sequence[int],
    least_loss: float | None,
    kind: LossKind | None = None,
) -> Mapping[str, Any]:
    """Return the record's entry of the task, with all names that tables, figures and decisions use.

    Args:
        task: The task.
        name: Its name.
        classes: Number of classes.
        shape: Shape of a sample.
        least_loss: Minimum mean loss of any model, if known.
        kind: Kind of its loss, or None if not tried.
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
        # A piece of text is as many tokens as it is long.
        "counts_per_sample": shape[0] if len(shape) == 1 and not of_whole_text else 1,
        # It bounds the mean cross-entropy; of another loss nothing is known.
        "least_loss": least_loss if isinstance(task, _CrossEntropy) else None,
        "loss_weighs": kind and kind.weighs,
        "loss_adds_up": kind and kind.adds_up,
    }


def loss_and_weight(task: Task, outputs: Tensor, targets: Tensor) -> tuple[Tensor, Tensor | None]:
    """Return the mean loss and None, or the sum and its weight, a float64 scalar.

    Args:
        task: The task.
        outputs: Outputs of the model.
        targets: Targets.
    """
    loss = task.loss(outputs, targets)
    if not isinstance(loss, tuple):
        return loss, None
    total, weight = loss
    if isinstance(weight, (int, float)):  # filled in on the device: nothing is copied to it
        return total, total.detach().new_full((), weight).double()
    return total, weight.detach().to(total.device).double()


def ratio(value: float | Tensor, weight: Tensor) -> Tensor:
    """Return the value divided by a weight, or 0 where that is 0."""
    import torch

    some = weight > 0
    return torch.where(some, value / torch.where(some, weight, 1.0), 0.0)


class Evaluated(NamedTuple):
    """The result of an evaluation; `error`: the score's standard error, `left_out`: answers without one."""

    loss: float
    score: float
    error: float
    left_out: int


def sums_of_batch(task: Task, outputs: Tensor, targets: Tensor) -> Tensor:
    """Return the sums over a test batch that `evaluated` takes: float64 [8].

    They are the loss and its weight. With a, the sum of a sample's scores, and n, the number of its answers,
    they are also a, n, a², a n, n², and the answers left out. float64 avoids rounding over a large test set.
    Sums of batches and workers are added up.

    Args:
        task: The task.
        outputs: Outputs of the model.
        targets: Targets.
    """
    import torch

    outputs = outputs.double()
    targets = targets.double() if targets.is_floating_point() else targets
    loss, weight = loss_and_weight(task, outputs, targets)
    if weight is None:
        weight = loss.new_full((), len(targets))
        loss = loss * weight
    each = task.score(outputs, targets).double()
    each = each.flatten(1) if each.dim() > 1 else each[:, None]
    counts = ~each.isnan()
    a, n = torch.where(counts, each, 0.0).sum(1), counts.sum(1).double()
    left_out = counts.logical_not().sum().double()
    return torch.stack([loss.double(), weight, a.sum(), n.sum(), a @ a, a @ n, n @ n, left_out])


def evaluated(sums: Sequence[float]) -> Evaluated:
    """Return the mean loss and score of all counted answers, from all batches' sums.

    Samples are drawn independently, but answers within one are not. The error is that of a ratio of two sums
    over samples (Cochran, Sampling techniques, 1977, section 6.4). With equal numbers of answers it is that
    of a mean over samples.
    """
    loss, weight, a, n, aa, an, nn, left_out = sums
    score = a / n if n else math.nan
    deviation = math.sqrt(max(0.0, aa - 2 * score * an + score**2 * nn)) / n if n else math.nan
    return Evaluated(loss / weight if weight else 0.0, score, deviation, round(left_out))
