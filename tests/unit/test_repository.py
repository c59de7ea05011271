"""The repository's own promises: layers, pins, and pages that are generated."""

from __future__ import annotations

import re
import sys
from pathlib import Path

import yaml

ROOT = Path(__file__).parents[2]
sys.path.insert(0, str(ROOT / "docs"))

import architecture  # noqa: E402


def pins(path: str) -> set[str]:
    lines = (ROOT / path).read_text().splitlines()
    return {line.strip().lower() for line in lines if line and not line.startswith("#")}


def test_imports_point_down_and_wings_stay_apart():
    assert architecture.faults() == []


def test_an_import_that_points_up_is_found(monkeypatch):
    monkeypatch.setattr(
        architecture, "graph", lambda: {"ps.server": {"train.loop"}, "train.loop": set()}
    )
    assert architecture.faults() == ["ps.server imports train.loop, which lies above it"]


def test_architecture_page_is_current():
    assert (ROOT / "ARCHITECTURE.md").read_text() == architecture.page(), "run: make docs"


def test_conda_environment_has_the_pins_of_the_requirements():
    environment = yaml.safe_load((ROOT / "envs/stratbench.yaml").read_text())
    pip = next(d["pip"] for d in environment["dependencies"] if isinstance(d, dict))
    assert set(pip) == pins("envs/requirements.txt")


def test_every_requirement_is_pinned_exactly_and_constrained_alike():
    constraints = pins("envs/constraints.txt")
    for path in ("envs/requirements.txt", "envs/requirements-dev.txt"):
        for pin in pins(path):
            assert re.fullmatch(r"[a-z0-9-]+==[0-9.]+", pin), f"{path}: {pin}"
            assert pin.replace("_", "-") in {c.replace("_", "-") for c in constraints}, pin


def test_every_rule_names_its_environment():
    for path in (ROOT / "workflow/rules").glob("*.smk"):
        for rule in re.split(r"\nrule ", path.read_text())[1:]:
            if "shell:" in rule:
                assert re.search(r"conda:\s+ENV", rule), f"{path.name}: rule {rule.splitlines()[0]}"
