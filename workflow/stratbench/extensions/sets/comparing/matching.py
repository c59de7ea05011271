"""Matches the cells of two result sets, and finds the differences of each matched cell."""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

from stratbench.analysis.records.collect import UNMEASURED
from stratbench.analysis.records.groups import GROUP, Group, map_rows_by_group
from stratbench.extensions.audit.across_cells.mixed import (
    NOT_STATED,
    TABLE,
    collect_field_texts_by_path,
    find_row_index_of_field,
)
from stratbench.extensions.sets.reading import ResultSet

#: Kinds of differences in the trained work, with which a time ratio has no meaning. Keys are the audit rules
#: that find such differences; values are their names on the page.
WORK_DIFFERENCES = {
    "mixed-precision": "precision",
    "mixed-tasks": "task",
    "mixed-data": "data",
    "mixed-models": "model",
    "mixed-optimizers": "optimizer",
    "mixed-variants": "setting",
    "mixed-settings": "setting",
    "mixed-batches": "batch",
}
#: Kinds of differences in hardware, software and flags, which may explain a time ratio. Keys are the audit
#: rules that find such differences; values are their names on the page.
MACHINE_DIFFERENCES = {
    "mixed-devices": "hardware",
    "mixed-clocks": "clocks and links of GPUs",
    "mixed-cores": "cores, threads and nodes",
    "mixed-versions": "versions",
    "mixed-drivers": "GPU drivers",
    "mixed-environments": "flags and environment",
    "mixed-revisions": "code of stratbench",
    "mixed-methods": "how memory was measured",
    "strategies": "what the strategies did",
    "mixed-hosts": "hosts",
    "mixed-seeds": "seeds",
}
#: Settings that say how a cell ran, and not what it trained.
MACHINE_SETTINGS = (
    "settings.device",
    "settings.threads",
    "settings.profile",
    "settings.warmup_steps",
)
#: Record fields that say how a strategy trained. A path also stands for all fields below it.
STRATEGY_FIELDS = (
    "memory.model_states", "strategy.wrap_groups", "strategy.traits", "strategy.kind", "score.evaluated_on",
    "batch.samples_per_step", "communication.method", "strategy.details.bucket_bytes",
    "strategy.details.engine",
)  # fmt: skip
#: Record fields of the environment variables that set a number of threads, such as OMP_NUM_THREADS.
THREAD_COUNT_FIELDS = re.compile(r"worker\.environment\.\w*NUM_THREADS")
#: Record fields that are not compared, because versions of torch compute different values for the same model.
FIELDS_NOT_COMPARED = ("compute.forward_flops_per_sample",)
#: Record fields with the amount of training.
AMOUNT_FIELDS = ("settings.epochs", "settings.steps")
#: Columns of the paper's tables, each with the path of the record field that has the same value.
FIELDS_OF_PUBLISHED_COLUMNS = {
    "epochs": "settings.epochs",
    "precision": "settings.precision",
    "global_batch": "batch.global_batch",
    "task": "task.name",
    "device_kind": "provenance.device",
    "device_name": "worker.gpu.name",
}

#: Distinct values of each record field, by path of the field.
ValuesByPath = Mapping[str, frozenset[str]]


@dataclass(frozen=True)
class Match:
    """A cell that is in two sets, as two groups of repeats. The experiments may have different names."""

    dataset: str
    first_group: Group
    other_group: Group


@dataclass(frozen=True)
class Difference:
    """A record field with different values in two sets, and the number of cells with this difference."""

    #: Kind of the difference, a value of WORK_DIFFERENCES or MACHINE_DIFFERENCES.
    kind: str
    field_path: str
    first_value: str
    other_value: str
    cell_count: int = 1


def match_cells(first: ResultSet, other: ResultSet) -> list[Match]:
    """Return the cells that are in both sets, in the order of the first set.

    Matched cells have the same strategy, model, data set and number of workers. Cells of experiments with the
    same name are matched first. Then a cell is matched if each set has only one such cell left.
    """
    mine, theirs = map_groups_to_data_sets(first), map_groups_to_data_sets(other)
    matched = [Match(dataset, g, g) for g, dataset in mine.items() if theirs.get(g) == dataset]
    taken = {match.first_group for match in matched}
    left: dict[tuple, tuple[list[Group], list[Group]]] = defaultdict(lambda: ([], []))
    for side, groups in enumerate((mine, theirs)):
        for group, dataset in groups.items():
            if group not in taken:
                left[(dataset, *group[1:])][side].append(group)
    matched += [Match(key[0], a[0], b[0]) for key, (a, b) in left.items() if len(a) == len(b) == 1]
    order = {group: place for place, group in enumerate(mine)}
    return sorted(matched, key=lambda match: order[match.first_group])


def map_groups_to_data_sets(result_set: ResultSet) -> dict[Group, str]:
    """Return the data set of each cell that has a record. A group is all repeats of a cell."""
    cells = result_set.cells[~result_set.cells["status"].isin(UNMEASURED)].drop_duplicates(GROUP)
    listed = cells[[*GROUP, "dataset"]].itertuples(index=False, name=None)
    return {Group(*key): str(dataset) for *key, dataset in listed}


