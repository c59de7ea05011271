"""Decides which strategy to choose for each model: ranks the records under the constraints.

Writes decision.csv, the matrix of all strategies and worker counts with a verdict and a reason each,
and answers.json, the decisions in words, which the report shows. Also prints them. If nothing was
measured, the answer comes from the rules of `theory`, and says so.
"""

from __future__ import annotations

import argparse
import json
import sys
import textwrap
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pandas as pd

from stratbench.analysis import theory
from stratbench.analysis.audit import read_audit
from stratbench.analysis.candidates import Candidate, candidates_among
from stratbench.analysis.columns import read_cells
from stratbench.analysis.confidence import confidence_in
from stratbench.analysis.constraints import Constraints
from stratbench.analysis.groups import Group
from stratbench.analysis.measures import format_number
from stratbench.analysis.ranking import AgainstRival, Ranking, rankings_of_bouts
from stratbench.analysis.verdicts import Raced, raced_groups, read_verdict
from stratbench.cell.files import in_one_sentence, write_atomic
from stratbench.cell.words import MIB, counted, worker_noun

MATRIX_COLUMNS = (
    *("experiment", "dataset", "model", "strategy", "gpus", "verdict", "rank", "why", "basis"),
    *("repeats", "time_s", "cost", "memory_mib", "score", "score_name", "score_unit"),
    *("ratio_to_first", "low", "high", "may_lose", "doubts"),
)


#: Characters of a reason that a headline quotes.
MOST_OF_A_REASON = 120


@dataclass(frozen=True)
class Decision:
    """The answer for one model in one experiment (`experiment` is empty for theory alone)."""

    experiment: str
    dataset: str
    model: str
    #: `records` or `theory`.
    source: str
    choice: Candidate | None
    headline: str
    reason: str
    #: `high`, `medium`, `low` or `none`, and why.
    confidence: str
    confidence_why: str
    changes: tuple[str, ...]
    #: (strategy, why) for each strategy that cannot be chosen at any count.
    excluded: tuple[tuple[str, str], ...]
    matrix: tuple[dict[str, Any], ...]


def decisions(
    cells: pd.DataFrame,
    findings: pd.DataFrame,
    constraints: Constraints,
    raced: Mapping[Group, Raced] | None = None,
) -> list[Decision]:
    """A decision for each experiment and model, in the order of the config. `raced`: a verdict's blocks."""
    listed = findings.to_dict("records")
    studied = [
        (rows, candidates_among(rows, listed, constraints, raced))
        for _, rows in cells.groupby(["experiment", "model"], sort=False)
    ]
    # All models are ranked together, even if only one is wanted: all variances together say more.
    rankings = rankings_of_bouts([found for _, found in studied], constraints.equivalence_margin)
    made = [
        decide(rows, found, ranking, constraints)
        for (rows, found), ranking in zip(studied, rankings, strict=True)
    ]
    if constraints.model is not None:
        made = [decision for decision in made if decision.model == constraints.model]
        if not made:  # the name may be a mistake
            why = f"it is not a model of the study, which has {', '.join(cells['model'].unique())}"
            made = [decision_by_theory("", "", constraints.model, constraints, [], why)]
    return made


def decide(
    rows: pd.DataFrame, found: list[Candidate], ranking: Ranking | None, given: Constraints
) -> Decision:
    """The decision on one experiment and model (rows of cells.csv); `found` are its candidates.

    `ranking` ranks the candidates that nothing excludes; None if there are none.
    """
    experiment, dataset, model = (str(rows.iloc[0][n]) for n in ("experiment", "dataset", "model"))
    if all(c.kind in ("not measured", "failed") for c in found):
        return decision_by_theory(experiment, dataset, model, given, found)
    ranked = [] if ranking is None else [ranking.first, *(c.rival for c in ranking.compared)]
    common = {"experiment": experiment, "dataset": dataset, "model": model, "source": "records"}
    common["matrix"] = matrix_rows((experiment, dataset, model), found, ranking)
    common["excluded"] = tuple(excluded_strategies(found, {c.strategy for c in ranked}))
    if ranking is None:
        return Decision(
            **common,
            choice=None,
            headline=f"No strategy can be recommended from these records: {why_none(found)}.",
            reason="Every strategy is excluded; see why below.",
            confidence="none",
            confidence_why="Nothing is left to rank.",
            changes=tuple(sentences_on_constraints(found, None)),
        )
    noun = worker_noun(rows["device_kind"])
    level, why = confidence_in(rows, ranking, given)
    return Decision(
        **common,
        choice=ranking.first,
        headline=headline_of(ranking, noun, given),
        reason=reason_for(ranking, noun),
        confidence=level,
        confidence_why=why,
        changes=tuple(sentences_on_changes(found, ranking, given)),
    )


