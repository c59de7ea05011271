"""The next round of a verdict: its blocks and full runs, maximum cost, and further rounds."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

from stratbench.cell.coordinates import Cell
from stratbench.cell.text.words import counted
from stratbench.extensions.verdict.block_rules import discarded_steps
from stratbench.extensions.verdict.paired import judging
from stratbench.extensions.verdict.paired.costs import Costs
from stratbench.extensions.verdict.paired.evidence import PairedEvidence
from stratbench.extensions.verdict.paired.rounds import Course
from stratbench.extensions.verdict.paired.state import State

SCHEMA_VERSION = 1


@dataclass(frozen=True)
class NextRound:
    """The next round to run; `done`: there is none, for the `reason`."""

    number: int
    blocks: tuple[dict[str, Any], ...]
    full_runs: tuple[Cell, ...]
    done: bool
    reason: str
    spent_gpu_hours: float
    expected_gpu_hours: float | None
    #: Rounds of blocks that may follow this one at most.
    may_follow: int

    @property
    def outlook(self) -> str:
        """A sentence on the maximum cost and number of further rounds."""
        if self.done:
            return f"Nothing more is to run: {self.reason}."
        cost = "No cost is known before the first block"
        if self.expected_gpu_hours is not None:
            cost = f"This round takes about {self.expected_gpu_hours:.3g} GPU-hours (worker-hours on CPUs)"
        return (
            f"{cost}; {counted(self.may_follow, 'round')} of blocks may follow at most, and rounds of full "
            "runs where these may change the answer."
        )

    def as_dict(self) -> dict[str, Any]:
        """Return the content of round.json."""
        return {
            "schema_version": SCHEMA_VERSION,
            "round": self.number,
            "comparisons": list(self.blocks),
            "full_runs": [cell.as_dict() for cell in self.full_runs],
            "done": self.done,
            "spent_gpu_hours": self.spent_gpu_hours,
            "expected_gpu_hours": self.expected_gpu_hours,
            "reason": self.reason,
            "outlook": self.outlook,
        }


def next_round(evidence: PairedEvidence) -> NextRound:
    """Return the next round to run, from the evidence alone."""
    return round_of(Course(evidence))


def round_of(analysis: Course) -> NextRound:
    """Return the next round of a replayed analysis."""
    evidence = analysis.evidence
    costs = Costs(analysis)
    spent_s = costs.spent_s
    pending = (*analysis.missing_blocks, *analysis.missing_runs)
    expected_s = costs.expected_s if pending else 0.0
    known = expected_s is not None
    budget_s = None if evidence.budget_gpu_hours is None else 3600 * evidence.budget_gpu_hours
    over = budget_s is not None and pending and spent_s + (expected_s or 0.0) > budget_s
    # The cost of an unmeasured round is unknown: it is rejected only once the budget is spent.
    paired = any(state.looks for state in analysis.states)
    reason = "everything is decided" if paired else "there is nothing to compare"
    if not pending and not all(decided(analysis, s) for s in analysis.states if s.last):
        reason = f"the verdict is over: {judging.LOOKS[-1]} blocks are the most"
        if all(s.last is None or s.last.at_most <= most_allowed(evidence) for s in analysis.states):
            reason = "the verdict is over: full runs contradict blocks"
    elif over:
        reason = (
            f"the next round would exceed the budget of {evidence.budget_gpu_hours:g} GPU-hours"
        )
    elif pending:
        reason = "open"
    done = not pending or bool(over)
    return NextRound(
        number=analysis.round + (0 if done else 1),
        blocks=() if done else tuple(entry(analysis, s, n) for s, n in analysis.missing_blocks),
        full_runs=() if done else tuple(analysis.missing_runs),
        done=done,
        reason=reason,
        spent_gpu_hours=spent_s / 3600,
        expected_gpu_hours=expected_s / 3600 if known else None,
        may_follow=0 if done else analysis.may_follow,
    )


def decided(analysis: Course, state: State) -> bool:
    """Return whether a comparison has ended with the requested conclusion."""
    last = analysis.claimed(state)
    return last is not None and not state.open and last.at_most <= most_allowed(analysis.evidence)


def most_allowed(evidence: PairedEvidence) -> float:
    return math.log1p(evidence.margin) + 1e-9


def entry(analysis: Course, state: State, number: int) -> dict[str, Any]:
    """Return a block of round.json.

    Args:
        analysis: The analysis.
        state: State of the comparison.
        number: Number of the block.
    """
    evidence, key = analysis.evidence, state.comparison.place
    first = evidence.blocks.get((key, 1))
    steps = first.steps if first else None
    return {
        "experiment": key.experiment,
        "model": key.model,
        "dataset": state.comparison.dataset,
        "gpus": key.gpus,
        "block": number,
        "strategies": evidence.order(state.comparison, number, state.active),
        "settings": {
            "steps": steps,
            "discard": None if steps is None else discarded_steps(steps),
            "disagreement": analysis.disagreement(state.last.blocks if state.last else 0),
        },
        "seed": evidence.block_seed(state.comparison, number),
    }
