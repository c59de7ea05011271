"""The audit as a list by severity, with the choices that it concerns."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import pandas as pd

from stratbench.analysis.records.columns import Row
from stratbench.analysis.records.findings import SEVERITIES, format_tally
from stratbench.analysis.records.reading import Reading, ReportInput, Section, render_section
from stratbench.cell.text.words import counted, names_text
from stratbench.extensions.audit.across_cells.confounding import confounded_host

TEMPLATE = Path(__file__).parent / "templates" / "audit.html.j2"

#: The most places and strategies that a line of the list names.
MAX_NAMED = 3
_PLACE = ("experiment", "strategy", "model")


def notice_hosts(cells: pd.DataFrame, findings: Sequence[Row]) -> Iterator[str]:
    """Yield a notice where strategies are known by their hosts."""
    alone = [finding["strategy"] for finding in findings if finding["rule"] == confounded_host.id]
    if alone:
        listed = ", ".join(dict.fromkeys(alone))
        yield (
            f"Strategies ran on hosts of their own: {listed}. What differs may be the hosts. Compare with "
            "care."
        )


def make_audit_sections(inputs: ReportInput) -> Iterator[Section]:
    """Make the section on all findings, with their number by severity in its link."""
    answers = inputs.decided["answers"]
    rules = audit_rules(inputs.findings, answers)
    tally = f"Audit: {tally_text(inputs.findings)}"
    html = render_section(TEMPLATE, rules=rules, lead=audit_lead(rules, answers), tally=tally)
    yield Section("audit", html, tally)


def tally_text(findings: pd.DataFrame) -> str:
    """Say how many findings there are: `2 warnings, 1 note`."""
    counts = {s: int((findings["severity"] == s).sum()) for s in SEVERITIES}
    texts = [format_tally(n, severity) for severity, n in counts.items() if n]
    return ", ".join(texts) or "nothing found"


def audit_rules(
    findings: pd.DataFrame, answers: Sequence[Mapping[str, Any]] = ()
) -> list[dict[str, Any]]:
    """Return the audit's rules with findings, the most severe first, with coordinates and values.

    Each rule has the choices in `answers` (of answers.json) that it concerns.
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
                "where": where_text(of_rule),
                "figures": of_rule[0]["figures"] if len(of_rule) == 1 else "",
                "touches": touched(of_rule, answers),
                "places": [{"place": place_of(row), "figures": row["figures"]} for row in of_rule],
            }
        )
    return sorted(rules, key=lambda rule: SEVERITIES.index(rule["severity"]))


def place_of(row: Mapping[str, Any]) -> str:
    """Return the coordinates of a finding as text."""
    place = [row[name] for name in _PLACE if pd.notna(row[name])]
    place += [counted(row["gpus"], "worker")] if pd.notna(row["gpus"]) else []
    place += [f"repeat {row['repeat']}"] if pd.notna(row["repeat"]) else []
    return ", ".join(place) or "the study"


def where_text(findings: Sequence[Mapping[str, Any]]) -> str:
    """Return a short text on where a rule has findings: `ddp, fsdp and 3 more, in 12 places`."""
    if len(findings) == 1:
        return place_of(findings[0])
    names = list(dict.fromkeys(row["strategy"] for row in findings if pd.notna(row["strategy"])))
    names = names or list(
        dict.fromkeys(row["experiment"] for row in findings if pd.notna(row["experiment"]))
    )
    return (
        f"{names_text(names, MAX_NAMED)}, {len(findings)} places"
        if names
        else f"{len(findings)} places"
    )


def touched(
    findings: Sequence[Mapping[str, Any]], answers: Sequence[Mapping[str, Any]]
) -> list[str]:
    """Return the choices that these findings concern, directly or through the nearest alternative."""
    chosen, rivals = [], []
    for answer in answers:
        short = answer["short"]
        if short["strategy"] is None:
            continue
        name = f"{short['strategy']} × {short['gpus']} ({answer['model']})"
        if any(is_of(row, answer, short) for row in findings):
            chosen.append(name)
            continue
        for rival in nearest_of(short):
            if any(is_of(row, answer, rival) for row in findings):
                rivals.append(f"{rival['strategy']} × {rival['gpus']}, next to {name}")
    return list(dict.fromkeys([*chosen, *rivals]))


def nearest_of(short: Mapping[str, Any]) -> list[Mapping[str, Any]]:
    """Return the alternatives in a reason: the next one, and the next of another strategy."""
    others = short["others"]
    further = [o for o in others if o["strategy"] != short["strategy"]]
    return [*others[:1], *(o for o in further[:1] if o not in others[:1])]


def is_of(row: Mapping[str, Any], answer: Mapping[str, Any], what: Mapping[str, Any]) -> bool:
    """Return whether a finding is on a strategy and count of an answer.

    A coordinate that the finding lacks matches all.

    Args:
        row: The finding.
        answer: The answer.
        what: Strategy and worker count.
    """
    wanted = {
        "experiment": answer["experiment"],
        "model": answer["model"],
        "strategy": what["strategy"],
        "gpus": what["gpus"],
    }
    return all(pd.isna(row[name]) or row[name] == value for name, value in wanted.items())


def audit_lead(rules: Sequence[Mapping[str, Any]], answers: Sequence[Mapping[str, Any]]) -> str:
    """Return a sentence on what the findings mean for the choices."""
    choices = [a for a in answers if a["short"]["strategy"] is not None]
    doubts = [rule for rule in rules if rule["severity"] != "note" and rule["touches"]]
    if not rules:
        return (
            "No rule was tripped. That does not prove the figures right: a rule sees only what the "
            "records state."
        )
    if not choices:
        return "Each record is checked against itself and against the others."
    if not doubts:
        return "None of the doubts is about a choice or the rival nearest to one."
    names = names_text([rule["name"] for rule in doubts], MAX_NAMED)
    return f"What touches a choice or the rival nearest to it: {names}."


READING = Reading(notices=notice_hosts, sections=make_audit_sections)