def why_none(found: list[Candidate]) -> str:
    """Why all candidates are excluded: by kind of reason the strategies, and the reason of the first."""
    by_kind: dict[str, list[Candidate]] = {}
    for candidate in found:
        by_kind.setdefault(candidate.kind, []).append(candidate)
    return "; ".join(
        f"{', '.join(dict.fromkeys(c.strategy for c in held))}: {kind} "
        f"({textwrap.shorten(held[0].why, MOST_OF_A_REASON, placeholder=' ...')})"
        for kind, held in by_kind.items()
    )


def headline_of(ranking: Ranking, noun: str, given: Constraints) -> str:
    """The answer in one sentence that claims no more than its records show."""
    first = ranking.first
    text = f"{first.strategy} on {counted(first.gpus, noun)}"
    if ranking.tied:
        listed = [f"{c.strategy} on {counted(c.gpus, noun)}" for c in ranking.tied]
        more = [f"{len(listed) - 3} more"] if len(listed) > 4 else listed[3:]
        text = f"No clear winner: {text}, or {' or '.join(listed[:3] + more)}"
    if first.extrapolated:
        text += " (extrapolated, not measured)"
    elif ranking.chance:
        text += f" ({ranking.chance}: it may be chance)"
    if first.may_lose is not None and first.may_lose > given.tolerance_of(first.score):
        score = first.score
        text += (
            f"; its {score.name} may be up to {score.difference(first.may_lose, score.decimals - 1)} "
            f"worse ({given.tolerance_of(score):g} allowed)"
        )
    if first.unscored:
        text += "; no score was measured, equal ones are assumed"
    return text + "."


def reason_for(ranking: Ranking, noun: str) -> str:
    """A sentence with the numbers behind the choice."""
    first, price = ranking.first, "the time"
    if first.price_per_gpu_hour is not None:
        price = "the cost"
    text = f"It trains in {describe_amount(first)}"
    if not ranking.compared:
        text += ", and nothing else is left to compare with"
    else:
        found = ranking.compared[0]
        other = f"{found.rival.strategy} on {counted(found.rival.gpus, noun)}"
        if found.ratio == 1:
            text += f", exactly as {other} does"
        else:
            paid = describe_amount(found.rival)
            text += f"; {other} takes {describe_ratio(found)} times {price} ({paid})"
        if found.ratio < 1:
            text += (
                ", which counts as equal, and of equals fewer workers and less memory come first"
            )
        different = (c for c in ranking.compared if c.rival.strategy != first.strategy)
        other = next(different, found)
        if other is not found:
            on, paid = counted(other.rival.gpus, noun), describe_amount(other.rival)
            text += f", {other.rival.strategy} on {on} {describe_ratio(other)} times ({paid})"
    if first.served and first.cost is not None:
        text += "; its cost leaves out the processes of its servers (`processes` in cells.csv)"
    if first.mean_score is not None:
        text += f"; it reaches {first.score.name} {first.score.text(first.mean_score)}"
    if first.memory_bytes is not None:
        above = " above its base" if first.on_cpu else ""
        text += " with" if first.mean_score is not None else "; it has"
        text += f" a peak of {first.memory_bytes / MIB:.0f} MiB a worker{above}"
    return text + "."


def describe_ratio(found: AgainstRival) -> str:
    """The ratio, with its interval if it has one."""
    interval = "" if found.low is None else f" [{found.low:.2f}, {found.high:.2f}]"
    return f"{format_number(found.ratio, 2)}{interval}"


def describe_amount(candidate: Candidate) -> str:
    """The training time of a candidate, and its cost if there is a price."""
    seconds = f"{format_number(candidate.time_s or 0.0, None)} s"
    return seconds if candidate.cost is None else f"{seconds} at a cost of {candidate.cost:.3g}"


def sentences_on_changes(
    found: list[Candidate], ranking: Ranking, given: Constraints
) -> Iterator[str]:
    """Sentences on what would change the answer, starting from the nearest alternatives."""
    first, compared = ranking.first, ranking.compared
    ranked = [first, *(c.rival for c in compared)]
    if first.extrapolated:
        yield f"Cells on {first.gpus} workers: train them, and they replace the extrapolated times."
    elif ranking.chance or not ranking.is_clear:
        yield f"More {first.unit}s: they would say whether this order holds."
    yield from sentences_on_constraints(found, first)
    tolerance = given.tolerance_of(first.score)
    if first.may_lose is not None and first.may_lose > tolerance:
        sure = [c for c in ranked if c.may_lose is not None and c.may_lose <= tolerance]
        if sure:
            yield (
                f"A score that is certain: then {sure[0].strategy} on {sure[0].gpus} "
                f"({describe_amount(sure[0])})."
            )
    smaller = [c for c in ranked if smaller_than(c, first)]
    if smaller and first.memory_bytes:
        yield (
            f"GPUs with less memory than {first.memory_bytes / MIB:.0f} MiB: then "
            f"{smaller[0].strategy} on {smaller[0].gpus} ({smaller[0].memory_bytes / MIB:.0f} MiB)."
        )
    if first.traits.waits_for_slowest and given.price_per_gpu_hour is None:
        yield from sentences_on_slow_workers(first, ranked)


