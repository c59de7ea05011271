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
from stratbench.extensions.verdict.blocks import VERDICT_VERSION, find_distrust_reason
from stratbench.strategies.base import Traits

#: Words of the decision for each state in verdict.json that excludes a strategy.
EXCLUDING = EXCLUDED | {"score": "worse score"}
#: Words of the decision for times that were measured in paired blocks.
PAIRED_BLOCKS = "measured in paired blocks"


@dataclass(frozen=True)
class PairedResult:
    """The result of a verdict's blocks for one strategy on one number of workers."""

    #: Seconds of a whole training as each block predicts them, by name of the block.
    train_time_s_by_block: pd.Series
    hosts: frozenset[str]
    is_on_cpu: bool
    uses_servers: bool
    traits: Traits
    #: Kind and reason of the exclusion; None if the strategy is not excluded.
    exclusion_kind_and_reason: tuple[str, str] | None
    #: Faster leader and reason, if the strategy was dropped as slower; else None.
    faster_leader_and_reason: tuple[str, str] | None
    #: Conclusion and confidence, if the strategy leads its comparison; else None.
    conclusion_and_confidence: tuple[str, str] | None


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
    if reason := find_distrust_reason(verdict, path):
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
                train_time_s_by_block=pd.Series(times, dtype=float),
                hosts=frozenset(comparison["hosts"]),
                is_on_cpu=comparison["device"] == "cpu",
                uses_servers=comparison["served"][strategy],
                traits=make_traits_from_verdict(comparison["traits"].get(strategy, {})),
                exclusion_kind_and_reason=None
                if kind is None
                else (kind, f"in the comparison: {state['reason']}"),
                faster_leader_and_reason=(state["against"], f"in the comparison: {state['reason']}")
                if state["state"] in ("slower", "much slower") and state["against"] != strategy
                else None,
                conclusion_and_confidence=(comparison["text"], comparison["confidence"])
                if leads
                else None,
            )
    return by_group


def make_traits_from_verdict(traits_by_name: Mapping[str, Any]) -> Traits:
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
        if result.exclusion_kind_and_reason is not None:
            candidate.exclude_from_decision(*result.exclusion_kind_and_reason)
        if not len(result.train_time_s_by_block):
            return
        candidate.times = result.train_time_s_by_block
        candidate.time_s = float(np.exp(np.log(result.train_time_s_by_block).mean()))
        candidate.time_source_text, candidate.repetition_noun = PAIRED_BLOCKS, "block"
        candidate.hosts, candidate.has_cpu_workers = result.hosts, result.is_on_cpu
        candidate.traits, candidate.has_servers = result.traits, result.uses_servers
        candidate.verdict_claim_and_confidence = result.conclusion_and_confidence
        # The number of blocks was not fixed beforehand: it depends on the times in earlier blocks.
        candidate.has_planned_repeats = False

    def exclude_candidates(self, question: Question, candidates: Sequence[Candidate]) -> None:
        """Exclude candidates that blocks show to be slower than another candidate on as many workers."""
        experiment, model = question
        left = {(c.strategy, c.gpus) for c in candidates if not c.exclusion_kind}
        for c in candidates:
            paired = self.paired.get(Group(experiment, c.strategy, model, c.gpus))
            if (
                c.has_projected_time
                or paired is None
                or paired.faster_leader_and_reason is None
                or not len(paired.train_time_s_by_block)
            ):
                continue
            leader, reason = paired.faster_leader_and_reason
            if (leader, c.gpus) in left:
                c.exclude_from_decision("slower", reason)


def read_blocks_as_evidence(path: str, constraints: Constraints) -> Evidence:
    """Read the times of a verdict's blocks from verdict.json, as evidence for a decision.

    The evidence is empty if the file is missing or not trusted.
    """
    verdict = read_verdict(path)
    return Evidence() if verdict is None else BlocksEvidence(collect_paired_results(verdict))
