"""Reads a study's verdict.json, and gives the times in its blocks to the decision."""

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
from stratbench.extensions.verdict.blocks import VERDICT_VERSION, find_tampering_reason
from stratbench.strategies.base import Traits

#: Words of the decision for each state in verdict.json that excludes a strategy.
EXCLUDING = EXCLUDED | {"score": "worse score"}
#: Words of the decision for times that were measured in paired blocks.
PAIRED_BLOCKS = "measured in paired blocks"


@dataclass(frozen=True)
class PairedResult:
    """The result of a verdict's blocks for one strategy on one number of workers."""

    #: Seconds of a whole training as each block predicts them, by name of the block.
    times_s: pd.Series
    hosts: frozenset[str]
    on_cpu: bool
    uses_servers: bool
    traits: Traits
    #: Kind and reason of the exclusion; None if the strategy is not excluded.
    exclusion: tuple[str, str] | None
    #: Faster leader and reason, if the strategy was dropped as slower; else None.
    slower_than: tuple[str, str] | None
    #: Conclusion and confidence, if the strategy leads its comparison; else None.
    claim: tuple[str, str] | None


def read_verdict(path: str) -> dict[str, Any] | None:
    """Read and check the verdict of a study from verdict.json.

    Return None if `path` is empty, or if the file is missing, invalid or of another version.
    """
    if not path:
        return None
    try:
        verdict = read_json(path)
    except (OSError, ValueError):
        return None
    if not isinstance(verdict, dict) or verdict.get("schema_version") != VERDICT_VERSION:
        return None
    if reason := find_tampering_reason(verdict, path):
        print(f"{path} is not used: {reason}; `snakemake verdict` writes it again", file=sys.stderr)
        return None
    return verdict


def collect_paired_results(verdict: Mapping[str, Any]) -> dict[Group, PairedResult]:
    """Return the result of a verdict for each strategy, model and number of workers."""
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
                uses_servers=bool(comparison.get("served", {}).get(strategy)),
                traits=make_traits(comparison.get("traits", {}).get(strategy, {})),
                exclusion=None if kind is None else (kind, f"in the comparison: {state['reason']}"),
                slower_than=(state["against"], f"in the comparison: {state['reason']}")
                if state["state"] in ("slower", "much slower") and state["against"] != strategy
                else None,
                claim=(comparison["text"], comparison["confidence"]) if leads else None,
            )
    return by_group


def make_traits(traits_by_name: Mapping[str, Any]) -> Traits:
    """Make a strategy's traits from those in verdict.json.

    Traits that this version of stratbench does not have are left out.
    """
    known = {field.name for field in fields(Traits)}
    return Traits(**{name: value for name, value in traits_by_name.items() if name in known})


class BlocksEvidence(Evidence):
    """Evidence of a verdict's blocks: their times replace those of records of the same cell."""

    def __init__(self, paired: Mapping[Group, PairedResult]):
        self.paired = paired

    def replace_measured_times(self, candidate: Candidate, groups: Repeats, group: Group) -> None:
        """Set a candidate's times from blocks, and exclude candidates that the verdict excludes."""
        result = self.paired.get(group)
        if result is None:
            return
        if result.exclusion is not None:
            candidate.exclude(*result.exclusion)
        if not len(result.times_s):
            return
        candidate.times = result.times_s
        candidate.time_s = float(np.exp(np.log(result.times_s).mean()))
        candidate.basis, candidate.repetition_unit = PAIRED_BLOCKS, "block"
        candidate.hosts, candidate.is_on_cpu = result.hosts, result.on_cpu
        candidate.traits, candidate.has_servers = result.traits, result.uses_servers
        candidate.verdict_claim = result.claim
        # The number of blocks was not fixed beforehand: it depends on the times in earlier blocks.
        candidate.has_planned_repeats = False

    def exclude_candidates(self, question: Question, candidates: Sequence[Candidate]) -> None:
        """Exclude candidates that blocks show to be slower than another candidate on as many workers."""
        experiment, model = question
        left = {(c.strategy, c.gpus) for c in candidates if not c.exclusion_kind}
        for c in candidates:
            paired = self.paired.get(Group(experiment, c.strategy, model, c.gpus))
            if (
                c.is_projected
                or paired is None
                or paired.slower_than is None
                or not len(paired.times_s)
            ):
                continue
            leader, reason = paired.slower_than
            if (leader, c.gpus) in left:
                c.exclude("slower", reason)


def read_blocks(path: str, constraints: Constraints) -> Evidence:
    """Read the times of a verdict's blocks from verdict.json, as evidence for a decision.

    The evidence is empty if the file is missing or not trusted.
    """
    verdict = read_verdict(path)
    return Evidence() if verdict is None else BlocksEvidence(collect_paired_results(verdict))
