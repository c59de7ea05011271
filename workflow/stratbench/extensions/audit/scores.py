"""Rules of the audit on scores: failed training, and losses that differ despite equal arithmetic."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterator
from statistics import median
from typing import Any, NamedTuple

import pandas as pd

from stratbench.analysis.records.facts import Facts
from stratbench.analysis.records.measures import ALONE
from stratbench.analysis.records.score import Score, read_score
from stratbench.extensions.audit.rule import (
    AuditData,
    Case,
    get_coordinates_of_strategy,
    record_rule,
    rule,
)

#: A working training gains at least this share of the reference cell's gain over guessing.
MIN_GAIN_SHARE = 0.5
#: Largest number of standard deviations that chance may explain.
MAX_CHANCE_DEVIATIONS = 3.0
#: Largest difference between two losses that rounding may explain: absolute, plus a share of the loss.
MAX_LOSS_DIFFERENCE, MAX_LOSS_DIFFERENCE_SHARE = 0.05, 0.25
#: Largest difference between two accuracies that rounding may explain, besides chance and a share of the
#: errors.
MAX_ACCURACY_DIFFERENCE = 0.03
#: Values per epoch that must be equal, but for rounding, if two strategies compute the same updates.
COMPARED_VALUES = ("train_loss", "test_loss", "score")


@rule("score-below-floor", "warning", "score")
def find_score_below_floor(evidence: AuditData) -> Iterator[Case]:
    """The cell learnt too little. Its gain over guessing may be chance, or is less than half of the gain of
    the reference. The reference is `single`, or else a synchronous strategy on the fewest workers, in as many
    epochs. Check the learning rate, BatchNorm statistics that do not reach the evaluated model, and gradients
    that are summed instead of averaged.
    """
    scores = {
        name: read_score(rows) for name, rows in evidence.ok.groupby("experiment", sort=False)
    }
    expected: dict[tuple[str, str, float | None], tuple[str, float | None]] = {}
    for row in evidence.finished_rows:
        if pd.isna(row.score_final):
            continue
        score = scores[row.experiment]
        # Published tables of accuracies do not have the score of guessing. It counts as 0 for them.
        guess = (
            0.0
            if score.is_unit_fraction and pd.isna(row.score_chance_level)
            else row.score_chance_level
        )
        if pd.isna(guess):
            continue
        # The sign makes the gain over guessing positive for better scores, even if lower scores are better.
        reached = score.higher_is_better_sign * (row.score_final - guess)
        key = row.experiment, row.model, None if pd.isna(row.epochs) else row.epochs
        if key not in expected:
            expected[key] = find_reference_cell_name_and_score(evidence, row, score)
        name, reference = expected[key]
        gain = (
            0.0
            if reference is None
            else MIN_GAIN_SHARE * score.higher_is_better_sign * (reference - guess)
        )
        against = (
            f"{name} reaches {format_score(score, reference)}" if reference is not None else ""
        )
        if (
            by_chance := MAX_CHANCE_DEVIATIONS
            * compute_standard_error_of_guessing(score, guess, row)
        ) > gain:
            gain, against = by_chance, f"guessing reaches {format_score(score, guess)}"
            if reached > 0:
                by_luck = guess + score.higher_is_better_sign * by_chance
                against += f", by chance even {format_score(score, by_luck)}"
        if (
            floor := evidence.floors.get(row.dataset, 0.0)
        ) > guess + gain and score.is_unit_fraction:
            gain = floor - guess
            against = f"the simplest models reach {floor:.0%} on this data set"
        if reached < gain:
            figures = f"{format_score(score, row.score_final)}; {against}"
            yield row, figures


def format_score(score: Score, value: float) -> str:
    """Format a score that is in the unit of records."""
    return (
        f"{value:.1%}"
        if score.is_unit_fraction
        else score.format_score(score.display_factor * value)
    )


def compute_standard_error_of_guessing(score: Score, guess: float, row: Any) -> float:
    """Return the standard error of the score that random guessing reaches on the test set.

    Each token of a text counts as an answer.

    Args:
        score: The task's score.
        guess: Score of random guessing.
        row: Row of cells.csv.
    """
    if not score.is_unit_fraction:
        return 0.0 if pd.isna(row.score_error) else row.score_error
    answers = row.test_samples * (row.counts_per_sample if row.counts_per_sample > 0 else 1)
    return math.sqrt(guess * (1 - guess) / answers) if answers > 0 else 0.0


def find_reference_cell_name_and_score(
    evidence: AuditData, row: Any, score: Score
) -> tuple[str, float | None]:
    """Return the cell name and score of synchronous training on the fewest workers.

    The training had as many epochs. The score is None if there is no such cell.

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
    name = ALONE if ALONE in best.index else str((score.higher_is_better_sign * best).idxmax())
    return f"{name} on {few['gpus'].iloc[0]}", float(best[name])


