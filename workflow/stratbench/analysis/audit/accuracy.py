"""Rules on accuracy: values that contradict each other, and training that did not work."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterator
from statistics import median
from typing import Any

import pandas as pd

from stratbench.analysis.audit.checks import (
    Facts,
    unless_absent,
    unless_at_least,
    unless_equal,
    unless_same,
)
from stratbench.analysis.audit.rule import (
    Evidence,
    Found,
    coordinates_of_cell,
    coordinates_of_row,
    coordinates_of_strategy,
    record_rule,
    rule,
)
from stratbench.analysis.measures import ALONE
from stratbench.cell.record import Record

#: What of the reference's gain over guessing training that works reaches in the same epochs.
WORKING = 0.5
#: Difference of accuracies that need no explanation, and how many standard deviations of chance.
ALIKE, DEVIATIONS = 0.01, 3.0
#: Differences of losses to which rounding grows in some epochs: absolute, and of the loss.
LOSS, LOSS_SHARE = 0.05, 0.25


@rule(
    "accuracy-below-floor",
    "doubtful",
    "accuracy",
    "It learnt less than half of what `single`, or a synchronous strategy on the fewest workers, "
    "learnt in as many epochs, or no more than guessing. Look at the learning rate, BatchNorm "
    "statistics that never reach the evaluated model, summed gradients.",
)
def accuracy_below_floor(evidence: Evidence) -> Iterator[Found]:
    for row in evidence.ok.itertuples():
        if pd.isna(row.accuracy_final):
            continue
        guess = 1 / row.classes if row.classes > 0 else 0.0
        name, reference = expected_accuracy(evidence, row)
        floor = 0.0 if reference is None else guess + WORKING * (reference - guess)
        told = f"{name} reaches {reference:.1%}" if reference is not None else ""
        n = row.test_samples or math.nan
        by_chance = guess if pd.isna(n) else guess + DEVIATIONS * math.sqrt(guess * (1 - guess) / n)
        if by_chance > floor:
            floor, told = by_chance, f"guessing reaches {guess:.0%}"
        if (given := evidence.floors.get(row.dataset, 0.0)) > floor:
            floor, told = given, f"known of this data set: {given:.0%} with the simplest models"
        if row.accuracy_final < floor:
            yield Found(coordinates_of_row(row), f"{row.accuracy_final:.1%}; {told}")


def expected_accuracy(evidence: Evidence, row: Any) -> tuple[str, float | None]:
    """The accuracy to expect, and whose: synchronous training in as many epochs, on fewest workers."""
    rows = evidence.ok
    as_long = rows["epochs"].isna() if pd.isna(row.epochs) else rows["epochs"] == row.epochs
    same = (rows["experiment"] == row.experiment) & (rows["model"] == row.model) & as_long
    plain = rows[same & rows["equals_ddp"].eq(True) & rows["ends_with_a_worker"].eq(True)]
    plain = plain[plain["accuracy_final"].notna()]
    if plain.empty:
        return "", None
    few = plain[plain["gpus"] == plain["gpus"].min()]
    best = few.groupby("strategy", sort=False)["accuracy_final"].median()
    name = ALONE if ALONE in best.index else str(best.idxmax())
    return f"{name} on {few['gpus'].iloc[0]}", float(best[name])


@rule(
    "async-alone-unlike-sync",
    "unusable",
    "accuracy",
    "With one worker nothing is ever stale, and this strategy says that it then trains as plain "
    "synchronous SGD does: the implementations differ in something else.",
)
def async_alone_unlike_sync(evidence: Evidence) -> Iterator[Found]:
    alone = [
        group
        for group in evidence.groups
        if group.gpus == 1 and evidence.value_of(group, "synchronous_alone")
    ]
    for group in alone:
        # By their nature synchronous, whatever the number of workers.
        plain = [
            other
            for other in alone
            if other.comparison == group.comparison
            and evidence.value_of(other, "equals_ddp")
            and evidence.value_of(other, "ends_with_a_worker")
        ]
        if group in plain:
            plain = [other for other in plain if other.strategy == ALONE]
        kind = evidence.value_of(group, "strategy_kind")
        nearest = [
            other for other in plain if evidence.value_of(other, "strategy_kind") == kind
        ] or plain
        if not nearest:
            continue
        mine, its = (evidence.median(k, "accuracy_final") for k in (group, nearest[0]))
        if mine is None or its is None:
            continue
        n = evidence.median(group, "test_samples")
        chance = DEVIATIONS * math.sqrt(2 * its * (1 - its) / n) if n else 0.0
        if abs(mine - its) > max(ALIKE, chance):
            figures = f"on one worker: accuracy {mine:.1%}, {nearest[0].strategy} {its:.1%}"
            yield Found(coordinates_of_strategy(group), figures)


@rule(
    "equal-arithmetic-unequal-loss",
    "doubtful",
    "accuracy",
    "These strategies say that their updates are DDP's, but for rounding, and on as many workers from "
    "the same weights their losses differ by more than rounding grows to.",
)
def equal_arithmetic_unequal_loss(evidence: Evidence) -> Iterator[Found]:
    groups: dict[tuple[Any, ...], list[Facts]] = defaultdict(list)
    for record in evidence.records:
        facts = Facts(record)
        if facts.status == "ok" and facts("strategy.traits.equals_ddp"):
            cell = record["cell"]
            names = ("experiment", "model", "gpus", "repeat")
            groups[tuple(cell[name] for name in names)].append(facts)
    for (experiment, model, gpus, repeat), members in groups.items():
        where = {"experiment": experiment, "model": model, "gpus": gpus, "repeat": repeat}
        if len(members) < 3:
            continue  # which of two is wrong, nobody can say
        for epoch, entries in enumerate(
            zip(*(facts("accuracy.per_epoch") for facts in members), strict=False), 1
        ):
            for name in ("train_loss", "test_loss"):
                losses = [entry[name] for entry in entries]
                if None in losses:
                    continue
                usual = median(losses)
                for facts, loss in zip(members, losses, strict=True):
                    if abs(loss - usual) > LOSS + LOSS_SHARE * usual:
                        text = f"{name} of epoch {epoch} is {loss:.4g}, of most {usual:.4g}"
                        yield Found(where | {"strategy": facts("cell.strategy")}, text)


@rule(
    "same-losses-twice",
    "unusable",
    "accuracy",
    "Two cells that start from other weights, or of which one follows the order in which pushes arrive, "
    "never have the same losses to the last digit in all epochs: one is a copy.",
)
def same_losses_twice(evidence: Evidence) -> Iterator[Found]:
    alike: dict[tuple[float, ...], list[Facts]] = defaultdict(list)
    for record in evidence.records:
        facts = Facts(record)
        entries = facts("accuracy.per_epoch")
        losses = tuple(e[name] for e in entries for name in ("train_loss", "test_loss"))
        if facts.status == "ok" and losses and None not in losses:
            alike[losses].append(facts)
    for members in alike.values():
        starts = {(f("settings.seed"), f("model.initial_weights_sha256")) for f in members}
        by_arrival = any(
            f.servers and f.gpus > 1 and not f("strategy.traits.equals_ddp") for f in members
        )
        if len(members) > 1 and (len(starts) > 1 or by_arrival):
            cells = [f.record["cell"] for f in members]
            named = [f"{c['strategy']} on {c['gpus']}, repeat {c['repeat']}" for c in cells]
            for cell in cells:
                where = coordinates_of_cell(cell)
                yield Found(where, f"the losses of {' and of '.join(named)}")


@record_rule(
    "contradictory-accuracy",
    "unusable",
    "accuracy",
    "Accuracies and losses of the record do not agree: the last epoch and the final accuracy, the best "
    "of all, whole samples of the test set, a loss too small for its errors.",
)
def contradictory_accuracy(record: Record) -> Iterator[str]:
    facts = Facts(record)
    entries = facts("accuracy.per_epoch")
    numbered = [entry["epoch"] for entry in entries]
    yield from unless_same(
        "epochs of accuracy.per_epoch", numbered, "counted they", list(range(1, len(entries) + 1))
    )
    reached = [entry["accuracy"] for entry in entries]
    if reached:
        yield from unless_equal(
            "accuracy.final", facts("accuracy.final"), "that of the last epoch", reached[-1]
        )
        yield from unless_equal(
            "accuracy.best", facts("accuracy.best"), "the best epoch's", max(reached)
        )
    else:
        for name in ("final", "best"):
            yield from unless_absent(
                f"accuracy.{name}", facts(f"accuracy.{name}"), "without any epoch"
            )
    # Of a text, each token is an answer.
    shape = facts("model.input_shape") or []
    n = (facts("data.test_samples") or 0) * (shape[0] if len(shape) == 1 else 1)
    for entry in entries:
        name, right = f"epoch {entry['epoch']}", entry["accuracy"]
        if n and abs(right * n - round(right * n)) > 1e-3:
            yield f"the accuracy of {name}, {right:.6g}, is of {n} answers no whole number"
        if not 0 <= right <= 1:
            yield f"the accuracy of {name} is {right:.6g}"
        # Who errs gives the right class half at most.
        yield from unless_at_least(
            f"test_loss of {name}",
            entry["test_loss"],
            "ln 2 for each error",
            math.log(2) * (1 - right),
            1e-3,
        )
