"""The verdict of a study, as `snakemake verdict` left it: what its blocks say of each strategy."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import Any

import pandas as pd

from stratbench.analysis.groups import Group
from stratbench.cell.blocks import VERDICT_VERSION
from stratbench.cell.files import read_json
from stratbench.strategies.base import Traits

#: States of an arm that exclude it, and what the decision calls them.
EXCLUDED = {
    "oom": "does not fit",
    "timeout": "too slow",
    "diverged": "worse score",
    "score": "worse score",
}


@dataclass(frozen=True)
class Raced:
    """What the blocks of a verdict say of a strategy on a number of workers."""

    times_s: pd.Series  # of the whole training, by block
    hosts: frozenset[str]
    on_cpu: bool
    served: bool
    traits: Traits
    excluded: tuple[str, str] | None  # kind and why
    slower_than: tuple[str, str] | None  # the leader that it was dropped against, and why
    claim: tuple[str, str] | None  # of its bout and how sure it is, where it leads one


def read_verdict(path: str) -> dict[str, Any] | None:
    """What a verdict.json says; None where `path` is empty, or there is none that this version can read."""
    if not path:
        return None
    try:
        found = read_json(path)
    except (OSError, ValueError):
        return None
    known = isinstance(found, dict) and found.get("schema_version") == VERDICT_VERSION
    return found if known else None


def raced_groups(verdict: Mapping[str, Any]) -> dict[Group, Raced]:
    """What a verdict says of each strategy, model and number of workers that was raced."""
    found = {}
    for bout in verdict["bouts"]:
        states = {ratio["strategy"]: ratio for ratio in bout["ratios"]}
        for arm in bout["arms"]:
            times = {
                f"block {number}": step_s * bout["full_steps"]
                for number, step_s in enumerate(bout["step_s"].get(arm, ()), 1)
                if step_s is not None and bout["full_steps"]
            }
            state = states[arm]
            kind = EXCLUDED.get(state["state"])
            leads = arm == bout["leader"] and bout["claimed"]
            found[Group(bout["experiment"], arm, bout["model"], bout["gpus"])] = Raced(
                times_s=pd.Series(times, dtype=float),
                hosts=frozenset(bout["hosts"]),
                on_cpu=bout["device"] == "cpu",
                served=bool(bout.get("served", {}).get(arm)),
                traits=traits_from(bout.get("traits", {}).get(arm, {})),
                excluded=None if kind is None else (kind, f"in the race: {state['why']}"),
                slower_than=(state["against"], f"in the race: {state['why']}")
                if state["state"] in ("slower", "much slower") and state["against"] != arm
                else None,
                claim=(bout["text"], bout["confidence"]) if leads else None,
            )
    return found


def traits_from(said: Mapping[str, Any]) -> Traits:
    """Traits as a verdict keeps them; those that this version does not know are left out."""
    known = {field.name for field in fields(Traits)}
    return Traits(**{name: value for name, value in said.items() if name in known})