def smaller_than(candidate: Candidate, first: Candidate) -> bool:
    """Whether it needs clearly less memory than the first, if their records can be compared."""
    both = candidate.memory_bytes is not None and first.memory_bytes is not None
    return both and not first.on_cpu and candidate.memory_bytes < 0.95 * first.memory_bytes


def sentences_on_constraints(found: list[Candidate], first: Candidate | None) -> Iterator[str]:
    """For each constraint the best candidate that it keeps out, if that is better than the first."""
    lift = {
        "does not fit": "More memory",
        "too slow": "A later deadline",
        "worse score": "A worse score allowed",
        "needs all workers": "Workers that stay until the end",
        "needs more GPUs": "More GPUs",
    }
    for kind, words in lift.items():
        kept_out = [c for c in found if c.kind == kind and c.time_s is not None]
        best = min(kept_out, key=lambda c: (c.objective, c.gpus), default=None)
        if best and (first is None or best.objective < first.objective):
            yield f"{words}: then {best.strategy} on {best.gpus} ({describe_amount(best)}; {best.why})."
    stopped = dict.fromkeys(c.strategy for c in found if c.kind == "too slow" and c.time_s is None)
    if first is None and stopped:
        yield (
            f"A longer time_limit_s, which {', '.join(stopped)} reached: train again with --forcerun "
            "(docs/configuration.md)."
        )


def sentences_on_slow_workers(first: Candidate, ranked: list[Candidate]) -> Iterator[str]:
    """How slow a worker must be for the next strategy that does not wait to win, by theory.

    If one of N workers is f times slower, a strategy that waits takes f times as long, one that does
    not takes N / (N - 1 + 1/f) times as long. They are equal at f = (N r - 1) / (N - 1), with r the
    ratio of their times.
    """
    n = first.gpus
    free = [c for c in ranked if not c.traits.waits_for_slowest and c.gpus == n]
    if n > 1 and free and first.time_s and free[0].time_s:
        factor = (n * free[0].time_s / first.time_s - 1) / (n - 1)
        if factor > 1:
            yield (
                f"Workers of unequal speed: with one of {n} more than {factor:.2f} times slower than "
                f"the rest, {free[0].strategy} would win (by theory: it does not wait)."
            )


def excluded_strategies(found: list[Candidate], usable: set[str]) -> Iterator[tuple[str, str]]:
    """Each strategy that is excluded at every worker count, with the reasons by count."""
    for name in dict.fromkeys(c.strategy for c in found):
        if name not in usable:
            line = sorted((c for c in found if c.strategy == name), key=lambda c: c.gpus)
            told: dict[str, list[str]] = {}
            for c in line:
                told.setdefault(f"{c.kind}: {c.why}", []).append(str(c.gpus))
            yield name, "; ".join(f"on {', '.join(on)} {why}" for why, on in told.items())


def matrix_rows(
    where: tuple[str, str, str], found: list[Candidate], ranking: Ranking | None
) -> tuple[dict[str, Any], ...]:
    """A row of MATRIX for each candidate."""
    compared = [] if ranking is None else list(ranking.compared)
    places = {id(c.rival): (place, c) for place, c in enumerate(compared, 2)}
    rows = []
    for c in found:
        place, against = places.get(id(c), (None, None))
        verdict = c.kind
        if ranking is not None and c is ranking.first:
            place, verdict = 1, "recommended"
        elif against is not None:
            verdict = "tied" if against.stand == "tied" else "possible"
        values = (*where, c.strategy, c.gpus, verdict, place, c.why, c.basis)
        rows.append(
            dict(zip(MATRIX_COLUMNS, values, strict=False))
            | {
                "repeats": len(c.times),
                "time_s": c.time_s,
                "cost": c.cost,
                "memory_mib": c.memory_bytes and c.memory_bytes / MIB,
                "score": c.mean_score,
                "score_name": c.score.name,
                "score_unit": c.score.shown_unit,
                "ratio_to_first": against.ratio if against else 1.0 if place == 1 else None,
                "low": against and against.low,
                "high": against and against.high,
                "may_lose": c.may_lose,
                "doubts": "; ".join(c.doubts),
            }
        )
    return tuple(rows)


