"""Makes the report's section on the audit: findings by severity, and the decisions they affect."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import pandas as pd

from stratbench.analysis.records.columns import Row
from stratbench.analysis.records.findings import SEVERITIES, format_number_of_findings
from stratbench.analysis.records.reading import Reading, ReportInput, Section, render_section
from stratbench.cell.text.words import format_count, format_names
from stratbench.extensions.audit.across_cells.confounding import (
    find_strategies_trained_on_another_host,
)

TEMPLATE = Path(__file__).parent / "templates" / "audit.html.j2"

#: Maximum number of names in a line of the list.
MAX_NAMED = 3
_PLACE = ("experiment", "strategy", "model")


def iter_notices_on_differing_hosts(cells: pd.DataFrame, findings: Sequence[Row]) -> Iterator[str]:
    """Yield a notice if some strategies ran on other hosts than the rest."""
    alone = [
        finding["strategy"]
        for finding in findings
        if finding["rule"] == find_strategies_trained_on_another_host.id
    ]
    if alone:
        listed = ", ".join(dict.fromkeys(alone))
        yield (
            f"These strategies ran on other hosts than the rest: {listed}. Differences may come from the "
            "hosts. Compare with care."
        )


def make_audit_sections(inputs: ReportInput) -> Iterator[Section]:
    """Make the report's section on audit findings, whose link shows the number per severity."""
    answers = inputs.answers_json["answers"]
    rules = list_rules_with_findings(inputs.findings, answers)
    tally = f"Audit: {format_tally_of_findings(inputs.findings)}"
    html = render_section(
        TEMPLATE, rules=rules, lead=format_audit_summary_sentence(rules, answers), tally=tally
    )
    yield Section("audit", html, tally)


def format_tally_of_findings(findings: pd.DataFrame) -> str:
    """Return the number of findings per severity as text, such as `2 warnings, 1 note`."""
    counts = {s: int((findings["severity"] == s).sum()) for s in SEVERITIES}
    texts = [format_number_of_findings(n, severity) for severity, n in counts.items() if n]
    return ", ".join(texts) or "nothing found"


def list_rules_with_findings(
    findings: pd.DataFrame, answers: Sequence[Mapping[str, Any]] = ()
) -> list[dict[str, Any]]:
    """Return the rules that have findings, the most severe first, with the cells and values.

    Each rule also has the choices in `answers` (of answers.json) that its findings concern.
    """
    rules = []
    for rule, rows in findings.groupby("rule", sort=False):
        first = rows.iloc[0]
        of_rule = rows.to_dict("records")
        rules.append(
            {
                "id": rule,
                "name": str(rule).replace("-", " "),
                "severity": first["severity"],
                "affects": first["affects"],
                "explanation": first["explanation"],
                "where": describe_finding_locations(of_rule),
                "figures": of_rule[0]["figures"] if len(of_rule) == 1 else "",
                "touches": list_affected_choices(of_rule, answers),
                "places": [
                    {"place": describe_finding_location(row), "figures": row["figures"]}
                    for row in of_rule
                ],
            }
        )
    return sorted(rules, key=lambda rule: SEVERITIES.index(rule["severity"]))


def describe_finding_location(row: Mapping[str, Any]) -> str:
    """Describe a finding's cells by their coordinates, such as strategy and number of workers."""
    place = [row[name] for name in _PLACE if pd.notna(row[name])]
    place += [format_count(row["gpus"], "worker")] if pd.notna(row["gpus"]) else []
    place += [f"repeat {row['repeat']}"] if pd.notna(row["repeat"]) else []
    return ", ".join(place) or "the study"


def describe_finding_locations(findings: Sequence[Mapping[str, Any]]) -> str:
    """Describe where a rule has findings, such as `ddp, fsdp and 3 more, 12 places`."""
    if len(findings) == 1:
        return describe_finding_location(findings[0])
    names = list(dict.fromkeys(row["strategy"] for row in findings if pd.notna(row["strategy"])))
    names = names or list(
        dict.fromkeys(row["experiment"] for row in findings if pd.notna(row["experiment"]))
    )
    return (
        f"{format_names(names, MAX_NAMED)}, {len(findings)} places"
        if names
        else f"{len(findings)} places"
    )


def list_affected_choices(
    findings: Sequence[Mapping[str, Any]], answers: Sequence[Mapping[str, Any]]
) -> list[str]:
    """Return the chosen strategies that a finding concerns, directly or through their nearest alternative."""
    chosen, rivals = [], []
    for answer in answers:
        short = answer["short"]
        if short["strategy"] is None:
            continue
        name = f"{short['strategy']} × {short['gpus']} ({answer['model']})"
        if any(does_finding_concern_choice(row, answer, short) for row in findings):
            chosen.append(name)
            continue
        for rival in list_nearest_rivals(short):
            if any(does_finding_concern_choice(row, answer, rival) for row in findings):
                rivals.append(f"{rival['strategy']} × {rival['gpus']}, next to {name}")
    return list(dict.fromkeys([*chosen, *rivals]))


def list_nearest_rivals(choice: Mapping[str, Any]) -> list[Mapping[str, Any]]:
    """Return the nearest alternative of a choice, and the nearest one with another strategy.

    The list has at most two entries.
    """
    others = choice["others"]
    further = [o for o in others if o["strategy"] != choice["strategy"]]
    return [*others[:1], *(o for o in further[:1] if o not in others[:1])]


def does_finding_concern_choice(
    finding: Mapping[str, Any], answer: Mapping[str, Any], choice: Mapping[str, Any]
) -> bool:
    """Return whether a finding concerns the strategy and the number of workers of a choice.

    A coordinate that the finding lacks matches any value.

    Args:
        finding: Row of audit.csv.
        answer: The answer.
        choice: The chosen or another strategy, with its number of workers.
    """
    wanted = {
        "experiment": answer["experiment"],
        "model": answer["model"],
        "strategy": choice["strategy"],
        "gpus": choice["gpus"],
    }
    return all(pd.isna(finding[name]) or finding[name] == value for name, value in wanted.items())


def format_audit_summary_sentence(
    rules: Sequence[Mapping[str, Any]], answers: Sequence[Mapping[str, Any]]
) -> str:
    """Return a sentence on whether the findings concern the choices."""
    choices = [a for a in answers if a["short"]["strategy"] is not None]
    doubts = [rule for rule in rules if rule["severity"] != "note" and rule["touches"]]
    if not rules:
        return (
            "No rule has findings. That does not prove the values right, because rules see only what the "
            "records state."
        )
    if not choices:
        return "Each record is checked by itself and against the other records."
    if not doubts:
        return "No doubtful finding concerns a choice or its nearest rival."
    names = format_names([rule["name"] for rule in doubts], MAX_NAMED)
    return f"These rules concern a choice or its nearest rival: {names}."


READING = Reading(list_notices=iter_notices_on_differing_hosts, list_sections=make_audit_sections)
