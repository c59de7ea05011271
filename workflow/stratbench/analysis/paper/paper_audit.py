"""Audits the paper: the audit's rules on its published tables, and its two versions compared.

Writes paper_audit.csv. The tables are judged by the same rules as a study's records. Claims that only
the text makes (on memory, on sizes) are judged by the bounds of these rules.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Any

import pandas as pd

from stratbench.analysis.audit import RULES, SEVERITIES, audit
from stratbench.analysis.paper import published
from stratbench.analysis.paper.metrics import MEMORY_RATIO, SIZES
from stratbench.analysis.records.findings import AUDIT_COLUMNS
from stratbench.cell.files import write_atomic
from stratbench.cell.text.words import joined_with_and
from stratbench.study.config.result_sets import VERSIONS

PAPER_AUDIT_COLUMNS = ("version", *AUDIT_COLUMNS)
#: The share by which two sizes may differ and still be the same.
SAME_SIZE = 0.05


@cache
def findings_on_paper() -> list[dict[str, Any]]:
    """All findings on the paper, the most severe first; keys are PAPER_AUDIT_COLUMNS."""
    found: list[dict[str, Any]] = []
    for version in VERSIONS:
        cells = published.cells_of_version(version)
        found += [
            {"version": version} | finding
            for finding in audit(cells, floors=published.accuracy_floors())
        ]
        found += [{"version": version} | finding for finding in findings_on_claims(version, cells)]
    found += list(findings_between_versions())
    return sorted(found, key=lambda finding: SEVERITIES.index(finding["severity"]))


def findings_on_claims(version: str, cells: pd.DataFrame) -> Iterator[dict[str, Any]]:
    """Findings on claims of the text that no hardware and no model can support."""
    claims = published.published_claims()
    claims = claims[claims["version"] == version]
    bound = next(rule for rule in RULES if rule.id == "memory-reduced-too-much")
    for claim in claims[claims["metric"] == MEMORY_RATIO].itertuples():
        counts = sorted(cells.loc[cells["strategy"] == "fsdp", "gpus"].unique())
        # Sharding divides by at most N; the text makes one claim for all numbers of GPUs.
        beyond = [n for n in counts if claim.low > n or claim.high > n]
        if beyond:
            stated = (
                f"{claim.low:g} to {claim.high:g}" if pd.notna(claim.high) else f"{claim.low:g}"
            )
            yield {
                "rule": bound.id,
                "severity": bound.severity,
                "affects": bound.affects,
                "explanation": bound.explanation,
                "strategy": "fsdp",
                "figures": f"{claim.claim}: {stated} times, more than N on {joined_with_and(beyond)} GPUs",
            }
    for claim in claims[claims["metric"].isin(SIZES)].itertuples():
        stated, scale = claim.low, SIZES[claim.metric]
        real = published.PARAMETERS[claim.model] * scale
        others = [
            name
            for name, count in published.PARAMETERS.items()
            if abs(count * scale / stated - 1) <= SAME_SIZE
        ]
        if abs(stated / real - 1) > SAME_SIZE:
            yield {
                "rule": "size-of-another-model",
                "severity": "unusable",
                "affects": "memory",
                "model": claim.model,
                "explanation": "The size that is stated is not that of the model.",
                "figures": f"{claim.claim}: it is {real:.0f}; {stated:g} fits "
                f"{joined_with_and(others) if others else 'none'}",
            }


def findings_between_versions() -> Iterator[dict[str, Any]]:
    """Findings on cells of one label that differ between the two versions without a stated reason."""
    tables = published.published_tables()
    place = ["strategy", "model", "dataset", "gpus", "measure"]
    one, other = (
        tables[tables["version"] == version].drop_duplicates(place).set_index(place)["value"]
        for version in VERSIONS
    )
    both = pd.concat([one, other], axis=1, join="inner", keys=VERSIONS).dropna()
    for (strategy, model, _, gpus, measure), row in both[both["v1"] != both["v2"]].iterrows():
        yield {
            "version": "both",
            "rule": "versions-disagree",
            "severity": "unusable",
            "affects": "score" if measure == "accuracy_percent" else "time",
            "strategy": strategy,
            "model": model,
            "gpus": gpus,
            "explanation": "Two versions of one study print different values for one cell, and neither "
            "says what was changed.",
            "figures": f"{measure}: {row['v1']:g} in v1, {row['v2']:g} in v2",
        }


def write_paper_audit(path: Path) -> None:
    """Writes paper_audit.csv, and prints how much is found."""
    found = findings_on_paper()
    write_atomic(path, pd.DataFrame(found, columns=list(PAPER_AUDIT_COLUMNS)).to_csv(index=False))
    rules = {finding["rule"] for finding in found}
    print(f"{len(found)} findings in the paper's tables, by {len(rules)} rules")
