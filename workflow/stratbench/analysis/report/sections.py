"""Values for the report's template on strategies and machines."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pandas as pd

from stratbench.analysis.records.groups import map_base_strategies
from stratbench.strategies import REGISTRY, get_strategy_class


def iter_strategy_rows(cells: pd.DataFrame) -> Iterator[dict[str, str]]:
    """Yield name, summary and update rule of each strategy. A variant has its base strategy's."""
    bases = map_base_strategies(cells)
    for name in cells["strategy"].unique():
        of = bases.get(name, name)
        if of not in REGISTRY:  # only records state the base strategy of a variant
            untold = "a variant of a strategy that no record names."
            yield {"name": name, "summary": untold, "rule": untold}
            continue
        kind = "" if of == name else f"a variant of {of}: "
        known = get_strategy_class(of)
        yield {"name": name, "summary": kind + known.summary, "rule": known.rule}


def list_machine_rows(cells: pd.DataFrame) -> list[dict[str, Any]]:
    """Return a row per combination of machine and software versions, most frequent first."""
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
