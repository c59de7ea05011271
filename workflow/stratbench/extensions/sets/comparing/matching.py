"""Matches the cells of two sets that train the same, and finds the fields in which they differ."""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

from stratbench.analysis.records.collect import UNMEASURED
from stratbench.analysis.records.groups import GROUP, Group, group_rows
from stratbench.extensions.audit.across_cells.mixed import (
    NOT_STATED,
    TABLE,
    collect_texts_by_path,
    find_table_row,
)
from stratbench.extensions.sets.reading import ResultSet

#: Differences in what is trained, which forbid a ratio: the name of each, by the audit rule.
WORK = {
    "mixed-precision": "precision",
    "mixed-tasks": "task",
    "mixed-data": "data",
    "mixed-models": "model",
    "mixed-optimizers": "optimizer",
    "mixed-settings": "setting",
    "mixed-batches": "batch",
}
#: Differences in where and how is trained, which may explain a ratio: the name of each, by the audit rule.
PLACE = {
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
#: Settings that say where and how a cell ran, and not what it trained.
OF_PLACE = ("settings.device", "settings.threads", "settings.profile", "settings.warmup_steps")
#: Prefixes of the paths of record fields that say how a strategy trained.
OF_STRATEGIES = (
    "memory.model_states", "strategy.wrap_groups", "strategy.traits", "strategy.kind", "score.evaluated_on",
    "batch.samples_per_step", "communication.method", "strategy.details.bucket_bytes",
    "strategy.details.engine",
)  # fmt: skip
#: Environment variables that follow from the number of threads.
THREADS = re.compile(r"worker\.environment\.\w*NUM_THREADS")
#: Fields that are counted from the model by rules that may change between versions of torch.
COUNTED = ("compute.forward_flops_per_sample",)
#: Fields that state the amount of training.
AMOUNT = ("settings.epochs", "settings.steps")
#: Columns of published tables, with the path of the same value in records.
PUBLISHED = {
    "epochs": "settings.epochs",
    "precision": "settings.precision",
    "global_batch": "batch.global_batch",
    "task": "task.name",
    "device_kind": "provenance.device",
    "device_name": "worker.gpu.name",
}

ValuesByPath = Mapping[str, frozenset[str]]


@dataclass(frozen=True)
class Match:
    """The same cell in two sets: two groups of repeats that differ at most in their experiment."""

    dataset: str
    first_group: Group
    other_group: Group


@dataclass(frozen=True)
class Difference:
    """A record field with different values in two sets, and the number of cells with this difference."""

    kind: str
    field_path: str
    first_value: str
    other_value: str
    cell_count: int = 1


def match_cells(first: ResultSet, other: ResultSet) -> list[Match]:
    """Match cells that train the same in two result sets, in the first set's order.

    Matched cells have equal strategy, model, data set and number of workers. Cells of the same experiment are
    matched first. Other cells are matched if each set has only one of its kind.
    """
    mine, theirs = list_groups_with_data(first), list_groups_with_data(other)
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


def list_groups_with_data(result_set: ResultSet) -> dict[Group, str]:
    """Return the data set of each group of repeats that has a record."""
    cells = result_set.cells[~result_set.cells["status"].isin(UNMEASURED)].drop_duplicates(GROUP)
    listed = cells[[*GROUP, "dataset"]].itertuples(index=False, name=None)
    return {Group(*key): str(dataset) for *key, dataset in listed}


@lru_cache(maxsize=32)
def collect_values_by_group(result_set: ResultSet) -> dict[Group, ValuesByPath]:
    """Return the distinct recorded values of each group by path, over all repeats and workers."""
    values: dict[Group, dict[str, set[str]]] = defaultdict(lambda: defaultdict(set))
    for record in result_set.records:
        group = Group(*(record["cell"][name] for name in Group._fields))
        for path, texts in collect_texts_by_path(record).items():
            values[group][path] |= texts
    if result_set.is_published:
        for group, rows in group_rows(result_set.cells).items():
            for column, path in PUBLISHED.items():
                values[group][path] |= {
                    _format_value(value) for value in rows[column].dropna().unique()
                }
    return {
        group: {path: frozenset(texts) for path, texts in facts.items() if texts}
        for group, facts in values.items()
    }


def _format_value(value: Any) -> str:
    """Format a table's value as in records: 10, not 10.0."""
    return f"{value:g}" if isinstance(value, float) else str(value)


@lru_cache(maxsize=10_000)
def classify_difference(path: str) -> str | None:
    """Return the kind of a difference in the field at `path`.

    The kind is a value of WORK or PLACE. The result is None if the field does not matter for a comparison.
    """
    if THREADS.fullmatch(path):
        return PLACE["mixed-cores"]
    if path in OF_PLACE:
        return PLACE["mixed-cores"] if path == "settings.threads" else PLACE["mixed-devices"]
    if path.startswith(("strategy.options.", "strategy.name")):
        return WORK["mixed-settings"]
    if path.startswith("task.own"):
        return WORK["mixed-tasks"]
    if path.startswith(OF_STRATEGIES):
        return PLACE["strategies"]
    entry = None if path in COUNTED else find_table_row(path)
    if entry is None:
        return None
    rule = TABLE[entry].rule_id
    return WORK.get(rule) or PLACE[rule]


def iter_differences(match: Match, first: ResultSet, other: ResultSet) -> Iterator[Difference]:
    """Yield the fields in which two matched cells differ.

    A value that a set lacks is `not stated`.

    Args:
        match: The matched cells.
        first: The first set.
        other: The other set.
    """
    mine = collect_values_by_group(first).get(match.first_group, {})
    theirs = collect_values_by_group(other).get(match.other_group, {})
    replaced = first.has_replaced_hosts or other.has_replaced_hosts
    for path in dict.fromkeys([*mine, *theirs]):
        if mine.get(path) == theirs.get(path) or (path == "worker.host.name" and replaced):
            continue
        if (kind := classify_difference(path)) is None:
            continue
        texts = [", ".join(sorted(side.get(path, {NOT_STATED}))) for side in (mine, theirs)]
        published = first.is_published or other.is_published
        if published and kind in PLACE.values() and NOT_STATED in texts:
            continue  # published tables hardly say where was trained, so that a missing value says nothing
        yield Difference(kind, path, *texts)


def select_blocking_differences(differences: list[Difference], published: bool) -> list[Difference]:
    """Return the differences between two cells that prevent a time ratio.

    A value that a set lacks is no reason, except for the amount of training in published tables.
    """
    return [
        d
        for d in differences
        if d.kind in WORK.values()
        and (
            NOT_STATED not in (d.first_value, d.other_value)
            or (published and d.field_path in AMOUNT)
        )
    ]


def select_unstated_differences(differences: list[Difference]) -> list[Difference]:
    """Return the fields on the trained work that only one of two cells states."""
    return [
        d
        for d in differences
        if d.kind in WORK.values() and NOT_STATED in (d.first_value, d.other_value)
    ]


def merge_differences(differences: Iterator[Difference]) -> tuple[Difference, ...]:
    """Merge equal differences of several cells, sorted as in WORK and PLACE."""
    counts: dict[tuple[str, ...], int] = defaultdict(int)
    for d in differences:
        counts[(d.kind, d.field_path, d.first_value, d.other_value)] += d.cell_count
    kinds = [*WORK.values(), *PLACE.values()]
    merged = [Difference(*key, cell_count=n) for key, n in counts.items()]
    return tuple(sorted(merged, key=lambda d: kinds.index(d.kind)))
