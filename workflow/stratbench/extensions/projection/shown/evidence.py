"""Adds projected candidates to a decision: strategies on unmeasured numbers of workers."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace

import pandas as pd

from stratbench.analysis.decision.candidate import Candidate
from stratbench.analysis.decision.constraints import Constraints
from stratbench.analysis.decision.evidence import Evidence, Question
from stratbench.analysis.decision.sentences import format_gpu_hours_and_price, format_time_and_cost
from stratbench.cell.text.words import format_bytes, format_hours, format_short_time
from stratbench.extensions.projection.shown.projected import (
    Projected,
    StrategyKey,
    read_crossing_sentences,
    read_projections_by_strategy,
)


class ProjectionEvidence(Evidence):
    """Evidence for a decision from a projection.csv.

    Args:
        projected: Projected trainings by strategy and number of workers, within the constraints.
        crossings: Sentences on from where on another strategy is the fastest, by experiment and model.
    """

    def __init__(
        self,
        projected: Mapping[StrategyKey, Mapping[int, Projected]],
        crossings: Mapping[Question, Sequence[str]] | None = None,
    ):
        self.projected, self.crossings = projected, crossings or {}

    def iter_unmeasured_candidates(
        self, question: Question, candidates: Sequence[Candidate], constraints: Constraints
    ) -> Iterator[Candidate]:
        """Yield projected candidates: strategies on unmeasured numbers of workers.

        Numbers of workers are that of all available GPUs, and smaller ones. A candidate has the projected
        time with its 80 % interval, and the score of the largest measured number of workers. If nothing is
        projected to all GPUs, the strategy's measured candidates get the reason.

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
                constraints.gpus,
                Projected(find_missing_projection_reason(usable, constraints.gpus)),
            )
            for c in line:
                c.no_projection_reason = requested.missing_reason
            for workers, projected in by_count.items():
                if not projected.missing_reason:
                    yield make_projected_candidate(usable, workers, projected)

    def iter_answer_changes(self, question: Question, choice: Candidate) -> Iterable[str]:
        """Yield sentences on the worker counts from which the fastest strategy changes."""
        if choice.has_projected_time:
            for sentence in self.crossings.get(question, ()):
                yield f"Another number of workers: {sentence}"


def read_evidence(path: str, constraints: Constraints) -> Evidence:
    """Return the evidence in the projection.csv at `path`. It is empty if `path` is ""."""
    if not path:
        return Evidence()
    return ProjectionEvidence(
        read_projections_by_strategy(path, constraints.gpus), read_crossing_sentences(path)
    )


def make_projected_candidate(
    measured: Sequence[Candidate], workers: int, projected: Projected
) -> Candidate:
    """Return a candidate of a decision from a projected training.

    Args:
        measured: Usable measured candidates of the strategy, in ascending order of workers.
        workers: Number of workers of the projection.
        projected: The projected training.
    """
    low_s, middle_s, high_s = projected.train_range_s
    candidate = replace(
        measured[-1],
        gpus=workers,
        time_source_text=f"projected from {projected.evidence_text}",
        repetition_noun="repeat",
        has_projected_time=True,
        times=pd.Series(dtype=float),
        time_s=middle_s,
        projected_time_low_s=low_s,
        projected_time_high_s=high_s,
        peak_memory_bytes=projected.memory_high_bytes,
        max_score_loss=None,
        allocated_gpu_s=None,
        mean_num_workers=None,
        tokens_per_s=None,
        mfu=None,
        verdict_claim_and_confidence=None,
        caveats=list(dict.fromkeys(caveat for c in measured for caveat in c.caveats)),
    )
    candidate.projection_text = describe_projected_candidate(candidate, projected)
    return candidate


def find_missing_projection_reason(measured: list[Candidate], workers: int) -> str:
    """Return why a strategy has no projection to a number of workers.

    Args:
        measured: Usable measured candidates of the strategy, in ascending order of workers.
        workers: Number of workers.
    """
    if not measured:
        return "none of its records is usable"
    if workers < (least := measured[0].gpus):
        return f"the smallest measured count is {least} workers"
    return "nothing was projected; `snakemake decide` does so from the study's records"


def describe_projected_candidate(candidate: Candidate, projected: Projected) -> str:
    """Return a text on a projected candidate: its values with intervals, and their evidence."""
    low_s, step_s, high_s = projected.step_range_s
    least, share, most = projected.efficiency_range
    parts = [
        f"It would train in {format_time_and_cost(candidate)}{format_gpu_hours_and_price(candidate)}",
        f"at {format_short_time(step_s)} per global batch (80 %: {format_short_time(low_s)} to "
        f"{format_short_time(high_s)})",
        f"an efficiency of {share:.2f} ({least:.2f} to {most:.2f})",
    ]
    peak = candidate.peak_memory_bytes
    parts.append(
        "an unknown peak memory"
        if peak is None
        else f"a peak memory of up to {format_bytes(peak)} per worker"
    )
    text = f"{parts[0]}, {parts[1]}, with {parts[2]} and {parts[3]}."
    if projected.target_range_s is not None:
        low_s, middle_s, high_s = map(format_short_time, projected.target_range_s)
        cost = projected.target_cost
        noun = "process" if candidate.has_cpu_workers else "GPU"
        paid = "" if cost is None else f", at a cost of {cost:.3g}"
        text += (
            f" The target score is reached after {middle_s} (80 %: {low_s} to {high_s}), with "
            f"{format_hours(projected.target_gpu_hours)} {noun}-hours{paid}."
        )
    return f"{text} Evidence: {projected.evidence_text}."
