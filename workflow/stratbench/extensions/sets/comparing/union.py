"""The decision over several sets: which strategy on which cluster, per model and work."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any, NamedTuple

import pandas as pd

from stratbench.analysis.decision.candidate import Candidate
from stratbench.analysis.decision.candidates import candidates_among
from stratbench.analysis.decision.constraints import Constraints
from stratbench.analysis.decision.decide import Decision, decide_together, read_evidence
from stratbench.analysis.decision.tolerance import judge_scores
from stratbench.cell.coordinates import STATUSES
from stratbench.extensions.sets.check import SHARED
from stratbench.extensions.sets.reading import ResultSet

#: Columns of cells.csv that the cells of one job have in common.
JOB = ("model", *SHARED, "slowdown")


class Part(NamedTuple):
    """The part of a job that one experiment of a set holds."""

    set_name: str
    #: Rows of one experiment and model, and the audit's findings on them.
    rows: pd.DataFrame
    findings: list[dict[str, Any]]


def decisions_over(
    sets: Sequence[ResultSet], prices: Mapping[str, float], constraints: Constraints
) -> list[Decision]:
    """Return a decision for each job; its candidates are strategies on worker counts in sets.

    JOB defines a job. Repeats of two sets are paired by their numbers, which is arbitrary and makes the
    intervals no narrower. Experiments have their names in the first set.

    Args:
        sets: The sets.
        prices: Prices by name of a set, which override the constraints' price.
        constraints: Constraints of the decision.
    """
    jobs: dict[tuple[str, ...], list[Part]] = {}
    for result_set in sets:
        findings = result_set.findings.to_dict("records")
        weak = result_set.cells.groupby("experiment")["global_batch"].nunique() > 1
        for (experiment, _), rows in result_set.cells.groupby(["experiment", "model"], sort=False):
            job = job_of(rows, bool(weak[experiment]))
            if job is not None:
                on_them = [
                    f for f in findings if f["experiment"] == experiment or pd.isna(f["experiment"])
                ]
                jobs.setdefault(job, []).append(Part(result_set.name, rows, on_them))
    studied = [
        (
            named_alike(pd.concat([part.rows for part in parts])),
            list(candidates_in(parts, prices, constraints)),
        )
        for parts in jobs.values()
        if len({part.set_name for part in parts}) > 1
    ]
    return decide_together(studied, constraints)


def job_of(rows: pd.DataFrame, is_weak: bool) -> tuple[Any, ...] | None:
    """Return the values that the rows of one experiment and model have in common.

    Return None if they differ.
    """
    usable = rows[rows["status"].isin(STATUSES)]
    columns = [name for name in JOB if not (is_weak and name == "global_batch")]
    values = [tuple(usable[name].astype(str).unique()) for name in columns]
    return tuple(v[0] for v in values) if all(len(v) == 1 for v in values) else None


def candidates_in(
    parts: Sequence[Part], prices: Mapping[str, float], constraints: Constraints
) -> Iterator[Candidate]:
    """Yield all candidates of a job, with each set's price, named `ddp (a100)`.

    If several experiments of a set are one job, the experiment is named, too: `ddp (a100, first)`.

    Args:
        parts: Parts of the job, by set.
        prices: Prices by name of a set.
        constraints: Constraints of the decision.
    """
    candidates = []
    times = Counter(part.set_name for part in parts)
    for name, rows, findings in parts:
        here = replace(
            constraints, price_per_gpu_hour=prices.get(name, constraints.price_per_gpu_hour)
        )
        mine = candidates_among(rows, findings, here, list(read_evidence((), here).values()))
        whose = f"{name}, {rows['experiment'].iloc[0]}" if times[name] > 1 else name
        for candidate in mine:
            candidate.strategy = f"{candidate.strategy} ({whose})"
            # Hosts of two sets may have the same name.
            candidate.hosts = frozenset(f"{host} of {name}" for host in candidate.hosts)
        candidates += mine
    judge_scores(candidates, constraints)
    yield from candidates


def named_alike(rows: pd.DataFrame) -> pd.DataFrame:
    """Return the rows of a job, all under the experiment of the first row."""
    return rows.assign(experiment=rows["experiment"].iloc[0])


def sentences_on(constraints: Constraints, prices: Mapping[str, float]) -> Iterator[str]:
    """Yield the constraints in words, with the prices of all sets."""
    listed = ", ".join(f"{price:g} per GPU-hour in {name}" for name, price in prices.items())
    yield from constraints.sentences(f"ranked by cost at {listed}" if prices else "")