@rule("async-alone-unlike-sync", "unusable", "score")
def find_unequal_scores_on_one_worker(evidence: AuditData) -> Iterator[Case]:
    """On one worker this strategy must reach the score of synchronous SGD, because no gradient is stale. Its
    score differs: the implementations differ in something else.
    """
    alone = [
        group
        for group in evidence.groups
        if group.gpus == 1 and evidence.get_common_value(group, "is_synchronous_on_one_worker")
    ]
    for group in alone:
        # Strategies to compare with, which are synchronous on any number of workers.
        plain = [
            other
            for other in evidence.list_groups_with_any_strategy(group)
            if evidence.get_common_value(other, "is_synchronous_on_one_worker")
            and evidence.get_common_value(other, "equals_ddp")
            and evidence.get_common_value(other, "ends_with_a_worker")
        ]
        if group in plain:
            plain = [other for other in plain if other.strategy == ALONE]
        kind = evidence.get_common_value(group, "strategy_kind")
        nearest = [
            other for other in plain if evidence.get_common_value(other, "strategy_kind") == kind
        ] or plain
        if not nearest:
            continue
        mine, its = (evidence.compute_median(k, "score_final") for k in (group, nearest[0]))
        if mine is None or its is None:
            continue
        score = read_score(evidence.groups[group])
        n = evidence.multiply_medians(
            group, "test_samples", "counts_per_sample"
        ) or evidence.compute_median(group, "test_samples")
        error = evidence.compute_median(group, "score_error") or 0.0
        if score.is_unit_fraction:
            error = math.sqrt(its * (1 - its) / n) if n else 0.0
        chance = MAX_CHANCE_DEVIATIONS * math.sqrt(2) * error
        if abs(mine - its) > max(score.tolerance / score.display_factor, chance):
            figures = (
                f"on one worker: {score.name} {format_score(score, mine)}, {nearest[0].strategy} "
                f"{format_score(score, its)}"
            )
            yield get_coordinates_of_strategy(group), figures


@rule("equal-arithmetic-unequal-loss", "warning", "score")
def find_unequal_losses_despite_equal_updates(evidence: AuditData) -> Iterator[Case]:
    """These strategies declare the same updates as DDP except for rounding, but their losses or scores from
    the same weights differ by more than rounding explains. If there are only two, it is unknown which one is
    wrong.
    """
    groups: dict[tuple[Any, ...], list[Facts]] = defaultdict(list)
    for record in evidence.records:
        facts = Facts(record)
        plain = "equals_ddp" if facts.gpus > 1 else "is_synchronous_on_one_worker"
        if facts.status == "ok" and facts(f"strategy.traits.{plain}"):
            groups[get_key_of_equal_updates(facts)].append(facts)
    for members in groups.values():
        for name in COMPARED_VALUES if len(members) > 1 else ():
            for facts, deviations in iter_cells_far_from_median(members, name):
                epoch, value, usual = deviations[0]
                more = f", and in {len(deviations) - 1} more epochs" if len(deviations) > 1 else ""
                text = f"{name} of epoch {epoch} is {value:.4g}, the median {usual:.4g}{more}"
                yield facts.record["cell"], text


