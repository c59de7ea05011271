"""Reads a study's verdict.json, with the results of its blocks for each strategy."""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from typing import Any

import numpy as np
import pandas as pd

from stratbench.analysis.decision.candidate import EXCLUDED, Candidate
from stratbench.analysis.decision.constraints import Constraints
from stratbench.analysis.decision.evidence import Evidence, Question
from stratbench.analysis.records.groups import Group, Repeats
from stratbench.cell.files import read_json
from stratbench.extensions.verdict.blocks import VERDICT_VERSION, why_broken
from stratbench.strategies.base import Traits

#: States of a strategy that exclude it, with the words of the decision.
EXCLUDING = EXCLUDED | {"score": "worse score"}
#: The basis of times that were measured in paired blocks.
PAIRED_BLOCKS = "measured in paired blocks"


@dataclass(frozen=True)
class PairedResult:
    """The results of a verdict's blocks for a strategy on a number of workers."""

    times_s: pd.Series  # of the whole training, by block
    hosts: frozenset[str]
    on_cpu: bool
    served: bool
    traits: Traits
    excluded: tuple[str, str] | None  # kind and reason
    slower_than: tuple[str, str] | None  # the leader when it was dropped, and the reason
    claim: tuple[str, str] | None  # the claim on its comparison and the confidence, if it leads one


def read_verdict(path: str) -> dict[str, Any] | None:
    """The content of a verdict.json.

    None if `path` is empty or nothing is there that this version reads.
    """
    if not path:
        return None
    try:
        verdict = read_json(path)
    except (OSError, ValueError):
        return None
    if not isinstance(verdict, dict) or verdict.get("schema_version") != VERDICT_VERSION:
        return None
    if reason := why_broken(verdict, path):
        print(f"{path} is not used: {reason}; `snakemake verdict` writes it again", file=sys.stderr)
        return None
    return verdict


def paired_results(verdict: Mapping[str, Any]) -> dict[Group, PairedResult]:
    """Return the results of a verdict for each strategy, model and number of workers."""
    by_group = {}
    for comparison in verdict["comparisons"]:
        if comparison["unusable"]:
            continue
        states = {ratio["strategy"]: ratio for ratio in comparison["ratios"]}
        for strategy in comparison["strategies"]:
            times = {
                f"block {number}": step_s * comparison["full_steps"]
                for number, step_s in enumerate(comparison["step_s"].get(strategy, ()), 1)
                if step_s is not None and comparison["full_steps"]
            }
            state = states[strategy]
            kind = EXCLUDING.get(state["state"])
            leads = strategy == comparison["leader"] and comparison["claimed"]
            by_group[
                Group(comparison["experiment"], strategy, comparison["model"], comparison["gpus"])
            ] = PairedResult(
                times_s=pd.Series(times, dtype=float),
                hosts=frozenset(comparison["hosts"]),
                on_cpu=comparison["device"] == "cpu",
                served=bool(comparison.get("served", {}).get(strategy)),
                traits=traits_from(comparison.get("traits", {}).get(strategy, {})),
                excluded=None if kind is None else (kind, f"in the comparison: {state['reason']}"),
                slower_than=(state["against"], f"in the comparison: {state['reason']}")
                if state["state"] in ("slower", "much slower") and state["against"] != strategy
                else None,
                claim=(comparison["text"], comparison["confidence"]) if leads else None,
            )
    return by_group


def traits_from(values: Mapping[str, Any]) -> Traits:
    """Return the traits in a verdict, without those unknown to this version."""
    known = {field.name for field in fields(Traits)}
    return Traits(**{name: value for name, value in values.items() if name in known})


class BlocksEvidence(Evidence):
    """A verdict's paired blocks: their times replace those of records on as many workers."""

    def __init__(self, paired: Mapping[Group, PairedResult]):
        self.paired = paired

    def measure(self, candidate: Candidate, groups: Repeats, group: Group) -> None:
        """Give a candidate its times in blocks, and exclude it if it left the comparison."""
        result = self.paired.get(group)
        if result is None:
            return
        if result.excluded is not None:
            candidate.exclude(*result.excluded)
        if not len(result.times_s):
            return
        candidate.times = result.times_s
        candidate.time_s = float(np.exp(np.log(result.times_s).mean()))
        candidate.basis, candidate.unit = PAIRED_BLOCKS, "block"
        candidate.hosts, candidate.on_cpu = result.hosts, result.on_cpu
        candidate.traits, candidate.served = result.traits, result.served
        candidate.claim = result.claim
        candidate.repeats_fixed = False  # a verdict looks after every block

    def exclude(self, question: Question, candidates: Sequence[Candidate]) -> None:
        """Exclude strategies that the verdict found slower than a remaining candidate on as many workers."""
        experiment, model = question
        left = {(c.strategy, c.gpus) for c in candidates if not c.kind}
        for c in candidates:
            paired = self.paired.get(Group(experiment, c.strategy, model, c.gpus))
            if (
                c.projected
                or paired is None
                or paired.slower_than is None
                or not len(paired.times_s)
            ):
                continue
            leader, reason = paired.slower_than
            if (leader, c.gpus) in left:
                c.exclude("slower", reason)


def read_blocks(path: str, constraints: Constraints) -> Evidence:
    """Return the evidence of the verdict.json that counts; none without one."""
    verdict = read_verdict(path)
    return Evidence() if verdict is None else BlocksEvidence(paired_results(verdict))
