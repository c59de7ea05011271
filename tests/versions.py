"""Tests the oldest and the newest promised versions, each in an environment of its own: for releases.

    make test-versions               # both, one after the other: 7 GB on disk, half an hour each on 2 cores
    make test-versions ARGS=newest

Quick tests and the slow ones of `SLOW` run in the environment, and plans of studies with every strategy are
compared with those of the pinned versions. The rows are written to benchmarks/results/versions.md, and the
environment is removed.
"""

from __future__ import annotations

import argparse
import csv
import json
import re
import shutil
import subprocess
import sys
import tempfile
import tomllib
from pathlib import Path

from packaging.requirements import Requirement

ROOT = Path(__file__).parents[1]
ENDS = ("oldest", "newest")
TABLE = ROOT / "benchmarks" / "results" / "versions.md"
#: Each strategy without an engine of its own is in one of them, on CPU processes.
STUDIES = ("families", "model-parallel")
#: Columns of a plan that no version is to change.
FIGURES = ("peak_mib", "state_parameters_bytes", "state_optimizer_bytes", "wire_bytes_per_step")
#: The files whose slow tests hold what another PyTorch may compute otherwise: masks that a loss keeps, losses
#: of parts, networks under every strategy, policies and their references.
SLOW = ("test_known_values", "test_plan_blocks", "test_zoo", "test_policies", "test_virtual_clock")
SHOWN = ("torch", "torchvision", "snakemake", "snakemake-executor-plugin-slurm", "numpy", "pandas")
HEAD = f"""# Oldest and newest versions

`make test-versions` writes this page: quick tests, and plans of the studies {" and ".join(STUDIES)}.

*Tests*: the quick ones, and after "slow" those of {len(SLOW)} files whose results another PyTorch may change.

*Plan*: in so many cells memory peak, model states or bytes sent per step are not those of the pinned
versions, the peak by at most so much.

| | Python | {" | ".join(SHOWN)} | tests | plan |
|---|---|{"---|" * len(SHOWN)}---|---|
"""


def list_requirements(end: str) -> list[str]:
    """Return what pip is to install: of the oldest versions their newest patches, and for tests what fits."""
    text = (ROOT / "pyproject.toml").read_text(encoding="utf-8")
    found = []
    for needed in map(Requirement, tomllib.loads(text)["project"]["dependencies"]):
        [floor] = (s.version for s in needed.specifier)
        exact = f"=={floor}" + (".*" if floor.count(".") == 1 else "")
        found.append(needed.name + (exact if end == "oldest" else ""))
    dev = (ROOT / "envs/requirements-dev.txt").read_text(encoding="utf-8").splitlines()
    return found + [Requirement(line).name for line in dev if not line.startswith("#")]


def make_environment(end: str) -> Path:
    """Return the Python of an environment with the versions of `end`."""
    folder = ROOT / ".venv-versions" / end
    python = folder / "bin" / "python"
    if not python.exists():
        subprocess.run([sys.executable, "-m", "venv", folder], check=True)
    pip = (python, "-m", "pip", "install", "--quiet", "--disable-pip-version-check")
    subprocess.run([*pip, *list_requirements(end)], check=True)
    return python


def list_versions(python: Path) -> list[str]:
    """Return the versions of Python and of `SHOWN`."""
    code = (
        "import json, platform; from importlib.metadata import version;"
        f"print(json.dumps([platform.python_version(), *map(version, {SHOWN!r})]))"
    )
    return json.loads(subprocess.check_output([python, "-c", code]))


def find_slow_files() -> list[Path]:
    """Return the paths of `SLOW`, in whichever folder of tests each lies."""
    tests = {path.stem: path for path in (ROOT / "tests").rglob("test_*.py")}
    return [tests[name] for name in SLOW]


def run_tests(python: Path) -> tuple[str, list[str]]:
    """Run quick tests, then the slow ones of `SLOW`.

    Returns:
        The last lines that pytest prints, without times, and the tests that failed.
    """
    lines, failed = [], []
    for selection in (["not slow and not slurm"], ["slow", *map(str, find_slow_files())]):
        command = [python, "-m", "pytest", "-q", "-p", "no:cacheprovider", "-m", *selection]
        done = subprocess.run(command, cwd=ROOT, text=True, stdout=subprocess.PIPE, check=False)
        print(done.stdout)
        lines.append(done.stdout.strip().splitlines()[-1].partition(" in ")[0])
        failed += re.findall(r"^(?:FAILED|ERROR) (\S+)", done.stdout, re.M)
    return "; slow: ".join(lines), failed


def make_plans(python: Path, folder: Path) -> dict[tuple[str, ...], dict[str, str]]:
    """Return the rows of the plans of `STUDIES` by their cells."""
    rows = {}
    for study in STUDIES:
        command = [python, "-m", "snakemake", "-c1", "plan", "--quiet", "all", "--nolock"]
        config = ["--config", f"study={study}", f"results={folder}"]
        subprocess.run([*command, *config], cwd=ROOT, check=True, stdout=subprocess.DEVNULL)
        with (folder / study / "plan.csv").open(encoding="utf-8", newline="") as file:
            for row in csv.DictReader(file):
                cell = ("study", "experiment", "strategy", "model", "gpus")
                rows[tuple(row[key] for key in cell)] = row
    return rows


def compare_plans(
    plans: dict[tuple[str, ...], dict[str, str]], pinned: dict[tuple[str, ...], dict[str, str]]
) -> str:
    """Describe in how many cells figures of two plans differ."""
    if plans.keys() != pinned.keys():
        return f"{len(plans)} cells, pinned {len(pinned)}"
    differ = {
        cell: float(row["peak_mib"]) / float(pinned[cell]["peak_mib"]) - 1
        for cell, row in plans.items()
        if any(row[key] != pinned[cell][key] for key in FIGURES)
    }
    text = f"{len(differ)} of {len(plans)} cells"
    if differ:
        cell = max(differ, key=lambda c: abs(differ[c]))
        text += f", at most {differ[cell]:+.1%} ({cell[2]}, {cell[3]}, {cell[4]} workers)"
    return text


def write_row(end: str, cells: list[str]) -> None:
    """Put the row of an end into the table; rows of other ends stay."""
    old = TABLE.read_text(encoding="utf-8").splitlines() if TABLE.exists() else []
    rows = {line.split("|")[1].strip(): line for line in old if line.startswith("| ")}
    rows = {name: rows[name] for name in ENDS if name in rows}
    rows[end] = f"| {' | '.join([end, *cells])} |"
    lines = (rows[name] for name in ENDS if name in rows)
    TABLE.write_text(HEAD + "\n".join(lines) + "\n", encoding="utf-8")


def main() -> int:
    """Test the ends that are named; return 1 if a test fails on one."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("ends", nargs="*", choices=ENDS, default=ENDS)
    failed: list[str] = []
    with tempfile.TemporaryDirectory() as folder:
        pinned = make_plans(Path(sys.executable), Path(folder, "pinned"))
        for end in parser.parse_args().ends:
            python = make_environment(end)
            plan = compare_plans(make_plans(python, Path(folder, end)), pinned)
            tests, named = run_tests(python)
            failures = "".join(f"<br>{name}" for name in named)
            write_row(end, [*list_versions(python), tests + failures, plan])
            failed += named
            shutil.rmtree(python.parents[1])
    return bool(failed)


if __name__ == "__main__":
    sys.exit(main())
