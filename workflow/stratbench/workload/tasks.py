"""Tasks: what a model learns. A task is a loss, a score, and what counts as one of the score's answers.

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


class Task:
    """A loss and a score of a model's outputs [batch, ...] against targets [batch, ...].

    The score is the mean over the test set of a value that each answer has, so that workers can
    divide the test set and its standard error is known.
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

    def outputs(self, targets: Sequence[int], classes: int) -> Sequence[int]:
        """The shape of the outputs for targets of a shape; `classes`, or how many values a target has."""
        return targets if self.targets == "values" else (*targets, classes)

    def loss(
        self, outputs: Tensor, targets: Tensor
    ) -> Tensor | tuple[Tensor, Tensor | int | float]:
        """The mean loss, a scalar: what training makes small. Or a sum and its weight.

        A sum, also a scalar, is divided by what the whole global batch weighs, such as the number of its
        targets that count: whatever parts the batch is computed in, their loss is that of the whole.
        """
        raise NotImplementedError

    def score(self, outputs: Tensor, targets: Tensor) -> Tensor:
        """The score of each answer: [batch], or [batch, ...] where a sample has several answers.

        NaN where an answer does not count.
        """
        raise NotImplementedError

    def guess(self, classes: int) -> float | None:
        """The score of who knows nothing; None where it cannot be said."""
        return None


class _CrossEntropy(Task):
    """Outputs are scores [batch, ..., classes] of the classes, targets are classes [batch, ...]."""

    def loss(self, outputs: Tensor, targets: Tensor) -> Tensor:
        """The mean cross-entropy over all targets, in nats."""
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


class NextToken(_CrossEntropy):
    """The token after each token of a text; the score is the mean cross-entropy."""

    score_name, unit, better, counts, tolerance = "loss", "nats/token", "lower", "tokens", 0.05

    def score(self, outputs: Tensor, targets: Tensor) -> Tensor:
        """The cross-entropy of each token, in nats."""
        from torch.nn.functional import cross_entropy

        each = cross_entropy(outputs.flatten(0, -2), targets.flatten(), reduction="none")
        return each.view(targets.shape)

    def guess(self, classes: int) -> float:
        return math.log(classes)


#: How a name or a unit of a user's is written: axes, tables and pages print it.
_WORD = re.compile(r"[A-Za-z0-9 %/._^()+-]{1,40}", re.ASCII)
#: The tasks by the names that config.yaml has for them.
TASKS: dict[str, type[Task]] = {"classification": Classification, "next-token": NextToken}


#: The approximate size of the outputs whose loss is compared with the mean over their halves.
TRIED_NUMBERS = 1 << 21
#: The most positions of a text on which a task is tried: each has an output for all of a vocabulary.
TRIED_POSITIONS = 16


@dataclass(frozen=True)
class OwnTask:
    """A task that a user brings: the class that is called without arguments."""

    call: str

    def __str__(self) -> str:
        return f"task {self.call!r}"


def natural_task(shape: Sequence[int]) -> str:
    """The name of the task that follows from a sample's shape: of a text, or of an image."""
    return "next-token" if len(shape) == 1 else "classification"


def fault_of_task(name: str, shape: Sequence[int] | None) -> str | None:
    """Why a task is not one of samples of this shape, in words; None where it is. Imports nothing.

    The shape is None where the data are not read yet.
    """
    if name in TASKS:
        natural = name if shape is None else natural_task(shape)
        what = "a text" if natural == "next-token" else "images"
        return None if name == natural else f"the data set is {what}, whose task is {natural}"
    if fault_of_call(name):
        return f"is neither of {', '.join(TASKS)} nor a class of your own; write my_tasks:MyTask"
    return None


def name_of_task(s: Settings, shape: Sequence[int]) -> str:
    """The name of a cell's task: a built-in one's, or the user's call."""
    return s.own_task["call"] if s.own_task else natural_task(shape)


def task_of(s: Settings, shape: Sequence[int], values: bool | None = None) -> Task:
    """A cell's task, whose samples have this shape. ModelError, in a sentence, where a user's is none.

    Nor where its targets are no such as the data have: `values`, or class numbers (None: not known).
    """
    task = own_task(s.own_task["call"]) if s.own_task else TASKS[natural_task(shape)]()
    if values is not None and values != takes_values(task):
        who = OwnTask(s.own_task["call"]) if s.own_task else f"task {natural_task(shape)!r}"
        raise ModelError(f"{who}: {wrong_targets(values)}")
    return task


def takes_values(task: Task) -> bool:
    """Whether the task's targets are values, and no class numbers; a user's need not say the latter."""
    return getattr(task, "targets", "classes") == "values"


def wrong_targets(values: bool) -> str:
    """That data whose targets are `values`, or else class numbers, have a task for the other; a remedy."""
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
    """The shape of a network's outputs for targets of this shape, as the task says; a user's need not."""
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