def decision_by_theory(
    experiment: str,
    dataset: str,
    model: str,
    given: Constraints,
    found: list[Candidate],
    why: str = "nothing was measured",
) -> Decision:
    """The decision if there are no measurements, with the reason `why` there are none."""
    name, reasons = theory.choice_by_theory(model, given, given.optimizers.get(experiment, "sgd"))
    return Decision(
        experiment=experiment,
        dataset=dataset,
        model=model,
        source="theory",
        choice=None,
        headline=f"{name or 'No strategy'}, by theory: {why}.",
        reason=" ".join(reasons),
        confidence="none",
        confidence_why="These are rules from theory; no record of this model is usable.",
        changes=("Records: train the study's cells of this model, and decide again.",),
        excluded=tuple(excluded_strategies(found, set())),
        matrix=matrix_rows((experiment, dataset, model), found, None),
    )


def notes_on_the_study(findings: pd.DataFrame) -> list[str]:
    """The audit's `unusable` findings on the study as a whole, as texts; they limit every decision."""
    places = ["experiment", "strategy", "model", "gpus", "repeat"]
    whole = findings[findings[places].isna().all(axis=1) & (findings["severity"] == "unusable")]
    return [f"{row.explanation} ({row.figures})" for row in whole.itertuples()]


def describe_decisions(found: Sequence[Decision], notes: Sequence[str], given: Constraints) -> str:
    """The decisions as text for a terminal."""
    lines = [f"Constraints: {'; '.join(given.sentences())}.", *notes, ""]
    for d in found:
        where = f"{d.model} ({d.experiment}, {d.dataset})" if d.experiment else d.model
        lines += [f"{where}: {d.headline}", f"  {d.reason}"]
        lines.append(f"  Confidence: {d.confidence}. {d.confidence_why}")
        lines += [f"  What would change it: {change}" for change in d.changes]
        lines += [f"  Excluded: {name}: {why}" for name, why in d.excluded]
        lines.append("")
    return "\n".join(lines)


def answers_as_json(
    found: Sequence[Decision], notes: Sequence[str], given: Constraints
) -> dict[str, Any]:
    """The content of answers.json: the decisions in words, and their constraints."""
    words = ("experiment", "dataset", "model", "source", "headline", "reason")
    words += ("confidence", "confidence_why", "changes", "excluded")
    return {
        "constraints": list(given.sentences()),
        "equivalence_margin": given.equivalence_margin,
        "across": list(notes),
        "answers": [{name: getattr(decision, name) for name in words} for decision in found],
    }


def write_decisions(
    cells: pd.DataFrame,
    findings: pd.DataFrame,
    given: Constraints,
    out: Path,
    answers_out: Path,
    raced: Mapping[Group, Raced] | None = None,
) -> str:
    """Decide, write the matrix (CSV) and the answers (JSON), and return the answers for a terminal."""
    found = decisions(cells, findings, given, raced)
    rows = [row for decision in found for row in decision.matrix]
    write_atomic(out, pd.DataFrame(rows, columns=list(MATRIX_COLUMNS)).to_csv(index=False))
    notes = notes_on_the_study(findings)
    write_atomic(answers_out, json.dumps(answers_as_json(found, notes, given), indent=1) + "\n")
    return describe_decisions(found, notes, given)


def main(argv: Sequence[str] | None = None) -> int:
    """Runs the command line; returns the exit code."""
    parser = argparse.ArgumentParser(prog="stratbench.analysis.decide", description=__doc__)
    parser.add_argument("--cells", type=Path, required=True, help="cells.csv")
    parser.add_argument("--audit", type=Path, required=True, help="audit.csv")
    parser.add_argument("--verdict", default="", help="the verdict.json that counts, if any")
    parser.add_argument("--constraints", default="{}", help="`decide` of config.yaml, as JSON")
    parser.add_argument("--out", type=Path, required=True, help="the decision matrix (CSV)")
    parser.add_argument("--answers-out", type=Path, required=True, help="the decisions (JSON)")
    args = parser.parse_args(argv)
    given = Constraints.from_json(args.constraints)
    cells, findings = read_cells(args.cells), read_audit(args.audit)
    verdict = read_verdict(args.verdict)
    raced = {} if verdict is None else raced_groups(verdict)
    print(write_decisions(cells, findings, given, args.out, args.answers_out, raced))
    return 0


if __name__ == "__main__":
    sys.exit(in_one_sentence(main))
