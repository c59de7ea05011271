"""Chooses a strategy for each model, by ranking the records under the constraints.

Writes decision.csv, a row with status and reason per strategy and worker count. Writes answers.json, the
decisions as texts for the report. Also prints the decisions.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import pandas as pd

from stratbench.analysis.decision.answer_line import format_answer_line
from stratbench.analysis.decision.candidate import Candidate
from stratbench.analysis.decision.candidates import build_decision_candidates
from stratbench.analysis.decision.claim import (
    has_candidate_with_requested_gpus,
    iter_sentences_on_missing_results,
)
from stratbench.analysis.decision.confidence import compute_confidence
from stratbench.analysis.decision.constraints import Constraints
from stratbench.analysis.decision.evidence import Evidence
from stratbench.analysis.decision.ranking import Ranking, rank_candidates_by_model
from stratbench.analysis.decision.sentences import (
    describe_choice,
    describe_exclusions,
    iter_excluded_strategies_and_reasons,
    iter_sentences_on_other_constraints,
    iter_what_would_change_choice,
)
from stratbench.analysis.decision.short import (
    ShortAnswer,
    build_answer_without_choice,
    build_short_answer,
    format_summary_line,
)
from stratbench.analysis.records.columns import read_cells
from stratbench.analysis.records.findings import read_audit_findings
from stratbench.analysis.records.reading import map_readings_by_extension
from stratbench.cell.files import write_text_atomically
from stratbench.cell.text.words import MIB, choose_noun_for_workers, wrap_lines
from stratbench.statistics.intervals import IntervalEstimate
from stratbench.study.config.consistency import check_decided_model
from stratbench.study.config.messages import ConfigError

MATRIX_COLUMNS = (
    "experiment", "dataset", "model", "strategy", "gpus", "status", "rank", "reason", "basis", "repeats",
    "time_s", "time_low_s", "time_high_s", "cost", "memory_mib", "score", "score_name", "score_unit",
    "ratio_to_first", "low", "high", "score_loss_upper", "doubts",
)  # fmt: skip


#: Rows of cells.csv of one experiment and model, and the candidates that they give.
RowsAndCandidates = tuple[pd.DataFrame, list[Candidate]]


@dataclass(frozen=True)
class Decision:
    """The decision for one model in one experiment: chosen candidate, reason and confidence."""

    experiment: str
    dataset: str
    model: str
    choice: Candidate | None
    reason: str
    #: Level of the confidence: `high`, `medium`, `low` or `none`.
    confidence: str
    #: Reasons for the confidence, as sentences.
    sure: tuple[str, ...]
    #: Sentences on what would change the choice.
    changes: tuple[str, ...]
    #: Each strategy that is excluded on every number of workers, with the reason.
    excluded: tuple[tuple[str, str], ...]
    #: Rows of decision.csv, one per candidate.
    decision_csv_rows: tuple[dict[str, Any], ...]
    #: Short texts of the answer, for the first screen of the report.
    short_answer: ShortAnswer

    @property
    def headline(self) -> str:
        """The chosen candidate and the conclusion as text: `ddp × 4. Fastest, in one run each`."""
        return f"{self.short_answer.choice_name or 'Nothing can be recommended'}. {self.short_answer.claim}"


def make_decisions(
    cells: pd.DataFrame,
    findings: pd.DataFrame,
    constraints: Constraints,
    evidence: Sequence[Evidence] = (),
) -> list[Decision]:
    """Return a decision for each experiment and model, in the order of the config.

    Args:
        cells: cells.csv.
        findings: audit.csv.
        constraints: Constraints of the decision.
        evidence: Evidence of extensions in addition to the records.

    Raises:
        ConfigError: The constraints name a model that is not in the study.
    """
    check_decided_model(constraints.model, cells["model"].astype(str))
    listed = findings.to_dict("records")
    studied = [
        (rows, build_decision_candidates(rows, listed, constraints, evidence))
        for _, rows in cells.groupby(["experiment", "model"], sort=False)
    ]
    # Decisions on all models are made together, even if one is requested, since variances are pooled.
    made = decide_with_pooled_variance(studied, constraints, evidence)
    return [d for d in made if constraints.model in (None, d.model)]


def decide_with_pooled_variance(
    models: Sequence[RowsAndCandidates],
    constraints: Constraints,
    evidence: Sequence[Evidence] = (),
) -> list[Decision]:
    """Return a decision for each model, with variances pooled over all models.

    Args:
        models: Rows and candidates of each experiment and model.
        constraints: Constraints of the decision.
        evidence: Evidence of extensions.
    """
    rankings = rank_candidates_by_model(
        [candidates for _, candidates in models], constraints.equivalence_margin
    )
    return [
        decide_for_model(rows, candidates, ranking, constraints, evidence)
        for (rows, candidates), ranking in zip(models, rankings, strict=True)
    ]


def decide_for_model(
    rows: pd.DataFrame,
    candidates: list[Candidate],
    ranking: Ranking | None,
    constraints: Constraints,
    evidence: Sequence[Evidence] = (),
) -> Decision:
    """Return the decision for one model in one experiment.

    Args:
        rows: Rows of cells.csv.
        candidates: Candidates of the model.
        ranking: Ranking of the candidates that are not excluded, or None if all are excluded.
        constraints: Constraints of the decision.
        evidence: Evidence of extensions.
    """
    experiment, dataset, model = (str(rows.iloc[0][n]) for n in ("experiment", "dataset", "model"))
    ranked = (
        []
        if ranking is None
        else [ranking.chosen_candidate, *(c.alternative for c in ranking.comparisons)]
    )
    common = {"experiment": experiment, "dataset": dataset, "model": model}
    common["excluded"] = tuple(
        iter_excluded_strategies_and_reasons(candidates, {c.strategy for c in ranked})
    )
    csv_rows = build_decision_csv_rows((experiment, dataset, model), candidates, ranking)
    if ranking is None:
        nothing = build_answer_without_choice(candidates, constraints.memory_margin)
        reasons = describe_exclusions(candidates)
        return Decision(
            **common,
            choice=None,
            reason=f"Every strategy is excluded: {reasons}. {nothing.remedy}".rstrip(),
            confidence="none",
            sure=("No candidate is left to rank.",),
            changes=tuple(iter_sentences_on_other_constraints(candidates, None)),
            decision_csv_rows=csv_rows,
            short_answer=nothing,
        )
    noun = choose_noun_for_workers(rows["device_kind"])
    slowed = sorted(set(rows["slowdown"].dropna()))
    score_open = ranking.chosen_candidate.may_have_intolerable_score(constraints)
    sure = compute_confidence(
        ranking,
        constraints,
        slowed,
        score_open,
        has_candidate_with_requested_gpus(candidates, constraints),
    )
    unknown = list(
        iter_sentences_on_missing_results(
            candidates, ranking.chosen_candidate, noun, constraints, bool(slowed)
        )
    )
    further = (
        s
        for one in evidence
        for s in one.iter_answer_changes((experiment, model), ranking.chosen_candidate)
    )
    return Decision(
        **common,
        choice=ranking.chosen_candidate,
        reason=describe_choice(candidates, ranking, noun, constraints),
        confidence=sure.confidence_level,
        sure=sure.reason_sentences,
        changes=(*iter_what_would_change_choice(candidates, ranking, constraints), *further),
        decision_csv_rows=csv_rows,
        short_answer=build_short_answer(candidates, ranking, constraints, sure, unknown, slowed),
    )


def build_decision_csv_rows(
    experiment_dataset_model: tuple[str, str, str],
    candidates: list[Candidate],
    ranking: Ranking | None,
) -> tuple[dict[str, Any], ...]:
    """Return a row of decision.csv for each candidate.

    Args:
        experiment_dataset_model: Experiment, data set and model.
        candidates: Candidates.
        ranking: Ranking of the candidates, or None if all are excluded.
    """
    compared = [] if ranking is None else list(ranking.comparisons)
    places = {id(c.alternative): (place, c) for place, c in enumerate(compared, 2)}
    rows = []
    for c in candidates:
        place, against = places.get(id(c), (None, None))
        status = c.exclusion_kind
        if ranking is not None and c is ranking.chosen_candidate:
            place, status = 1, "recommended"
        elif against is not None:
            status = "tied" if against.status == "tied" else "possible"
        ratio = (
            against.ratio
            if against
            else IntervalEstimate(1.0)
            if place == 1
            else (None, None, None)
        )
        rows.append(dict(zip(MATRIX_COLUMNS, experiment_dataset_model, strict=False)) | {
            "strategy": c.strategy, "gpus": c.gpus, "status": status, "rank": place,
            "reason": c.exclusion_reason,
            "basis": c.time_source_text, "repeats": len(c.times), "time_s": c.time_s,
            "time_low_s": c.projected_time_low_s, "time_high_s": c.projected_time_high_s,
            "cost": c.training_cost,
            "memory_mib": c.peak_memory_bytes and c.peak_memory_bytes / MIB, "score": c.mean_score,
            "score_name": c.score.name, "score_unit": c.score.shown_unit,
            **dict(zip(("ratio_to_first", "low", "high"), ratio, strict=True)),
            "score_loss_upper": c.max_score_loss,
            "doubts": "; ".join(c.caveats),
        })  # fmt: skip
    return tuple(rows)


def describe_study_findings(findings: pd.DataFrame) -> list[str]:
    """Return the audit's findings on the whole study as texts. Such findings limit every decision."""
    places = ["experiment", "strategy", "model", "gpus", "repeat"]
    whole = findings[findings[places].isna().all(axis=1) & (findings["severity"] != "note")]
    return [f"{row.explanation} ({row.figures})" for row in whole.itertuples()]


