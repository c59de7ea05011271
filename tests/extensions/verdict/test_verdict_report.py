"""What the decision and the report make of a verdict."""

from __future__ import annotations

import json
import re
from dataclasses import replace
from pathlib import Path

import pandas as pd
import pytest
from synthetic_files import Files

from stratbench.analysis.decision import decide
from stratbench.analysis.records import collect
from stratbench.analysis.records.columns import read_cells
from stratbench.analysis.records.findings import read_audit_findings
from stratbench.analysis.records.reading import map_readings_by_extension
from stratbench.analysis.report import report
from stratbench.analysis.tables import tables
from stratbench.extensions.audit import audit
from stratbench.extensions.paper import against
from stratbench.extensions.verdict.blocks import add_verdict_digest
from stratbench.extensions.verdict.paired_results import (
    BlocksEvidence,
    collect_paired_results,
    read_verdict,
)

ROOT = Path(__file__).parents[3]


def make_verdict(files: Files) -> str:
    return str(files.root / "verdict" / "verdict.json")


@pytest.fixture(scope="module")
def told(tmp_path_factory) -> Files:
    """A study with a verdict, and what `snakemake partial` makes of it."""
    files = Files(tmp_path_factory.mktemp("told"))
    files.to_the_end()
    files.command("tell")
    (files.root / "cells.json").write_text(json.dumps([c.as_dict() for c in files.study.cells]))
    at = {name: str(files.root / name) for name in ("cells.csv", "epochs.csv", "audit.csv")}
    both = ["--cells", at["cells.csv"], "--audit", at["audit.csv"]]
    root = str(files.root)
    collect.main(["--expected", f"{root}/cells.json", "--records-root", f"{root}/cells",
                  "--out", at["cells.csv"], "--epochs-out", at["epochs.csv"], "--partial"])  # fmt: skip
    audit.main(["--cells", at["cells.csv"], "--out", at["audit.csv"], "--study-dir", root])
    tables.main([*both, "--summary-out", f"{root}/summary.csv", "--out-dir", f"{root}/tables"])
    decide.main([*both, "--evidence", f"verdict={root}/verdict/verdict.json", "--out", f"{root}/decision.csv",
                 "--answers-out", f"{root}/answers.json"])  # fmt: skip
    against.main([*both, "--cells-out", f"{root}/against_cells.csv",
                  "--claims-out", f"{root}/against_claims.csv", "--summary", f"{root}/summary.csv",
                  "--tables-out", f"{root}/paper_tables"])  # fmt: skip
    return files


def test_the_page_on_verdicts_shows_what_is_printed(told, capfd):
    page = (ROOT / "docs/verdict.md").read_text(encoding="utf-8")
    [example] = re.findall(r"^```text\n(.*?)^```$", page, re.MULTILINE | re.DOTALL)
    told.command("tell")
    assert example in capfd.readouterr().out


def test_a_decision_goes_by_blocks_where_there_are_some_and_says_so(told):
    (answer,) = json.loads((told.root / "answers.json").read_text())["answers"]
    assert answer["headline"].startswith("ps-dana × 2. ")
    assert answer["confidence"] == "high"
    assert "Measured in paired blocks. Over 3 blocks" in " ".join(answer["sure"])
    assert "The verdict on 2 workers: ps-dana is within 3 %" in " ".join(answer["sure"])
    excluded = dict(answer["excluded"])
    assert "slower: in the comparison: slower than ps-dana" in excluded["fsdp"]
    matrix = (told.root / "decision.csv").read_text()
    assert "measured in paired blocks" in matrix


def test_without_a_verdict_a_decision_goes_by_records_alone(told, tmp_path):
    out = tmp_path / "answers.json"
    decide.main([
        "--cells", str(told.root / "cells.csv"), "--audit", str(told.root / "audit.csv"),
        "--out", str(tmp_path / "decision.csv"), "--answers-out", str(out),
    ])  # fmt: skip
    (answer,) = json.loads(out.read_text())["answers"]
    assert "blocks" not in " ".join(answer["sure"])
    assert read_verdict("") is None


@pytest.mark.parametrize("confidence", ["medium", None])
def test_a_decision_is_no_surer_than_the_verdict_on_its_blocks(told, confidence):
    """Three blocks on hosts of their own would do for high; the verdict knows what speaks against them."""
    cells = read_cells(told.root / "cells.csv")
    findings = read_audit_findings(told.root / "audit.csv")
    paired = collect_paired_results(read_verdict(make_verdict(told)))
    for group, found in paired.items():
        claim = found.conclusion_and_confidence
        claim = claim and confidence and (claim[0], confidence)
        paired[group] = replace(found, conclusion_and_confidence=claim)
    (found,) = decide.make_decisions(
        cells, findings, decide.Constraints(), [BlocksEvidence(paired)]
    )
    assert found.confidence == "medium"
    assert ("makes no claim for the choice" in " ".join(found.sure)) == (confidence is None)


