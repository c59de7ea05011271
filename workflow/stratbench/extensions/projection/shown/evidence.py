"""Adds projections to a decision: candidates on numbers of workers that were not measured."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace

import pandas as pd

from stratbench.analysis.decision.candidate import Candidate
from stratbench.analysis.decision.constraints import Constraints
from stratbench.analysis.decision.evidence import Evidence, Question
from stratbench.analysis.decision.sentences import describe_amount, describe_price
from stratbench.cell.text.words import format_bytes, format_hours, format_short_time
from stratbench.extensions.projection.shown.projected import (
    Line,
    Projected,
    read_crossings,
    read_projection,
)


class ProjectionEvidence(Evidence):
    """Evidence from a projection.csv for a decision.

    Args:
        projected: Projections by strategy and number of workers, within the constraints.
        crossings: Sentences on where the fastest strategy changes, by experiment and model.
    """

    def __init__(
        self,
        projected: Mapping[Line, Mapping[int, Projected]],
        crossings: Mapping[Question, Sequence[str]] | None = None,
    ):
        self.projected, self.crossings = projected, crossings or {}

    def iter_unmeasured_candidates(
        self, question: Question, candidates: Sequence[Candidate], constraints: Constraints
    ) -> Iterator[Candidate]:
        """Yield projected candidates: each strategy on all available GPUs and on fewer GPUs.

        Measured candidates are left out.

        The time is the projected one, with an interval of 80 %. The score is that of the largest measured
        number of workers. If nothing is projected to all GPUs, the strategy's candidates state the reason.

        Args:
            question: Experiment and model.
            candidates: Measured candidates.
            constraints: Constraints of the decision.
        """
        for name in dict.fromkeys(c.strategy for c in candidates):
            line = [c for c in candidates if c.strategy == name]
            if constraints.gpus is None or constraints.gpus in [c.gpus for c in line]:
                continue
            usable = sorted((c for c in line if not c.exclusion_kind), key=lambda c: c.gpus)
            by_count = self.projected.get((*question, name), {}) if usable else {}
            requested = by_count.get(
                constraints.gpus, Projected(missing_projection_reason(usable, constraints.gpus))
            )
            for c in line:
                c.no_projection_reason = requested.missing_reason
            for gpus, made in by_count.items():
                if not made.missing_reason:
                    yield make_candidate(usable, gpus, made)

    def iter_answer_changes(self, question: Question, choice: Candidate) -> Iterable[str]:
        """Yield sentences on other numbers of workers for which another strategy is fastest."""
        if choice.is_projected:
            for sentence in self.crossings.get(question, ()):
                yield f"Another number of workers: {sentence}"


def read_evidence(path: str, constraints: Constraints) -> Evidence:
    """Return the evidence in a projection.csv, or empty evidence if `path` is ""."""
    if not path:
        return Evidence()
    return ProjectionEvidence(read_projection(path, constraints.gpus), read_crossings(path))


def make_candidate(usable: Sequence[Candidate], gpus: int, made: Projected) -> Candidate:
    """Return a candidate: a strategy as projected to a number of workers.

    Args:
        usable: Measured candidates of the strategy that can be used.
        gpus: Number of workers.
        made: The projection.
    """
    low_s, middle_s, high_s = made.train_range_s
    candidate = replace(
        usable[-1],
        gpus=gpus,
        basis=f"projected from {made.evidence_text}",
        repetition_unit="repeat",
        is_projected=True,
        times=pd.Series(dtype=float),
        time_s=middle_s,
        time_low_s=low_s,
        time_high_s=high_s,
        memory_bytes=made.memory_high_bytes,
        score_loss_upper=None,
        allocated_gpu_s=None,
        mean_num_workers=None,
        tokens_per_s=None,
        mfu=None,
        verdict_claim=None,
        caveats=list(dict.fromkeys(doubt for c in usable for doubt in c.caveats)),
    )
    candidate.projected_figures = describe_projection(candidate, made)
    return candidate


def missing_projection_reason(usable: list[Candidate], gpus: int) -> str:
    """Return why a strategy has no projection to a number of workers."""
    if not usable:
        return "none of its records is usable"
    if gpus < (least := usable[0].gpus):
        return f"the smallest measured count is {least} workers"
    return "nothing was projected; `snakemake decide` does so from the study's records"


def describe_projection(first: Candidate, made: Projected) -> str:
    """Return a text on a projected candidate: its values with intervals, and the evidence."""
    (low_s, step_s, high_s), (least, share, most) = made.step_range_s, made.efficiency_range
    parts = [
        f"It would train in {describe_amount(first)}{describe_price(first)}",
        f"at {format_short_time(step_s)} per global batch (80 %: {format_short_time(low_s)} to "
        f"{format_short_time(high_s)})",
        f"an efficiency of {share:.2f} ({least:.2f} to {most:.2f})",
    ]
    peak = first.memory_bytes
    parts.append(
        "an unknown peak memory"
        if peak is None
        else f"a peak memory of up to {format_bytes(peak)} per worker"
    )
    text = f"{parts[0]}, {parts[1]}, with {parts[2]} and {parts[3]}."
    if made.target_range_s is not None:
        low_s, middle_s, high_s = map(format_short_time, made.target_range_s)
        paid = "" if made.target_cost is None else f", at a cost of {made.target_cost:.3g}"
        text += (
            f" The target score is reached after {middle_s} (80 %: {low_s} to {high_s}), with "
            f"{format_hours(made.target_gpu_hours)} {'process' if first.is_on_cpu else 'GPU'}-hours{paid}."
        )
    return f"{text} Evidence: {made.evidence_text}."