def describe_decisions(
    decisions: Sequence[Decision],
    notes: Sequence[str],
    constraints: Constraints,
    constraint_texts: Sequence[str] = (),
    extension_answers: Iterable[Mapping[str, Any]] = (),
) -> str:
    """Return the decisions as text for a terminal, ending with a line per decision.

    Args:
        decisions: Decisions.
        notes: Findings on the whole study.
        constraints: Constraints of the decisions.
        constraint_texts: Texts on the constraints; if empty, `constraints` gives them.
        extension_answers: Answers of extensions.
    """
    texts = constraint_texts or constraints.iter_constraint_texts()
    lines = [f"Constraints: {'; '.join(texts)}.", *notes, ""]
    common = find_reasons_common_to_decisions(decisions)
    for d in decisions:
        lines.append(f"{d.model} ({d.experiment}): {d.headline}")
        lines.append(f"  {d.reason}")
        sure = " ".join(sentence for sentence in d.sure if sentence not in common)
        lines.append(f"  Confidence: {d.confidence}. {sure}".rstrip())
        lines += [f"  What would change it: {change}" for change in d.changes]
        lines += [f"  Excluded: {name}: {reason}" for name, reason in d.excluded]
        lines.append("")
    if common:
        lines += [*(f"For all answers: {sentence}" for sentence in common), ""]
    for answer in extension_answers:
        lines += [answer["headline"], *(f"  {line}" for line in answer["lines"]), ""]
    lead = format_summary_line(list_model_names_and_answers(decisions))
    return wrap_lines(
        [*lines, lead, *(format_answer_line(build_answers_json_entry(d)) for d in decisions)]
    )