def test_a_rival_of_an_excluded_leader_is_not_excluded_for_being_slower(told):
    """The user's GPUs are too small for the leader: the verdict does not decide against the others."""
    cells = read_cells(told.root / "cells.csv")
    paired = collect_paired_results(read_verdict(make_verdict(told)))
    findings = read_audit_findings(told.root / "audit.csv")
    finding = dict.fromkeys(findings.columns) | {
        "rule": "contradictory-time", "severity": "unusable", "affects": "all", "strategy": "ps-dana",
        "figures": "f", "explanation": "e",
    }  # fmt: skip
    broken = pd.DataFrame([finding], columns=findings.columns)
    (found,) = decide.make_decisions(cells, broken, decide.Constraints(), [BlocksEvidence(paired)])
    kinds = {row["strategy"]: row["status"] for row in found.decision_csv_rows}
    assert kinds["ps-dana"] == "unusable record"
    assert "slower" not in (kinds["ddp"], kinds["fsdp"])


def test_blocks_on_one_number_of_workers_stand_beside_records_on_another(told):
    """As after half a verdict, or where a strategy is alone on so many workers: no block is a repeat."""
    cells, findings = (
        read_cells(told.root / "cells.csv"),
        read_audit_findings(told.root / "audit.csv"),
    )
    timed = set(cells.loc[cells["status"] == "ok", "gpus"])
    assert timed
    for gpus in timed:
        paired = {
            k: r
            for k, r in collect_paired_results(read_verdict(make_verdict(told))).items()
            if k.gpus != gpus
        }
        (found,) = decide.make_decisions(
            cells, findings, decide.Constraints(), [BlocksEvidence(paired)]
        )
        bases = {
            row["gpus"]: row["basis"]
            for row in found.decision_csv_rows
            if row["time_s"] is not None
        }
        assert bases[gpus] == "measured"
        assert set(bases.values()) == {"measured", "measured in paired blocks"}


def written_report(told, verdict: str, folder: Path) -> str:
    """The report's HTML, as of this verdict.json."""
    evidence = [f"verdict={verdict}"] if verdict else []
    audited = told.root / "audit.csv"
    given = replace(
        report.read_report_input(told.root, told.root, audited, evidence), folder=folder
    )
    compared = ("against_cells.csv", "against_claims.csv", "paper_tables")
    for name in ("summary.csv", "tables", "plots", *compared):
        (folder / name).symlink_to(told.root / name)
    [page, *_] = report.write_pages(
        given, list(map_readings_by_extension().values()), partial=True, description=""
    )
    return page.read_text().replace("\u00a0", " ")


def test_the_answers_are_followed_by_the_verdict(told, tmp_path):
    html = written_report(told, make_verdict(told), tmp_path)
    assert html.index('id="answer"') < html.index('id="verdict"')
    section = html[html.index('id="verdict"') : html.index('aria-labelledby="e-')]
    assert section.count("ps-dana is within 3 % of the fastest (95 %, on 3 nodes).") == 2
    assert "more than 1.5 times as slow in the first block" in section
    assert "strategy × allocation" in section
    assert "nothing is faster by more than" in section
    assert "at least" in section
    assert "data:image/svg+xml" in section
    assert "GPU-hours" in section
    assert section.count("<h4>vgg-compact, 2 GPUs</h4>") == 1


def test_a_study_without_a_verdict_has_no_such_section(told, tmp_path):
    assert 'id="verdict"' not in written_report(told, "", tmp_path)


def test_names_in_a_verdict_reach_the_page_escaped(told, tmp_path):
    verdict = json.loads(Path(make_verdict(told)).read_text())
    verdict = json.loads(json.dumps(verdict).replace("fsdp", "<img src=x>"))
    path = tmp_path / "verdict.json"
    path.write_text(json.dumps(add_verdict_digest(verdict)))
    html = written_report(told, str(path), tmp_path)
    assert "<img src=x>" not in html
    assert "&lt;img src=x&gt;" in html


@pytest.mark.parametrize("content", ["", "[]", '{"schema_version": 99}', "{"])
def test_a_file_that_is_no_verdict_is_as_none(tmp_path, content):
    path = tmp_path / "verdict.json"
    path.write_text(content)
    assert read_verdict(str(path)) is None