@lru_cache(maxsize=32)
def collect_recorded_values(result_set: ResultSet) -> dict[Group, ValuesByPath]:
    """Return the recorded values of each cell, over all its repeats and their workers.

    Each group of repeats has the distinct values of each record field, by path of the field.
    """
    values: dict[Group, dict[str, set[str]]] = defaultdict(lambda: defaultdict(set))
    for record in result_set.records:
        group = Group(*(record["cell"][name] for name in Group._fields))
        for path, texts in collect_field_texts_by_path(record).items():
            values[group][path] |= texts
    if result_set.is_published:
        for group, rows in map_rows_by_group(result_set.cells).items():
            for column, path in FIELDS_OF_PUBLISHED_COLUMNS.items():
                values[group][path] |= {
                    _format_as_in_records(value) for value in rows[column].dropna().unique()
                }
    return {
        group: {path: frozenset(texts) for path, texts in facts.items() if texts}
        for group, facts in values.items()
    }


def _format_as_in_records(value: Any) -> str:
    """Return a value of the paper's tables as text, as in records: `10`, not `10.0`."""
    return f"{value:g}" if isinstance(value, float) else str(value)


@lru_cache(maxsize=10_000)
def classify_field_difference(field_path: str) -> str | None:
    """Return the kind of a difference in a record field. None if the field does not matter.

    The kind is a value of WORK_DIFFERENCES or MACHINE_DIFFERENCES.

    Args:
        field_path: Path of the field.
    """
    if THREAD_COUNT_FIELDS.fullmatch(field_path):
        return MACHINE_DIFFERENCES["mixed-cores"]
    if field_path in MACHINE_SETTINGS:
        return MACHINE_DIFFERENCES[
            "mixed-cores" if field_path == "settings.threads" else "mixed-devices"
        ]
    if field_path.startswith(("strategy.options.", "strategy.name")):
        return WORK_DIFFERENCES["mixed-settings"]
    if field_path.startswith("task.own"):
        return WORK_DIFFERENCES["mixed-tasks"]
    if field_path.startswith(STRATEGY_FIELDS):
        return MACHINE_DIFFERENCES["strategies"]
    entry = None if field_path in FIELDS_NOT_COMPARED else find_row_index_of_field(field_path)
    if entry is None:
        return None
    rule = TABLE[entry].rule_id
    return WORK_DIFFERENCES.get(rule) or MACHINE_DIFFERENCES[rule]


def iter_differences(match: Match, first: ResultSet, other: ResultSet) -> Iterator[Difference]:
    """Yield the record fields in which a cell differs between two sets.

    A value that a set does not have is `not stated`.

    Args:
        match: The cell in both sets.
        first: The first set.
        other: The other set.
    """
    mine = collect_recorded_values(first).get(match.first_group, {})
    theirs = collect_recorded_values(other).get(match.other_group, {})
    replaced = first.has_replaced_host_names or other.has_replaced_host_names
    for path in dict.fromkeys([*mine, *theirs]):
        if mine.get(path) == theirs.get(path) or (path == "worker.host.name" and replaced):
            continue
        if (kind := classify_field_difference(path)) is None:
            continue
        texts = [", ".join(sorted(side.get(path, {NOT_STATED}))) for side in (mine, theirs)]
        published = first.is_published or other.is_published
        if published and kind in MACHINE_DIFFERENCES.values() and NOT_STATED in texts:
            # The paper states little about its hardware and software: a missing value is no difference.
            continue
        yield Difference(kind, path, *texts)


def select_differences_preventing_ratio(
    differences: list[Difference], has_published_set: bool
) -> list[Difference]:
    """Return the differences between two sets that make a cell's time ratio meaningless.

    A value that one set does not have prevents no ratio, except for the amount of training in the paper.

    Args:
        differences: Differences of the cell between two sets.
        has_published_set: Whether one of the sets is the paper's tables.
    """
    return [
        d
        for d in differences
        if d.kind in WORK_DIFFERENCES.values()
        and (
            NOT_STATED not in (d.first_value, d.other_value)
            or (has_published_set and d.field_path in AMOUNT_FIELDS)
        )
    ]


def select_differences_stated_by_one_set(differences: list[Difference]) -> list[Difference]:
    """Return a cell's differences in fields on the trained work that one set lacks."""
    return [
        d
        for d in differences
        if d.kind in WORK_DIFFERENCES.values() and NOT_STATED in (d.first_value, d.other_value)
    ]


def merge_equal_differences(differences: Iterator[Difference]) -> tuple[Difference, ...]:
    """Return equal differences of several cells as one, with their number of cells.

    The order is that of the kinds in WORK_DIFFERENCES and MACHINE_DIFFERENCES.
    """
    counts: dict[tuple[str, ...], int] = defaultdict(int)
    for d in differences:
        counts[(d.kind, d.field_path, d.first_value, d.other_value)] += d.cell_count
    kinds = [*WORK_DIFFERENCES.values(), *MACHINE_DIFFERENCES.values()]
    merged = [Difference(*key, cell_count=n) for key, n in counts.items()]
    return tuple(sorted(merged, key=lambda d: kinds.index(d.kind)))