def list_model_names_and_answers(decisions: Sequence[Decision]) -> list[tuple[str, ShortAnswer]]:
    """Return each short answer with its model's name. An ambiguous name also has the experiment."""
    models = [d.model for d in decisions]
    return [
        (f"{d.model} in {d.experiment}" if models.count(d.model) > 1 else d.model, d.short_answer)
        for d in decisions
    ]


def find_reasons_common_to_decisions(decisions: Sequence[Decision]) -> list[str]:
    """Return the reasons for the confidence that all decisions share, which are shown only once."""
    if len(decisions) < 2:
        return []
    return [s for s in decisions[0].sure if all(s in other.sure for other in decisions)]


def build_answers_json(
    decisions: Sequence[Decision],
    notes: Sequence[str],
    constraints: Constraints,
    extension_answers: Mapping[str, Mapping[str, Any]] | None = None,
) -> dict[str, Any]:
    """Return the content of answers.json: decisions as texts, constraints, and answers of extensions.

    Args:
        decisions: Decisions.
        notes: Findings on the whole study.
        constraints: Constraints of the decisions.
        extension_answers: Answers of extensions, by extension.
    """
    return {
        "common": find_reasons_common_to_decisions(decisions),
        "constraints": list(constraints.iter_constraint_texts()),
        "equivalence_margin": constraints.equivalence_margin,
        "by_cost": constraints.price_per_gpu_hour is not None,
        "across": list(notes),
        "lead": format_summary_line(list_model_names_and_answers(decisions)),
        "answers": [build_answers_json_entry(decision) for decision in decisions],
        "further": extension_answers or {},
    }


