"""Rules of the audit on whether cells are comparable: equal samples, equal start, equal endings."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import combinations

import pandas as pd

from stratbench.analysis.records.groups import map_rows_by_group
from stratbench.cell.coordinates import STATUSES
from stratbench.extensions.audit.rule import AuditData, Case, iter_table_rows, rule

#: Largest tolerated ratio of the numbers of samples that two compared cells saw.
MAX_SAMPLES_RATIO = 1.005


def iter_comparable_cells(
    evidence: AuditData, column: str
) -> Iterator[tuple[tuple[str, str], pd.DataFrame]]:
    """Yield the cells of each experiment and model that have a value in `column`."""
    with_value = evidence.ok.dropna(subset=[column])
    yield from with_value.groupby(["experiment", "model"], sort=False)


@rule("unequal-samples", "unusable", "all")
def find_unequal_sample_counts(evidence: AuditData) -> Iterator[Case]:
    """The strategies saw different numbers of samples, so that their times and scores are not comparable."""
    for (experiment, model), rows in iter_comparable_cells(evidence, "samples_seen"):
        low, high = rows["samples_seen"].min(), rows["samples_seen"].max()
        # Each epoch drops its last incomplete batch, whose size differs with weak scaling.
        max_dropped = (rows["global_batch"] * rows["epochs"]).max()
        if high > MAX_SAMPLES_RATIO * low and not high - low < max_dropped:
            where = {"experiment": experiment, "model": model}
            yield where, f"{low:.0f} to {high:.0f} samples"


@rule("unequal-start", "unusable", "score")
def find_unequal_initial_weights(evidence: AuditData) -> Iterator[Case]:
    """The strategies of a repeat did not start from the same weights, as they must."""
    for (experiment, model), rows in iter_comparable_cells(evidence, "initial_weights_sha256"):
        for repeat, same in rows.groupby("repeat", sort=False):
            hashes = same["initial_weights_sha256"]
            if hashes.nunique() > 1:
                usual = hashes.mode().iloc[0]
                others = ", ".join(sorted(set(same.loc[hashes != usual, "strategy"])))
                where = {"experiment": experiment, "model": model, "repeat": repeat}
                yield (
                    where,
                    f"{hashes.nunique()} different initial weights; these differ from most: {others}",
                )


# The finding is only a warning, because each value is usable. Only a ranking of both kinds is impossible.
@rule("no-common-cell", "warning", "all")
def find_strategy_kinds_without_common_model(evidence: AuditData) -> Iterator[Case]:
    """Collective strategies and parameter servers never trained the same model on the same data, so that the
    records cannot rank one kind against the other.
    """
    kinds = evidence.ok.groupby(["experiment", "model"])["strategy_kind"].agg(set)
    all_kinds = set().union(*kinds) if len(kinds) else set()
    for one, other in combinations(sorted(all_kinds), 2):
        if not any({one, other} <= cells for cells in kinds):
            yield {}, f"no experiment and model has strategies of both kinds: {one}, {other}"


@rule("repeats-end-differently", "warning", "all")
def find_repeats_with_unequal_status(evidence: AuditData) -> Iterator[Case]:
    """Repeats of a cell ended with different statuses, although they do the same work. Look for other
    processes on the device, and at the loss.
    """
    ended = evidence.cells[evidence.cells["status"].isin(STATUSES)]
    for key, rows in map_rows_by_group(ended).items():
        counts = rows["status"].value_counts()
        if len(counts) > 1:
            yield key, ", ".join(f"{n} {status}" for status, n in counts.items())


@rule("loss-in-parts", "note", "score")
def find_losses_that_depend_on_batch_parts(evidence: AuditData) -> Iterator[Case]:
    """The loss of a batch is not the mean over its parts (because of class weights, ignored targets or
    pairs). So the number of workers or micro-batches changes what is trained. A task that returns (sum,
    weight) avoids this.
    """
    for (experiment, model), rows in iter_comparable_cells(evidence, "loss_adds_up"):
        apart = rows["loss_adds_up"].astype(str).eq("False").any()
        if apart and (rows["gpus"].nunique() > 1 or rows["equals_ddp"].nunique() > 1):
            counts = ", ".join(map(str, sorted(set(rows["gpus"]))))
            yield {"experiment": experiment, "model": model}, f"trained on {counts} workers"


@rule("mixed-limits", "note", "time")
def find_unequal_time_limits(evidence: AuditData) -> Iterator[Case]:
    """A cell was stopped at its time limit, but other cells of its comparison had a longer limit."""
    for _, rows in evidence.cells.groupby(["experiment", "model"], sort=False):
        longest_s = rows["time_limit_s"].max()
        for row in iter_table_rows(rows[rows["status"] == "timeout"]):
            if row.time_limit_s < longest_s:
                yield row, f"stopped after {row.time_limit_s:g} s; other cells had {longest_s:g} s"
