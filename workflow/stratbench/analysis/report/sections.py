"""Builds the report's tables of strategies and of machines."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pandas as pd

from stratbench.analysis.records.groups import map_base_strategies
from stratbench.strategies import REGISTRY, get_strategy_class


def iter_strategy_rows(cells: pd.DataFrame) -> Iterator[dict[str, str]]:
    """Yield name, summary and update rule of each strategy. A variant has those of its base strategy."""
    bases = map_base_strategies(cells)
    for name in cells["strategy"].unique():
        base = bases.get(name, name)
        if base not in REGISTRY:  # only records name the base strategy of a variant
            unknown = "a variant without a record, so its base strategy is unknown."
            yield {"name": name, "summary": unknown, "rule": unknown}
            continue
        kind = "" if base == name else f"a variant of {base}: "
        known = get_strategy_class(base)
        yield {"name": name, "summary": kind + known.summary, "rule": known.rule}


def list_machine_and_software_rows(cells: pd.DataFrame) -> list[dict[str, Any]]:
    """Return a row per combination of machine and software versions, with most cells first."""
    columns = {
        "host": "host",
        "device": "device_name",
        "CPU": "cpu_model",
        "driver": "driver",
        "torch": "torch",
        "code": "revision",
    }
    known = cells.dropna(subset=["device_kind"])
    groups = known.groupby(list(columns.values()), dropna=False, sort=False)
    lines = [
        {name: "" if pd.isna(v) else str(v) for name, v in zip(columns, key, strict=True)}
        | {"cells": len(rows), "experiments": ", ".join(dict.fromkeys(rows["experiment"]))}
        for key, rows in groups
    ]
    return sorted(lines, key=lambda line: -line["cells"])
