"""The regression of docs/your-task.md, followed to the letter: checked, trained and put into tables."""

from __future__ import annotations

import json
import re

import pytest
import yaml
from tiny_study import ROOT, Workflow

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]

PAGE = (ROOT / "docs/your-task.md").read_text(encoding="utf-8").partition("## A regression")[2]
STRATEGIES = ("ddp", "fsdp", "ps-sync")


def block(language: str) -> str:
    return re.search(rf"```{language}\n(.*?)```", PAGE, re.DOTALL)[1]


def config(**changes) -> dict:
    """The page's, on two CPU workers for fewer epochs."""
    found = yaml.safe_load(block("yaml"))
    experiment = found["studies"]["progression"]["experiments"]["diabetes"]
    experiment |= {"gpus": [2], "epochs": 4, "device": "cpu", "threads": 1} | changes
    return found


def test_a_regression_goes_from_the_page_to_its_tables(tmp_path, warm):
    work = Workflow(tmp_path, config())
    work.share_import(warm)
    (tmp_path / "my_regression.py").write_text(block("python"))
    check = work.run("check")
    assert check.returncode == 0, check.stdout
    assert "net on diabetes, task 'my_regression" in check.stdout
    assert "   385 parameters; takes images [batch, 1, 1, 10], gives 1 value" in check.stdout
    assert "none of 3 cells would end as unsupported" in check.stdout
    done = work.run("results/progression/audit.csv", "results/progression/tables")
    assert done.returncode == 0, done.stdout
    results = tmp_path / "results/progression"
    cells = results / "cells/diabetes"
    records = {
        s: json.loads((cells / s / "net/2gpu/rep0/record.json").read_text()) for s in STRATEGIES
    }
    for record in records.values():
        assert record["status"] == "ok"
        assert record["task"]["name"] == "my_regression:Progression"
        assert (record["task"]["score"], record["task"]["guess"]) == ("absolute error", None)
        # Who says the mean of the training set is off by 65 points: it learns.
        assert 40 < record["score"]["final"] < 64
    last = {s: r["score"]["per_epoch"][-1] for s, r in records.items()}
    for name in ("train_loss", "test_loss", "score"):
        first = last["ddp"][name]
        assert {s: e[name] for s, e in last.items()} == pytest.approx(
            dict.fromkeys(STRATEGIES, first), rel=1e-4
        )
    assert "absolute error" in (results / "tables/diabetes/score.md").read_text()
    audit = (results / "audit.csv").read_text()
    assert "unusable" not in audit, audit
    for wrong, sentence in (
        ({"task": None}, "its task is classification: it learns class numbers, but the targets"),
    ):
        work.write_config(config(**wrong))
        refused = work.run("-n")
        assert refused.returncode != 0
        assert sentence in refused.stdout, refused.stdout
