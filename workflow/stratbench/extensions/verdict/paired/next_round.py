"""The next round of a verdict: its blocks and full runs, maximum cost, and further rounds."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

from stratbench.cell.coordinates import Cell
from stratbench.cell.text.words import format_count
from stratbench.extensions.verdict.block_rules import count_discarded_steps
from stratbench.extensions.verdict.paired import judging
from stratbench.extensions.verdict.paired.costs import VerdictGpuSeconds
from stratbench.extensions.verdict.paired.evidence import PairedEvidence
from stratbench.extensions.verdict.paired.rounds import RoundReplay
from stratbench.extensions.verdict.paired.state import ComparisonState

SCHEMA_VERSION = 1


@dataclass(frozen=True)
class NextRound:
    """Blocks and full runs of the next round, or the reason why there is none.

    A verdict that is done has neither blocks nor full runs.
    """

    round_number: int
    block_entries: tuple[dict[str, Any], ...]
    cells_to_train_in_full: tuple[Cell, ...]
    is_verdict_done: bool
    end_reason: str
    spent_gpu_hours: float
    expected_gpu_hours: float | None
    #: Largest number of rounds of blocks that may follow this one.
    max_later_block_rounds: int

    @property
    def cost_and_rounds_sentence(self) -> str:
        """A sentence on the cost of this round and the number of further rounds."""
        if self.is_verdict_done:
            return f"Nothing more is to run: {self.end_reason}."
        cost = "The cost is unknown before the first block"
        if self.expected_gpu_hours is not None:
            cost = f"This round takes about {self.expected_gpu_hours:.3g} GPU-hours (worker-hours on CPUs)"
        return (
            f"{cost}; at most {format_count(self.max_later_block_rounds, 'round')} of blocks may follow, and "
            "rounds of full runs if these may change the answer."
        )

    def as_dict(self) -> dict[str, Any]:
        """Return the next round as the content of round.json."""
        return {
            "schema_version": SCHEMA_VERSION,
            "round": self.round_number,
            "comparisons": list(self.block_entries),
            "full_runs": [cell.as_dict() for cell in self.cells_to_train_in_full],
            "done": self.is_verdict_done,
            "spent_gpu_hours": self.spent_gpu_hours,
            "expected_gpu_hours": self.expected_gpu_hours,
            "reason": self.end_reason,
            "outlook": self.cost_and_rounds_sentence,
        }


def find_next_round(evidence: PairedEvidence) -> NextRound:
    """Return the next round that the evidence of a study requires."""
    return plan_next_round(RoundReplay(evidence))


def plan_next_round(replay: RoundReplay) -> NextRound:
    """Return the next round of a verdict: its blocks and its full runs.

    If there is none, the result has the reason. `replay` has evaluated the results of all rounds so
    far, one after another.
    """
    evidence = replay.evidence
    costs = VerdictGpuSeconds(replay)
    spent_s = costs.spent_gpu_seconds
    pending = (*replay.missing_blocks, *replay.missing_runs)
    expected_s = costs.expected_gpu_seconds_of_next_round if pending else 0.0
    known = expected_s is not None
    budget_s = None if evidence.budget_gpu_hours is None else 3600 * evidence.budget_gpu_hours
    # A round of unknown cost exceeds the budget only if the earlier rounds have already spent more than the
    # budget.
    over = budget_s is not None and pending and spent_s + (expected_s or 0.0) > budget_s
    paired = any(state.looks for state in replay.states)
    reason = "everything is decided" if paired else "there is nothing to compare"
    if not pending and not all(
        is_comparison_decided(replay, s) for s in replay.states if s.latest_analysis
    ):
        reason = f"the verdict has ended: it has the largest number of blocks, {judging.LOOKS[-1]}"
        if all(
            s.latest_analysis is None
            or s.latest_analysis.max_log_advantage_over_leader <= compute_log_margin(evidence)
            for s in replay.states
        ):
            reason = "the verdict has ended: full runs contradict its blocks"
    elif over:
        reason = (
            f"the next round would exceed the budget of {evidence.budget_gpu_hours:g} GPU-hours"
        )
    elif pending:
        reason = "open"
    done = not pending or bool(over)
    return NextRound(
        round_number=replay.round + (0 if done else 1),
        block_entries=()
        if done
        else tuple(make_block_entry(replay, s, n) for s, n in replay.missing_blocks),
        cells_to_train_in_full=() if done else tuple(replay.missing_runs),
        is_verdict_done=done,
        end_reason=reason,
        spent_gpu_hours=spent_s / 3600,
        expected_gpu_hours=expected_s / 3600 if known else None,
        max_later_block_rounds=0 if done else replay.max_later_block_rounds,
    )


def is_comparison_decided(replay: RoundReplay, state: ComparisonState) -> bool:
    """Return whether a comparison has ended with a leader close enough to the fastest strategy."""
    last = replay.get_corrected_analysis(state)
    return (
        last is not None
        and not state.is_open
        and last.max_log_advantage_over_leader <= compute_log_margin(replay.evidence)
    )


def compute_log_margin(evidence: PairedEvidence) -> float:
    """Return the margin as a log time ratio: log(1 + margin).

    A comparison is decided once no alternative can be faster than the leader by more than this.
    """
    return math.log1p(evidence.margin) + 1e-9


def make_block_entry(
    replay: RoundReplay, state: ComparisonState, block_number: int
) -> dict[str, Any]:
    """Return the entry of one block in round.json.

    Args:
        replay: Replay of the rounds so far.
        state: State of the comparison.
        block_number: Number of the block.
    """
    evidence, key = replay.evidence, state.comparison.comparison_key
    first = evidence.blocks.get((key, 1))
    steps = first.timed_steps_per_segment if first else None
    return {
        "experiment": key.experiment,
        "model": key.model,
        "dataset": state.comparison.dataset,
        "gpus": key.gpus,
        "block": block_number,
        "strategies": evidence.order_strategies_of_block(
            state.comparison, block_number, state.active_strategies
        ),
        "settings": {
            "steps": steps,
            "discard": None if steps is None else count_discarded_steps(steps),
            "disagreement": replay.estimate_segment_disagreement_limit(
                state.latest_analysis.num_blocks if state.latest_analysis else 0
            ),
        },
        "seed": evidence.compute_block_seed(state.comparison, block_number),
    }
