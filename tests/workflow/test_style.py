"""The workflow keeps to its linters, and the paper study can be planned."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
BIN = Path(sys.executable).parent
#: What takes long to import, for processes that start once a cell, and once a stage of the analysis.
FOR_CELLS = ("torch", "pandas", "numpy", "matplotlib", "urllib.request", "importlib.metadata")
FOR_STAGES = ("torch", "matplotlib", "scipy")


def check(*command: str | Path) -> None:
    done = subprocess.run(
        command, cwd=ROOT, text=True, capture_output=True, check=False, timeout=300
    )
    assert done.returncode == 0, done.stdout + done.stderr


def test_ruff_finds_nothing():
    check(BIN / "ruff", "check", ".")
    check(BIN / "ruff", "format", "--check", ".")


def test_snakefmt_would_change_nothing():
    check(BIN / "snakefmt", "--check", "Snakefile", "workflow/rules")


@pytest.mark.slow
def test_snakemake_lint_finds_nothing():
    check(sys.executable, "-m", "snakemake", "--lint")


@pytest.mark.slow
@pytest.mark.parametrize("study", ["demo", "paper"])
def test_the_studies_of_the_config_expand(workflow, study):
    (workflow.folder / "config.yaml").write_text((ROOT / "config.yaml").read_text())
    done = workflow.run("-n", "--quiet", "all", "--config", f"study={study}")
    assert done.returncode == 0, done.stdout


@pytest.mark.parametrize(
    ("code", "heavy"),
    [
        (
            "import stratbench.study.config.config as c, yaml; "
            "c.load_config(yaml.safe_load(open('config.yaml')))",
            FOR_CELLS,
        ),
        ("import stratbench.train.launch", FOR_CELLS),
        (
            "from stratbench.analysis.decision import decide; "
            "from stratbench.extensions.paper import against; "
            "from stratbench.analysis.report import report; "
            "from stratbench.analysis.tables import tables",
            FOR_STAGES,
        ),
        (
            "import stratbench.analysis.records.collect, stratbench.analysis.figures.plots",
            ("torch",),
        ),
    ],
)
def test_what_commands_import_is_light(code, heavy):
    code = f"import sys; {code}; print([m for m in {heavy} if m in sys.modules])"
    done = subprocess.run(
        [sys.executable, "-c", code],
        cwd=ROOT,
        env={"PYTHONPATH": str(ROOT / "workflow")},
        text=True,
        capture_output=True,
        check=True,
        timeout=300,
    )
    assert done.stdout.strip() == "[]"