class EpochDeviation(NamedTuple):
    """A cell's loss or score of one epoch, and the median of all compared cells."""

    epoch: int
    value: float
    median: float


def iter_cells_far_from_median(
    cells: list[Facts], value_name: str
) -> Iterator[tuple[Facts, list[EpochDeviation]]]:
    """Yield the cells whose losses or scores deviate from the median beyond rounding errors.

    Args:
        cells: Records of cells whose values should be equal.
        value_name: One of COMPARED_VALUES.
    """
    deviations: list[list[EpochDeviation]] = [[] for _ in cells]
    epochs = zip(*(facts("score.per_epoch") for facts in cells), strict=False)
    for epoch, entries in enumerate(epochs, 1):
        values = [entry[value_name] for entry in entries]
        if None in values:
            continue
        usual = median(values)
        maximum = compute_max_rounding_difference(cells[0], value_name, usual)
        for i, value in enumerate(values):
            # Two values may differ by `maximum`. Each is then at half that distance from their median.
            if abs(value - usual) > (maximum if len(cells) > 2 else maximum / 2):
                deviations[i].append(EpochDeviation(epoch, value, usual))
    yield from ((facts, own) for facts, own in zip(cells, deviations, strict=True) if own)


def get_key_of_equal_updates(facts: Facts) -> tuple[Any, ...]:
    """Return a key that is equal for cells whose updates differ only by rounding.

    Without BatchNorm, and if losses add up over workers, it does not contain the number of workers.
    """
    # Dropout does not matter here: different masks change a loss by less than MAX_LOSS_DIFFERENCE_SHARE.
    shared = facts("model.batchnorm") is False and facts("task.loss_adds_up") is not False
    cell = [facts(f"cell.{name}") for name in ("experiment", "model", "repeat")]
    return *cell, facts("batch.global_batch"), "any" if shared else facts.gpus


def compute_max_rounding_difference(facts: Facts, value_name: str, median_value: float) -> float:
    """Return how far rounding can move a loss or score from the median.

    Args:
        facts: A record.
        value_name: One of COMPARED_VALUES.
        median_value: Median of the loss or score.
    """
    if value_name != "score":
        return MAX_LOSS_DIFFERENCE + MAX_LOSS_DIFFERENCE_SHARE * median_value
    if facts("task.unit") != "share" or not 0 <= median_value <= 1:
        return math.inf  # no limit is known for scores in other units
    n = count_scored_answers(facts)
    variance = median_value * (1 - median_value)
    chance = MAX_CHANCE_DEVIATIONS * math.sqrt(2 * variance / n) if n else 0.0
    return MAX_ACCURACY_DIFFERENCE + MAX_LOSS_DIFFERENCE_SHARE * (1 - median_value) + chance


def count_scored_answers(facts: Facts) -> float | None:
    """Return the number of answers over which a score is averaged, or None if unknown."""
    return facts.multiply_fields("data.test_samples", "task.counts_per_sample") or facts(
        "data.test_samples"
    )


@record_rule("loss-below-least", "unusable", "score")
def find_losses_below_minimum(facts: Facts) -> Iterator[str]:
    """A test loss is below the least possible loss, the entropy rate of the text's source, by more than
    chance explains: the model has seen the answers, or the loss is not a mean over tokens.
    """
    least = facts("task.least_loss") if facts("task.unit") == "nats/token" else None
    for entry in facts("score.per_epoch") if least is not None else ():
        loss, error = entry["test_loss"], entry.get("score_error") or 0.0
        if loss is not None and loss < least - MAX_CHANCE_DEVIATIONS * error:
            yield (
                f"the test loss of epoch {entry['epoch']} is {loss:.4f} nats per token, the least possible "
                f"{least:.4f} (standard error {error:.4f})"
            )
