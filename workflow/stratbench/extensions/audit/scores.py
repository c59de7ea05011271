"""Rules on scores: failed training, and losses that differ despite equal arithmetic."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterator
from statistics import median
from typing import Any

import pandas as pd

from stratbench.analysis.records.facts import Facts
from stratbench.analysis.records.measures import ALONE
from stratbench.analysis.records.score import Score, score_of
from stratbench.extensions.audit.rule import (
    AuditData,
    Case,
    coordinates_of_strategy,
    record_rule,
    rule,
)

#: The share of the reference's gain over guessing that working training at least reaches in the same epochs.
WORKING = 0.5
#: The number of standard deviations that chance explains.
DEVIATIONS = 3.0
#: The most that rounding may make losses differ after some epochs: absolute, and as a share of the loss.
LOSS, LOSS_SHARE = 0.05, 0.25
#: The same for a fraction of right answers, besides chance, and LOSS_SHARE of the wrong ones.
SCORE = 0.03
#: The values of an epoch that equal arithmetic makes equal.
SERIES = ("train_loss", "test_loss", "score")


@rule("score-below-floor", "warning", "score")
def score_below_floor(evidence: AuditData) -> Iterator[Case]:
    """It learnt less than half of what `single`, or a synchronous strategy on the fewest workers, learnt in
    as many epochs, or no more than guessing. Look at the learning rate, BatchNorm statistics that never reach
    the evaluated model, summed gradients.
    """
    scores = {name: score_of(rows) for name, rows in evidence.ok.groupby("experiment", sort=False)}
    expected: dict[tuple[str, str, float | None], tuple[str, float | None]] = {}
    for row in evidence.rows:
        if pd.isna(row.score_final):
            continue
        score = scores[row.experiment]
        # Only tables of accuracies, such as the paper's, leave out what guessing reaches.
        guess = (
            0.0 if score.is_share and pd.isna(row.score_chance_level) else row.score_chance_level
        )
        if pd.isna(guess):
            continue
        # A gain over guessing is larger for a better score, whether higher or lower scores are better.
        reached = score.sign * (row.score_final - guess)
        key = row.experiment, row.model, None if pd.isna(row.epochs) else row.epochs
        if key not in expected:
            expected[key] = expected_score(evidence, row, score)
        name, reference = expected[key]
        gain = 0.0 if reference is None else WORKING * score.sign * (reference - guess)
        against = f"{name} reaches {in_words(score, reference)}" if reference is not None else ""
        if (by_chance := DEVIATIONS * error_of_guessing(score, guess, row)) > gain:
            gain, against = by_chance, f"guessing reaches {in_words(score, guess)}"
        if (floor := evidence.floors.get(row.dataset, 0.0)) > guess + gain and score.is_share:
            gain = floor - guess
            against = f"known of this data set: {floor:.0%} with the simplest models"
        if reached < gain:
            figures = f"{in_words(score, row.score_final)}; {against}"
            yield row, figures


def in_words(score: Score, value: float) -> str:
    """Return a score in a record's unit as text."""
    return f"{value:.1%}" if score.is_share else score.text(score.factor * value)


def error_of_guessing(score: Score, guess: float, row: Any) -> float:
    """Return the standard error of guessing on the test set.

    Each token of a text is an answer.

    Args:
        score: The task's score.
        guess: Score of random guessing.
        row: Row of cells.csv.
    """
    if not score.is_share:
        return 0.0 if pd.isna(row.score_error) else row.score_error
    answers = row.test_samples * (row.counts_per_sample if row.counts_per_sample > 0 else 1)
    return math.sqrt(guess * (1 - guess) / answers) if answers > 0 else 0.0


def expected_score(evidence: AuditData, row: Any, score: Score) -> tuple[str, float | None]:
    """Return the expected score, of synchronous training on the fewest workers, and its origin.

    Its training is of equal length.

    Args:
        evidence: Data of the audit.
        row: Row of cells.csv.
        score: The task's score.
    """
    rows = evidence.ok
    as_long = rows["epochs"].isna() if pd.isna(row.epochs) else rows["epochs"] == row.epochs
    same = (rows["experiment"] == row.experiment) & (rows["model"] == row.model) & as_long
    plain = rows[same & rows["equals_ddp"].eq(True) & rows["ends_with_a_worker"].eq(True)]
    plain = plain[plain["score_final"].notna()]
    if plain.empty:
        return "", None
    few = plain[plain["gpus"] == plain["gpus"].min()]
    best = few.groupby("strategy", sort=False)["score_final"].median()
    name = ALONE if ALONE in best.index else str((score.sign * best).idxmax())
    return f"{name} on {few['gpus'].iloc[0]}", float(best[name])


