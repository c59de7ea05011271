"""Rules on comparisons: the same work, the same start, and repeats that are real repeats."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import combinations

import pandas as pd

from stratbench.analysis.records.groups import rows_by_group
from stratbench.cell.coordinates import STATUSES
from stratbench.extensions.audit.rule import AuditData, Case, rows_of, rule

#: Ratio of the most to the fewest samples seen.
SAMPLES = 1.005


def comparable_cells(
    evidence: AuditData, column: str
) -> Iterator[tuple[tuple[str, str], pd.DataFrame]]:
    """Yield the cells of each experiment and model that have `column`, which readers compare."""
    with_value = evidence.ok.dropna(subset=[column])
    yield from with_value.groupby(["experiment", "model"], sort=False)


@rule("unequal-samples", "unusable", "all")
def unequal_samples(evidence: AuditData) -> Iterator[Case]:
    """Strategies that saw different numbers of samples do not compare in time or score."""
    for (experiment, model), rows in comparable_cells(evidence, "samples_seen"):
        low, high = rows["samples_seen"].min(), rows["samples_seen"].max()
        # An epoch leaves out what fills no batch, and with weak scaling batches differ.
        left_out = (rows["global_batch"] * rows["epochs"]).max()
        if high > SAMPLES * low and not high - low < left_out:
            where = {"experiment": experiment, "model": model}
            yield where, f"{low:.0f} to {high:.0f} samples"


@rule("unequal-start", "unusable", "score")
def unequal_start(evidence: AuditData) -> Iterator[Case]:
    """The strategies of a repeat must start from the same weights."""
    for (experiment, model), rows in comparable_cells(evidence, "initial_weights_sha256"):
        for repeat, same in rows.groupby("repeat", sort=False):
            hashes = same["initial_weights_sha256"]
            if hashes.nunique() > 1:
                usual = hashes.mode().iloc[0]
                others = ", ".join(sorted(set(same.loc[hashes != usual, "strategy"])))
                where = {"experiment": experiment, "model": model, "repeat": repeat}
                yield where, f"{hashes.nunique()} different initial weights; not as most: {others}"


# A warning only: each value is usable, but the two kinds have no common basis for a ranking.
@rule("no-common-cell", "warning", "all")
def no_common_cell(evidence: AuditData) -> Iterator[Case]:
    """Collective strategies and parameter servers never trained the same model on the same data, so these
    records cannot rank one against the other.
    """
    kinds = evidence.ok.groupby(["experiment", "model"])["strategy_kind"].agg(set)
    all_kinds = set().union(*kinds) if len(kinds) else set()
    for one, other in combinations(sorted(all_kinds), 2):
        if not any({one, other} <= cells for cells in kinds):
            yield {}, f"no experiment and model has strategies of both kinds: {one}, {other}"


@rule("repeats-end-differently", "warning", "all")
def repeats_end_differently(evidence: AuditData) -> Iterator[Case]:
    """Repeats of a cell do the same work, so that one ends as the others do, but for chance. Look at what
    else was on the device, and at the loss.
    """
    ended = evidence.cells[evidence.cells["status"].isin(STATUSES)]
    for key, rows in rows_by_group(ended).items():
        counts = rows["status"].value_counts()
        if len(counts) > 1:
            yield key, ", ".join(f"{n} {status}" for status, n in counts.items())


@rule("loss-in-parts", "note", "score")
def loss_in_parts(evidence: AuditData) -> Iterator[Case]:
    """The loss of a batch is not the mean over the batch's parts (class weights, targets that are ignored,
    pairs), so that other numbers of workers, parts or micro-batches train something else. A task that returns
    (sum, weight) trains the same on all.
    """
    for (experiment, model), rows in comparable_cells(evidence, "loss_adds_up"):
        apart = rows["loss_adds_up"].astype(str).eq("False").any()
        if apart and (rows["gpus"].nunique() > 1 or rows["equals_ddp"].nunique() > 1):
            counts = ", ".join(map(str, sorted(set(rows["gpus"]))))
            yield {"experiment": experiment, "model": model}, f"trained on {counts} workers"


@rule("mixed-limits", "note", "time")
def mixed_limits(evidence: AuditData) -> Iterator[Case]:
    """A cell was stopped at a time limit that is shorter than others of its comparison had."""
    for _, rows in evidence.cells.groupby(["experiment", "model"], sort=False):
        longest_s = rows["time_limit_s"].max()
        for row in rows_of(rows[rows["status"] == "timeout"]):
            if row.time_limit_s < longest_s:
                yield row, f"stopped after {row.time_limit_s:g} s, others {longest_s:g} s"
