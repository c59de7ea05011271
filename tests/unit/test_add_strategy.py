"""docs/adding-a-strategy.md, followed to the letter: its file, its line, and a cell trains."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from launching import WORKFLOW, settings
from stratbench.cell import record

PAGE = WORKFLOW.parent / "docs/adding-a-strategy.md"

pytestmark = pytest.mark.timeout(180)


@pytest.fixture(scope="module")
def workflow(tmp_path_factory) -> Path:
    """A copy of the workflow with the page's strategy in it."""
    copy = tmp_path_factory.mktemp("copy") / "workflow"
    shutil.copytree(WORKFLOW, copy, ignore=shutil.ignore_patterns("__pycache__"))
    file, line = re.findall(r"```python\n(.*?)```", PAGE.read_text(), re.DOTALL)
    folder = copy / "stratbench/strategies"
    (folder / "local_sgd.py").write_text(file)
    registry = (folder / "__init__.py").read_text()
    begin = "REGISTRY: dict[str, str] = {\n"
    assert begin in registry
    (folder / "__init__.py").write_text(registry.replace(begin, begin + line))
    return copy


def run(workflow: Path, *arguments: str) -> str:
    done = subprocess.run(
        [sys.executable, *arguments],
        env=os.environ | {"PYTHONPATH": str(workflow)},
        text=True,
        capture_output=True,
        check=True,
        timeout=60,
    )
    return done.stdout


def test_the_config_knows_it(workflow):
    code = (
        "import sys; sys.path[:0] = sys.argv[1:]; import config_tables as t; print(t.key_tables())"
    )
    tables = run(workflow, "-c", code, str(PAGE.parent))
    assert "| `local-sgd` | `period` | a whole number | `8` |" in tables


def test_the_config_still_needs_no_torch(workflow):
    code = (
        "import sys; from stratbench.strategies import strategy_class;"
        "strategy_class('local-sgd').Options(); print('torch' in sys.modules)"
    )
    assert run(workflow, "-c", code).strip() == "False"


@pytest.mark.slow
def test_a_cell_trains(workflow, start_cell):
    launched = start_cell(
        settings("local-sgd", options={"period": 3}, model="resnet-compact", epochs=2),
        workflow=workflow,
    )
    code, output = launched.finish()
    assert code == 0, output
    found = record.read(launched.record)
    assert found["status"] == "ok"
    assert found["strategy"]["name"] == "local-sgd"
    assert found["strategy"]["options"] == {"period": 3}
    assert found["batch"]["updates_applied"] == 8
    assert found["accuracy"]["evaluated_on"] == "the workers' mean weights and statistics"
