"""Builds the candidates of a decision, one per strategy and number of workers, and excludes some."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import fields
from typing import Any

import numpy as np
import pandas as pd

from stratbench.analysis.decision.candidate import DIVERGED, EXCLUDED, Candidate
from stratbench.analysis.decision.constraints import Constraints
from stratbench.analysis.decision.evidence import Evidence
from stratbench.analysis.decision.tolerance import UNUSABLE, exclude_by_score_tolerance
from stratbench.analysis.records.groups import Group, Repeats, iter_findings_by_group
from stratbench.analysis.records.score import read_score
from stratbench.cell.text.words import GIB, choose_byte_unit_name_and_size
from stratbench.strategies.base import Traits

#: Name of the audit rule for scores so bad that training did not work.
FLOOR_RULE = "score-below-floor"
#: Why a candidate is excluded, by any status of one of its cells other than `ok`.
KIND_OF_STATUS = EXCLUDED | {
    "infeasible": "does not fit",
    "incomparable": "other work",
    "error": "failed",
}


def build_decision_candidates(
    rows: pd.DataFrame,
    findings: list[dict[str, Any]],
    constraints: Constraints,
    evidence: Sequence[Evidence] = (),
) -> list[Candidate]:
    """Return all candidates of one experiment and model, measured ones first.

    Args:
        rows: Rows of cells.csv.
        findings: Findings of the audit.
        constraints: Constraints of the decision.
        evidence: Evidence of extensions.
    """
    groups = Repeats(rows)
    candidates = []
    for key, on_it in iter_findings_by_group(findings, groups.all):
        candidate = build_measured_candidate(groups, key, constraints)
        for one in evidence:
            one.replace_measured_times(candidate, groups, key)
        exclude_by_outcomes_and_findings(candidate, groups.all[key], on_it, constraints)
        candidates.append(candidate)
    question = (str(rows.iloc[0]["experiment"]), str(rows.iloc[0]["model"]))
    for one in evidence:
        candidates += one.iter_unmeasured_candidates(question, candidates, constraints)
    for candidate in candidates:
        exclude_by_constraints(candidate, constraints)
    exclude_by_score_tolerance(candidates, constraints)
    for one in evidence:
        one.exclude_candidates(question, candidates)
    return candidates


def build_measured_candidate(
    all_repeats: Repeats, group: Group, constraints: Constraints
) -> Candidate:
    """Return the candidate for a strategy and number of workers, from its measured repeats.

    Args:
        all_repeats: All repeats.
        group: The candidate's group.
        constraints: Constraints of the decision.
    """
    frame = all_repeats.all[group]
    ok = all_repeats.ok.get(group, frame[:0])
    times = pd.Series(all_repeats.values(group, "train_time_s"), dtype=float)

    def find_column_maximum(column: str) -> float | None:
        return max(all_repeats.values(group, column).values(), default=None)

    def compute_column_median(column: str, factor: float = 1.0) -> float | None:
        values = list(all_repeats.values(group, column).values())
        return factor * float(np.median(values)) if values else None

    cards = all_repeats.values(group, "device_memory_bytes").values()
    score = read_score(frame)
    error = find_column_maximum("score_error")
    on_cpu = bool((ok["device_kind"] == "cpu").any())
    return Candidate(
        strategy=group.strategy,
        gpus=int(group.gpus),
        traits=read_strategy_traits(frame),
        times=times,
        time_s=float(np.exp(np.log(times).mean())) if len(times) else None,
        score=score,
        scores=score.display_factor
        * pd.Series(all_repeats.values(group, "score_final"), dtype=float),
        score_standard_error=None if error is None else score.display_factor * error,
        skips_evaluation=bool(frame["steps"].notna().any()),
        test_samples=find_column_maximum("test_samples"),
        tokens_per_s=compute_column_median("throughput_samples_per_s", score.counts_per_sample)
        if score.throughput_unit == "tokens"
        else None,
        mfu=compute_column_median("mfu"),
        peak_memory_bytes=find_column_maximum("peak_memory_bytes"),
        model_states_bytes=find_column_maximum("model_states_bytes"),
        gpu_memory_bytes=None if on_cpu else min(cards, default=None),
        has_cpu_workers=on_cpu,
        has_servers=all_repeats.has_parameter_servers([group]),
        score_depends_on_worker_count=not contains_false(ok["batchnorm"])
        or contains_false(ok["loss_adds_up"]),
        global_batch=find_column_maximum("global_batch"),
        hosts=frozenset(map(str, ok["host"].dropna())),
        price_per_gpu_hour=constraints.price_per_gpu_hour,
        has_planned_repeats=has_planned_number_of_records(frame),
    )


def contains_false(true_or_false: pd.Series) -> bool:
    """Return whether a column of true and false contains false. Missing values are ignored."""
    return bool((true_or_false.dropna().astype(str) == "False").any())


def has_planned_number_of_records(repeats: pd.DataFrame) -> bool:
    """Return whether all records of a candidate plan as many repeats as there are records.

    A record states the number in the config when its cell was trained. A repeat that was added later
    states another number than the earlier repeats. The numbers also differ while repeats are missing.
    """
    return set(repeats["planned_repeats"]) == {len(repeats)}


def read_strategy_traits(repeats: pd.DataFrame) -> Traits:
    """Return the strategy's declared traits from its records. Missing traits have cautious defaults."""
    recorded = {trait.name: repeats[trait.name].dropna() for trait in fields(Traits)}
    return Traits(**{name: values.iloc[0] for name, values in recorded.items() if len(values)})


