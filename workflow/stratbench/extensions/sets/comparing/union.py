"""Decides over several result sets which strategy on which cluster is best, for each trained work."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any, NamedTuple

import pandas as pd

from stratbench.analysis.decision.candidate import Candidate
from stratbench.analysis.decision.candidates import build_decision_candidates
from stratbench.analysis.decision.constraints import Constraints
from stratbench.analysis.decision.decide import Decision, decide_with_pooled_variance, read_evidence
from stratbench.analysis.decision.tolerance import exclude_by_score_tolerance
from stratbench.cell.coordinates import STATUSES
from stratbench.extensions.sets.check import COMPARABLE_WORK_COLUMNS
from stratbench.extensions.sets.reading import ResultSet

#: Columns of cells.csv that define the trained work: cells of several sets with equal values train the same.
WORK_COLUMNS = ("model", *COMPARABLE_WORK_COLUMNS, "slowdown")


class WorkPart(NamedTuple):
    """Cells that train the same, in one experiment of one set."""

    set_name: str
    #: Rows of cells.csv.
    rows: pd.DataFrame
    #: Findings of the audit on these cells.
    findings: list[dict[str, Any]]


def decide_over_sets(
    sets: Sequence[ResultSet], prices: Mapping[str, float], constraints: Constraints
) -> list[Decision]:
    """Return a decision for each trained work that is in several sets.

    Cells train the same work if they have equal values in WORK_COLUMNS. The candidates of a decision are the
    strategies of all sets, each on a number of workers. Repeats of two sets are paired by their numbers. Such
    pairs are arbitrary, and make intervals no narrower.

    Args:
        sets: The sets.
        prices: Price per GPU-hour in each set, by name of the set. Other sets have the price of the
            constraints.
        constraints: Constraints of the decisions.
    """
    jobs: dict[tuple[str, ...], list[WorkPart]] = {}
    for result_set in sets:
        findings = result_set.findings.to_dict("records")
        weak = result_set.cells.groupby("experiment")["global_batch"].nunique() > 1
        for (experiment, _), rows in result_set.cells.groupby(["experiment", "model"], sort=False):
            job = get_common_work_values(rows, bool(weak[experiment]))
            if job is not None:
                on_them = [
                    f for f in findings if f["experiment"] == experiment or pd.isna(f["experiment"])
                ]
                jobs.setdefault(job, []).append(WorkPart(result_set.name, rows, on_them))
    # All rows of a decision have the experiment of the first set.
    studied = [
        (
            pd.concat([part.rows for part in parts]).assign(
                experiment=parts[0].rows["experiment"].iloc[0]
            ),
            list(iter_candidates_of_sets(parts, prices, constraints)),
        )
        for parts in jobs.values()
        if len({part.set_name for part in parts}) > 1
    ]
    return decide_with_pooled_variance(studied, constraints)


def get_common_work_values(rows: pd.DataFrame, is_weak_scaling: bool) -> tuple[Any, ...] | None:
    """Return the values of WORK_COLUMNS that all rows of one experiment and model have.

    Return None if the rows have different values.

    Args:
        rows: Rows of cells.csv.
        is_weak_scaling: Whether the global batch grows with the number of workers, and so is not compared.
    """
    usable = rows[rows["status"].isin(STATUSES)]
    columns = [name for name in WORK_COLUMNS if not (is_weak_scaling and name == "global_batch")]
    values = [tuple(usable[name].astype(str).unique()) for name in columns]
    return tuple(v[0] for v in values) if all(len(v) == 1 for v in values) else None


def iter_candidates_of_sets(
    parts: Sequence[WorkPart], prices: Mapping[str, float], constraints: Constraints
) -> Iterator[Candidate]:
    """Yield a decision's candidates, named by strategy and set, such as `ddp (a100)`.

    If several experiments of a set train the same, a name has the experiment too: `ddp (a100, first)`.

    Args:
        parts: Cells that train the same, by set and experiment.
        prices: Price per GPU-hour in each set, by name of the set.
        constraints: Constraints of the decision.
    """
    candidates = []
    times = Counter(part.set_name for part in parts)
    for name, rows, findings in parts:
        here = replace(
            constraints, price_per_gpu_hour=prices.get(name, constraints.price_per_gpu_hour)
        )
        mine = build_decision_candidates(
            rows, findings, here, list(read_evidence((), here).values())
        )
        whose = f"{name}, {rows['experiment'].iloc[0]}" if times[name] > 1 else name
        for candidate in mine:
            candidate.strategy = f"{candidate.strategy} ({whose})"
            # A host gets the name of its set, because hosts of two sets may have the same name.
            candidate.hosts = frozenset(f"{host} of {name}" for host in candidate.hosts)
        candidates += mine
    exclude_by_score_tolerance(candidates, constraints)
    yield from candidates


def iter_constraint_sentences(
    constraints: Constraints, prices: Mapping[str, float]
) -> Iterator[str]:
    """Yield sentences on the constraints of a decision, and on the prices in all sets."""
    listed = ", ".join(f"{price:g} per GPU-hour in {name}" for name, price in prices.items())
    yield from constraints.iter_constraint_texts(f"ranked by cost at {listed}" if prices else "")