@rule("async-alone-unlike-sync", "unusable", "score")
def async_alone_unlike_sync(evidence: AuditData) -> Iterator[Case]:
    """With one worker nothing is ever stale, and this strategy says that it then trains as plain synchronous
    SGD does: the implementations differ in something else.
    """
    alone = [
        group
        for group in evidence.groups
        if group.gpus == 1 and evidence.value_of(group, "synchronous_alone")
    ]
    for group in alone:
        # These are synchronous by nature, whatever the number of workers.
        plain = [
            other
            for other in evidence.with_any_strategy(group)
            if evidence.value_of(other, "synchronous_alone")
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
        mine, its = (evidence.median(k, "score_final") for k in (group, nearest[0]))
        if mine is None or its is None:
            continue
        score = score_of(evidence.groups[group])
        n = evidence.product(group, "test_samples", "counts_per_sample") or evidence.median(
            group, "test_samples"
        )
        error = evidence.median(group, "score_error") or 0.0
        if score.is_share:
            error = math.sqrt(its * (1 - its) / n) if n else 0.0
        chance = DEVIATIONS * math.sqrt(2) * error
        if abs(mine - its) > max(score.tolerance / score.factor, chance):
            figures = (
                f"on one worker: {score.name} {in_words(score, mine)}, {nearest[0].strategy} "
                f"{in_words(score, its)}"
            )
            yield coordinates_of_strategy(group), figures


@rule("equal-arithmetic-unequal-loss", "warning", "score")
def equal_arithmetic_unequal_loss(evidence: AuditData) -> Iterator[Case]:
    """These strategies say that their updates are DDP's, but for rounding, and from the same weights their
    losses or scores differ by more than rounding grows to. Of two, nobody can say which is wrong.
    """
    groups: dict[tuple[Any, ...], list[Facts]] = defaultdict(list)
    for record in evidence.records:
        facts = Facts(record)
        plain = "equals_ddp" if facts.gpus > 1 else "synchronous_alone"
        if facts.status == "ok" and facts(f"strategy.traits.{plain}"):
            groups[alike_in_arithmetic(facts)].append(facts)
    for members in groups.values():
        for name in SERIES if len(members) > 1 else ():
            for facts, deviations in unlike_median(members, name):
                epoch, value, usual = deviations[0]
                more = f", and in {len(deviations) - 1} more epochs" if len(deviations) > 1 else ""
                text = f"{name} of epoch {epoch} is {value:.4g}, the median {usual:.4g}{more}"
                yield facts.record["cell"], text


def unlike_median(
    members: list[Facts], name: str
) -> Iterator[tuple[Facts, list[tuple[int, float, float]]]]:
    """Yield cells that differ from the median, with epoch, value and median of each case."""
    deviations: list[list[tuple[int, float, float]]] = [[] for _ in members]
    epochs = zip(*(facts("score.per_epoch") for facts in members), strict=False)
    for epoch, entries in enumerate(epochs, 1):
        values = [entry[name] for entry in entries]
        if None in values:
            continue
        usual = median(values)
        maximum = most_by_rounding(members[0], name, usual)
        for i, value in enumerate(values):
            # The median of two is as far from both.
            if abs(value - usual) > (maximum if len(members) > 2 else maximum / 2):
                deviations[i].append((epoch, value, usual))
    yield from ((facts, cases) for facts, cases in zip(members, deviations, strict=True) if cases)


def alike_in_arithmetic(facts: Facts) -> tuple[Any, ...]:
    """Return what cells have in common whose updates differ by rounding alone.

    The number of workers is no part of it without BatchNorm, and where losses add up.
    """
    # Workers draw dropout for themselves, which changes a loss less than LOSS_SHARE.
    shared = facts("model.batchnorm") is False and facts("task.loss_adds_up") is not False
    cell = [facts(f"cell.{name}") for name in ("experiment", "model", "repeat")]
    return *cell, facts("batch.global_batch"), "any" if shared else facts.gpus


def most_by_rounding(facts: Facts, name: str, usual: float) -> float:
    """Return the maximum difference of a loss or score of equal arithmetic after some epochs.

    Args:
        facts: A record.
        name: Name of the loss or score.
        usual: Its median.
    """
    if name != "score":
        return LOSS + LOSS_SHARE * usual
    if facts("task.unit") != "share" or not 0 <= usual <= 1:
        return math.inf  # losses have a rule of their own; other scores have their own units
    n = answers_of(facts)
    chance = DEVIATIONS * math.sqrt(2 * usual * (1 - usual) / n) if n else 0.0
    return SCORE + LOSS_SHARE * (1 - usual) + chance


def answers_of(facts: Facts) -> float | None:
    """Return the number of answers that a score is a mean of."""
    return facts.product("data.test_samples", "task.counts_per_sample") or facts(
        "data.test_samples"
    )


@record_rule("loss-below-least", "unusable", "score")
def loss_below_least(facts: Facts) -> Iterator[str]:
    """A test loss is less than the least possible, the entropy rate of the source that the text is drawn
    from, by more than chance explains: the model has seen the answers, or the loss is no such mean.
    """
    least = facts("task.least_loss") if facts("task.unit") == "nats/token" else None
    for entry in facts("score.per_epoch") if least is not None else ():
        loss, error = entry["test_loss"], entry.get("score_error") or 0.0
        if loss is not None and loss < least - DEVIATIONS * error:
            yield (
                f"the test loss of epoch {entry['epoch']} is {loss:.4f} nats per token, the least possible "
                f"{least:.4f} (standard error {error:.4f})"
            )