class LossKind(NamedTuple):
    """How the loss of a batch is made of those of its parts."""

    #: Whether the task gives a sum and its weight, and no mean.
    weighs: bool = False
    #: Whether the loss of a batch is the mean over equal parts of it, or its sum and weight are their sums.
    adds_up: bool = True


#: Why strategies train different things where a loss does not add up, and the remedy.
NO_SUM = (
    "its loss over a batch is not the mean over the batch's parts: workers, parts (accumulate) and "
    "micro-batches of other sizes train something else; return (sum, weight), or compare equal parts only"
)


def tried_task(
    s: Settings, shape: Sequence[int], classes: int, values: bool
) -> tuple[Task, LossKind]:
    """A cell's task and the kind of its loss, a user's after `check_task` has tried it.

    What a cell does before it trains, and the check before any does. `values`: whether the targets are
    values, `classes` for each sample, and no class numbers. Of texts the first `TRIED_POSITIONS` are tried,
    or all where the task takes no fewer. ModelError as of both.
    """
    task = task_of(s, shape, values)
    if not s.own_task:
        return task, LossKind()
    what = OwnTask(s.own_task["call"])
    each = shape if natural_task(shape) == "next-token" else (classes,) if values else ()
    if natural_task(shape) == "next-token" and shape[0] > TRIED_POSITIONS:
        try:
            return task, check_task(task, what, classes, (2, TRIED_POSITIONS))
        except ModelError:
            if not _takes_fakes(task, classes, (2, *each)):
                raise
    return task, check_task(task, what, classes, (2, *each))


def _takes_fakes(task: Task, classes: int, targets: Sequence[int]) -> bool:
    """Whether a task takes outputs for such targets, of tensors without memory."""
    import torch

    from stratbench.workload.known_values import KnownFakes

    with KnownFakes():
        y = torch.empty(targets, dtype=torch.float32 if takes_values(task) else torch.int64)
        x = torch.empty(outputs_of(task, targets, classes), requires_grad=True)
        try:
            task.loss(x, y), task.score(x, y)
        except Exception:  # whatever a task raises
            return False
    return True


def own_task(call: str) -> Task:
    """The task that a user's class makes; ModelError for what lacks something of the protocol."""
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


def check_task(task: Task, what: OwnTask, classes: int, targets: Sequence[int]) -> LossKind:
    """Try a task on outputs for such targets; returns the kind of its loss.

    In float32 as training computes, and in float64 as the evaluation does. ModelError where it does not
    take them or gives no loss or score.
    """
    import torch

    shape = outputs_of(task, targets, classes)
    for dtype in (torch.float32, torch.float64):
        y = torch.zeros(targets, dtype=dtype if takes_values(task) else torch.int64)
        x = torch.randn(
            shape, dtype=dtype, generator=torch.Generator().manual_seed(0)
        ).requires_grad_()
        given = f"outputs {list(x.shape)} in {str(dtype).removeprefix('torch.')} and targets {list(y.shape)}"
        loss, _ = _tried_loss(task, what, x, y, given)
        if loss.dim() or not loss.requires_grad:
            raise ModelError(
                f"{what}: loss of {given} returned a tensor {list(loss.shape)}"
                f"{'' if loss.requires_grad else ' without a gradient'}; return the mean, a "
                "scalar that has a gradient, or (sum, weight)"
            )
        try:
            score = task.score(x, y)
        except Exception as e:
            raise ModelError(f"{what}: score of {given} raised {error_text(e)}") from e
        if not isinstance(score, torch.Tensor):
            raise ModelError(f"{what}: score returned a {type(score).__name__}; return a tensor")
        if list(score.shape[:1]) != list(targets[:1]):
            raise ModelError(
                f"{what}: score of {given} returned a tensor {list(score.shape)}; return the "
                f"score of each answer, [{targets[0]}] or [{targets[0]}, ...]"
            )
    return _kind_of_loss(task, what, classes, targets)


def _tried_loss(
    task: Task, what: OwnTask, x: Tensor, y: Tensor, given: str
) -> tuple[Tensor, Tensor | None]:
    """The loss and its weight; ModelError in a sentence where it is no such thing. `given`: x and y."""
    import torch

    try:
        found = task.loss(x, y)
    except Exception as e:
        raise ModelError(f"{what}: loss of {given} raised {error_text(e)}") from e
    parts = found if isinstance(found, tuple) else (found,)
    number = isinstance(parts[-1], torch.Tensor) or (
        len(parts) == 2 and type(parts[-1]) in (int, float)
    )
    if not (len(parts) <= 2 and isinstance(parts[0], torch.Tensor) and number):
        kinds = ", ".join(type(part).__name__ for part in parts)
        kinds = f"({kinds})" if isinstance(found, tuple) else kinds
        raise ModelError(f"{what}: loss returned a {kinds}; return a tensor, or (sum, weight)")
    loss, weight = loss_and_weight(task, x, y)
    if weight is not None and (weight.dim() or not 0 <= float(weight) < math.inf):
        raise ModelError(
            f"{what}: loss of {given} returned the weight {weight.tolist()}; return a number of at least 0"
        )
    return loss, weight