def build_answers_json_entry(decision: Decision) -> dict[str, Any]:
    """Return the entry of answers.json for a decision."""
    words = ("experiment", "dataset", "model", "headline", "reason")
    words += ("confidence", "sure", "changes", "excluded")
    return {name: getattr(decision, name) for name in words} | {
        "short": asdict(decision.short_answer)
    }


def write_and_describe_decisions(
    decisions: Sequence[Decision],
    findings: pd.DataFrame,
    constraints: Constraints,
    out: Path,
    answers_out: Path,
    evidence: Mapping[str, Evidence],
) -> str:
    """Write decision.csv and answers.json, and return the decisions as text for a terminal.

    Args:
        decisions: Decisions.
        findings: Findings of the audit.
        constraints: Constraints of the decisions.
        out: CSV file to write.
        answers_out: JSON file to write.
        evidence: Evidence of extensions by their names.
    """
    further = {
        name: answer for name, one in evidence.items() if (answer := one.build_separate_answer())
    }
    rows = [row for decision in decisions for row in decision.decision_csv_rows]
    write_text_atomically(out, pd.DataFrame(rows, columns=list(MATRIX_COLUMNS)).to_csv(index=False))
    notes = describe_study_findings(findings)
    write_text_atomically(
        answers_out,
        json.dumps(build_answers_json(decisions, notes, constraints, further), indent=1) + "\n",
    )
    return describe_decisions(decisions, notes, constraints, extension_answers=further.values())


def read_evidence(extension_files: Iterable[str], constraints: Constraints) -> dict[str, Evidence]:
    """Return the evidence that each extension adds to decisions, such as projected times.

    Args:
        extension_files: Files of extensions, as EXTENSION=FILE.
        constraints: Constraints of the decision.
    """
    paths = dict(pair.split("=", 1) for pair in extension_files)
    return {
        name: reading.read_evidence(paths.get(name, ""), constraints)
        for name, reading in map_readings_by_extension().items()
        if reading.read_evidence is not None
    }


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line of decisions, and return the exit code."""
    parser = argparse.ArgumentParser(
        prog="stratbench.analysis.decision.decide", description=__doc__
    )
    parser.add_argument("--cells", type=Path, required=True, help="the file cells.csv to read")
    parser.add_argument("--audit", type=Path, help="the file audit.csv to read, if there is one")
    parser.add_argument(
        "--evidence",
        action="extend",
        nargs="*",
        default=[],
        metavar="EXTENSION=FILE",
        help="a file that an extension reads in addition to the records, such as verdict=verdict.json",
    )
    parser.add_argument(
        "--constraints", default="{}", help="the block `decide` of config.yaml, as JSON"
    )
    parser.add_argument(
        "--out",
        type=Path,
        required=True,
        help="the file decision.csv to write, with a row per strategy and number of workers",
    )
    parser.add_argument(
        "--answers-out",
        type=Path,
        required=True,
        help="the file answers.json to write, with the decisions as texts",
    )
    args = parser.parse_args(argv)
    constraints = Constraints.from_json(args.constraints)
    cells, findings = read_cells(args.cells), read_audit_findings(args.audit)
    evidence = read_evidence(args.evidence, constraints)
    try:
        decided = make_decisions(cells, findings, constraints, list(evidence.values()))
        print(
            write_and_describe_decisions(
                decided, findings, constraints, args.out, args.answers_out, evidence
            )
        )
    except ConfigError as error:
        print(error, file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
