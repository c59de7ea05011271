"""Cells that a reader compares, and that differ in more than their strategy."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import combinations

import pandas as pd

from stratbench.analysis.audit.rule import Affects, Found, Rule, Severity, Study, rule

#: Ratio of the most to the fewest samples seen.
SAMPLES = 1.005


def comparisons(study: Study, column: str) -> Iterator[tuple[tuple[str, str], pd.DataFrame]]:
    """Cells of an experiment and model that state `column`: what a reader compares."""
    stated = study.ok.dropna(subset=[column])
    yield from stated.groupby(["experiment", "model"], sort=False)


def mixed(id: str, column: str, severity: Severity, affects: Affects, explanation: str) -> Rule:
    """A rule that the compared cells have the same value in `column`."""

    def check(study: Study) -> Iterator[Found]:
        for (experiment, model), rows in comparisons(study, column):
            values = sorted(set(rows[column].astype(str)))
            if len(values) > 1:
                where = {"experiment": experiment, "model": model}
                yield Found(where, f"{column}: {', '.join(values)}")

    return Rule(id, severity, affects, explanation, check)


MIXED = (
    mixed(
        "mixed-precision",
        "compute_dtype",
        "unusable",
        "all",
        "Cells of a comparison compute in different precisions.",
    ),
    mixed(
        "mixed-data",
        "data_sha256",
        "unusable",
        "all",
        "Cells of a comparison were trained on different data.",
    ),
    mixed(
        "mixed-devices",
        "device_name",
        "unusable",
        "time",
        "Cells of a comparison ran on different devices.",
    ),
    mixed(
        "mixed-hosts",
        "host",
        "note",
        "time",
        "Cells of a comparison ran on different hosts, which may differ in more than their GPUs.",
    ),
    mixed(
        "mixed-torch",
        "torch",
        "doubtful",
        "all",
        "Cells of a comparison ran with different versions of torch.",
    ),
    mixed(
        "mixed-drivers",
        "driver",
        "note",
        "time",
        "Cells of a comparison ran with different GPU drivers.",
    ),
    mixed(
        "mixed-revisions",
        "revision",
        "note",
        "all",
        "Cells of a comparison were trained by different revisions of the code.",
    ),
)


@rule(
    "unequal-samples",
    "unusable",
    "all",
    "Strategies that saw different numbers of samples do not compare in time or accuracy.",
)
def unequal_samples(study: Study) -> Iterator[Found]:
    for (experiment, model), rows in comparisons(study, "samples_seen"):
        low, high = rows["samples_seen"].min(), rows["samples_seen"].max()
        if high > SAMPLES * low:
            where = {"experiment": experiment, "model": model}
            yield Found(where, f"{low:.0f} to {high:.0f} samples")


@rule(
    "unequal-start",
    "unusable",
    "accuracy",
    "The strategies of a repeat must start from the same weights.",
)
def unequal_start(study: Study) -> Iterator[Found]:
    for (experiment, model), rows in comparisons(study, "initial_weights_sha256"):
        for repeat, same in rows.groupby("repeat", sort=False):
            hashes = same["initial_weights_sha256"]
            if hashes.nunique() > 1:
                usual = hashes.mode().iloc[0]
                others = ", ".join(sorted(set(same.loc[hashes != usual, "strategy"])))
                where = {"experiment": experiment, "model": model, "repeat": repeat}
                yield Found(
                    where, f"{hashes.nunique()} different initial weights; not as most: {others}"
                )


@rule(
    "no-common-cell",
    "unusable",
    "all",
    "Collective strategies and parameter servers never trained the same model on the same data, so "
    "these records cannot rank one against the other.",
)
def no_common_cell(study: Study) -> Iterator[Found]:
    kinds = study.ok.groupby(["experiment", "model"])["strategy_kind"].agg(set)
    all_kinds = set().union(*kinds) if len(kinds) else set()
    for one, other in combinations(sorted(all_kinds), 2):
        if not any({one, other} <= found for found in kinds):
            yield Found({}, f"no experiment and model has strategies of both kinds: {one}, {other}")