def _kind_of_loss(task: Task, what: OwnTask, classes: int, targets: Sequence[int]) -> LossKind:
    """The loss of a batch with targets of many kinds, beside those of its halves."""
    import torch

    draw = torch.Generator().manual_seed(0)
    if takes_values(task):
        half = 3
        y = torch.randn((2 * half, *targets[1:]), dtype=torch.float64, generator=draw)
    else:
        each = math.prod(targets[1:])
        most = min(classes // each + 1, TRIED_NUMBERS // (2 * classes * each))
        half = max(3 if each == 1 else 1, most)
        number = torch.arange(half * each)
        # Labels that stand for no class are the first or the last; these come first.
        varied = torch.where(number % 2 == 0, number // 2, -1 - number // 2) % classes
        # Whichever class does not count, the halves have other numbers of it.
        y = torch.cat([varied, torch.zeros_like(varied)]).view(2 * half, *targets[1:])
    x = torch.randn(outputs_of(task, y.shape, classes), dtype=torch.float64, generator=draw)
    given = f"outputs {list(x.shape)} in float64 and targets {list(y.shape)}"
    found = []
    for a, b in ((x, y), (x[:half], y[:half]), (x[half:], y[half:])):
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(0)
            loss, weight = _tried_loss(task, what, a.requires_grad_(), b, given)
        found.append((float(loss.detach()), 1.0 if weight is None else float(weight)))
    weighs = weight is not None
    (loss, weight), *halves = found
    sums = [sum(each) / (1 if weighs else 2) for each in zip(*halves, strict=True)]
    adds_up = all(
        math.isclose(whole, of_parts, rel_tol=1e-9, abs_tol=1e-12)
        for whole, of_parts in zip((loss, weight), sums, strict=True)
    )
    return LossKind(weighs, adds_up)


def facts_of_task(
    task: Task,
    name: str,
    classes: int,
    shape: Sequence[int],
    least_loss: float | None,
    kind: LossKind | None = None,
) -> Mapping[str, Any]:
    """What a record says of its cell's task; all that tables, figures and decisions call it by.

    `kind`: of its loss; None: nobody has tried it.
    """
    guess = getattr(task, "guess", lambda classes: None)(classes)
    return {
        "name": name,
        "score": task.score_name,
        "unit": task.unit,
        "better": task.better,
        "tolerance": task.tolerance,
        "guess": None if guess is None else float(guess),
        "counts": task.counts,
        # A piece of text is as many tokens as it is long.
        "counts_per_sample": shape[0] if len(shape) == 1 else 1,
        # The entropy rate bounds the mean cross-entropy; of another loss nothing is known.
        "least_loss": least_loss if isinstance(task, NextToken) else None,
        "loss_weighs": kind and kind.weighs,
        "loss_adds_up": kind and kind.adds_up,
    }


def loss_and_weight(task: Task, outputs: Tensor, targets: Tensor) -> tuple[Tensor, Tensor | None]:
    """The mean loss and None; of a task that weighs, the sum and its weight, a float64 scalar."""
    found = task.loss(outputs, targets)
    if not isinstance(found, tuple):
        return found, None
    total, weight = found
    if isinstance(weight, (int, float)):  # filled in on the device: nothing is copied to it
        return total, total.detach().new_full((), weight).double()
    return total, weight.detach().to(total.device).double()


def ratio(value: float | Tensor, weight: Tensor) -> Tensor:
    """The value divided by a weight; 0 where that is 0."""
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

    The loss and its weight; with a, the sum of a sample's scores, and n, of how many answers: a, n, their
    squares a², an and n², and the answers left out. In float64, so that a sum over a large test set loses
    nothing; batches and workers add theirs up.
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
    """Return the mean loss and the mean score of all answers that count, from the sums of all batches.

    Samples are drawn independently, answers within one are not: the error is that of a ratio of two sums
    over samples (Cochran, Sampling techniques, 1977, section 6.4), with equal numbers of answers that of a
    mean over samples.
    """
    loss, weight, a, n, aa, an, nn, left_out = sums
    score = a / n if n else math.nan
    deviation = math.sqrt(max(0.0, aa - 2 * score * an + score**2 * nn)) / n if n else math.nan
    return Evaluated(loss / weight if weight else 0.0, score, deviation, round(left_out))