def exclude_by_outcomes_and_findings(
    candidate: Candidate,
    repeats: pd.DataFrame,
    findings: Iterable[dict[str, Any]],
    constraints: Constraints,
) -> None:
    """Exclude a candidate because of failed runs or audit findings. Milder findings become caveats.

    Args:
        candidate: The candidate, changed in place.
        repeats: Rows of the candidate's repeats.
        findings: Findings of the audit.
        constraints: Constraints of the decision.
    """
    for status, rows in repeats.groupby("status", sort=False):
        share = "" if len(rows) == len(repeats) else f"{len(rows)} of {len(repeats)} repeats: "
        reason = rows["reason"].iloc[0]
        limit = rows["time_limit_s"].max()
        over = "its time limit" if pd.isna(limit) else f"{limit:g} s"
        whys = {
            "oom": "out of memory",
            "infeasible": f"{reason} by the plan",
            "timeout": f"not done after {over}",
            "diverged": DIVERGED,
            "incomparable": str(reason).removeprefix("other work: "),
        }
        if status in KIND_OF_STATUS:
            candidate.exclude_from_decision(
                KIND_OF_STATUS[status], f"{share}{whys.get(status, reason)}"
            )
    if candidate.time_s is None:
        untimed = "no training time recorded" if (repeats["status"] == "ok").any() else "no record"
        candidate.exclude_from_decision("not measured", untimed)
    for finding in findings:
        if finding["affects"] == "memory" and constraints.gpu_memory_gib is None:
            if (
                finding["severity"] != "note"
                and finding["rule"] not in candidate.rules_doubting_peak_memory
            ):
                candidate.rules_doubting_peak_memory.append(finding["rule"])
        elif finding["severity"] == "unusable":
            text = f"the audit: {finding['rule']} ({finding['figures']})"
            candidate.exclude_from_decision(UNUSABLE, text)
        elif finding["rule"] == FLOOR_RULE:
            candidate.exclude_from_decision(
                "does not learn", f"the audit: {candidate.score.name} {finding['figures']}"
            )
        elif finding["severity"] == "warning" and finding["rule"] not in candidate.caveats:
            candidate.caveats.append(finding["rule"])


def exclude_by_constraints(candidate: Candidate, constraints: Constraints) -> None:
    """Exclude a candidate that violates the constraints on workers, memory or time."""
    if constraints.gpus is not None and candidate.gpus > constraints.gpus:
        candidate.exclude_from_decision(
            "needs more workers", f"{candidate.gpus}, but {constraints.gpus} are available"
        )
    if constraints.gpu_memory_gib is not None:
        exclude_by_memory_limit(
            candidate, constraints.gpu_memory_gib * GIB, constraints.memory_margin
        )
    time_s = candidate.time_s
    if constraints.deadline_s is not None and time_s is not None:
        most_s = candidate.training_time_range_s[1]
        if time_s > constraints.deadline_s:
            candidate.exclude_from_decision(
                "too slow", format_amount_and_limit(time_s, constraints.deadline_s, "s")
            )
        elif most_s > constraints.deadline_s:
            candidate.caveats.append(
                f"it may take {format_amount_and_limit(most_s, constraints.deadline_s, 's')}"
            )
    stops = candidate.traits.ends_with_a_worker and candidate.gpus > 1
    if stops and not constraints.gang_scheduled:
        candidate.exclude_from_decision("needs all workers", "the job stops when a worker is lost")


def exclude_by_memory_limit(candidate: Candidate, limit_bytes: float, memory_margin: float) -> None:
    """Exclude a candidate whose peak memory, plus a reserve, exceeds the memory limit.

    Add a caveat if the memory is unknown. A peak excludes the memory of the driver, the libraries and the
    allocator's fragmentation, for which the plan has a reserve, too.

    Args:
        candidate: The candidate, changed in place.
        limit_bytes: Memory of a worker.
        memory_margin: Reserve as a fraction of the peak.
    """
    held = (
        candidate.model_states_bytes if candidate.has_cpu_workers else candidate.peak_memory_bytes
    )
    what = "model states alone" if candidate.has_cpu_workers else "peak"
    if held is not None and held * (1 + memory_margin) > limit_bytes:
        reserve = f" plus a reserve of {100 * memory_margin:g} %" if held <= limit_bytes else ""
        name, unit = choose_byte_unit_name_and_size(limit_bytes)
        sizes = format_amount_and_limit(held / unit, limit_bytes / unit, name, reserve)
        candidate.exclude_from_decision("does not fit", f"{what} {sizes}")
    elif candidate.has_cpu_workers or held is None:
        reason = (
            "its records are of CPU processes"
            if candidate.has_cpu_workers
            else "memory was not recorded"
        )
        candidate.caveats.append(f"whether it fits is not known: {reason}")


def format_amount_and_limit(amount: float, limit: float, unit: str, reserve_text: str = "") -> str:
    """Return an amount and its exceeded limit as text. Example: `12 s, over the limit of 10 s`.

    The texts have enough digits to differ.

    Args:
        amount: An amount that exceeds the limit, perhaps only with a reserve.
        limit: The limit.
        unit: Unit of both.
        reserve_text: Text after the amount, such as the reserve.
    """
    for digits in range(2 if max(amount, limit) < 10 else 0, 6):
        texts = [
            f"{x:.{digits}f}".rstrip("0").rstrip(".") if digits else f"{x:.0f}"
            for x in (amount, limit)
        ]
        if texts[0] != texts[1]:
            break
    return f"{texts[0]} {unit}{reserve_text}, over the limit of {texts[1]} {unit}"
