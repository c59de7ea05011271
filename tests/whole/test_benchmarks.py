"""The benchmarks run by hand still run: they call the engine's own functions."""

from __future__ import annotations

import ast
import subprocess
import sys
from importlib import import_module
from pathlib import Path

import pytest
import yaml

from launching import LIMIT_S
from stratbench.study.config.config import load_config

FOLDER = Path(__file__).parents[2] / "benchmarks"
#: The benchmark, with blocks as short as can be.
SHORT = f"""
import sys
sys.path.insert(0, {str(FOLDER / "speed")!r})
import overhead
overhead.WORKLOADS = {{name: overhead.WORKLOADS[name]._replace(steps=2) for name in ("mlp", "gpt")}}
if __name__ == "__main__":  # its processes import this, too
    overhead.main()
"""


@pytest.mark.parametrize(
    "path", sorted(FOLDER.rglob("*.py")), ids=lambda path: str(path.relative_to(FOLDER))
)
def test_what_a_benchmark_imports_of_the_package_is_there(path: Path):
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("stratbench"):
            module = import_module(node.module)
            for name in (alias.name for alias in node.names):
                assert hasattr(module, name) or import_module(f"{node.module}.{name}"), name


@pytest.mark.parametrize(
    "path", sorted((FOLDER / "results").glob("*.yaml")), ids=lambda path: path.stem
)
def test_the_studies_beside_results_are_valid(path: Path):
    raw = yaml.safe_load(path.read_text(encoding="utf-8"))
    for study in raw["studies"]:
        _, loaded = load_config(raw | {"study": study})
        assert loaded.experiments


def test_the_page_says_which_question_each_script_answers():
    page = (FOLDER / "README.md").read_text(encoding="utf-8")
    scripts = [p for p in FOLDER.rglob("*.py") if "__main__" in p.read_text(encoding="utf-8")]
    scripts.remove(FOLDER / "gpu/check.py")
    assert "`make gpu-check`" in page
    missing = [p for p in scripts if f"benchmarks/{p.relative_to(FOLDER)}" not in page]
    assert not missing


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_the_training_loops_overhead_can_be_measured(tmp_path):
    (tmp_path / "short.py").write_text(SHORT)
    command = [sys.executable, "short.py", "--processes", "1", "--rounds", "2", "--out", "."]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=LIMIT_S)
    assert done.returncode == 0, done.stdout + done.stderr
    page = (tmp_path / "overhead-1-process.md").read_text()
    assert page.count("| ours | ") == page.count("## ") == 2


@pytest.mark.slow
def test_the_decisions_rates_come_out_as_a_page(capsys, monkeypatch):
    import decision

    monkeypatch.setattr(decision, "DECISIONS", 6)
    decision.main()
    page = capsys.readouterr().out
    committed = (FOLDER / "results" / "decision.md").read_text()
    headings = [line for line in page.splitlines() if line.startswith("#")]
    assert headings == [line for line in committed.splitlines() if line.startswith("#")]
    assert page.count("\n|") == committed.count("\n|")


@pytest.mark.slow
def test_policies_train_on_the_virtual_clock_and_stand_beside_sync():
    import staleness

    task = staleness.Digits(seeds=2, epochs=1)
    asked = {"strategy": ("ps-sync", "ps-ormo"), "lr": (0.1,), "straggler": (3.0,), "workers": (4,)}
    conditions = staleness.keys()
    few = [k for k in conditions if all(getattr(k, name) in v for name, v in asked.items())]
    rows = {key: staleness.row(key, staleness.train(task, key, clocks=1)) for key in few}
    sync, *ormo = staleness.compared(rows).values()
    assert [line["strategy"] for line in ormo] == ["ps-ormo"] * 2
    assert sync["throughput_vs_sync"] == 1
    for line in (sync, *ormo):
        assert line["runs"] == 2
        assert line["accuracy_min"] > 20
    for line in ormo:
        assert line["throughput_vs_sync"] > 1.5


@pytest.mark.slow
def test_the_simulator_stays_as_near_to_slurm_as_it_was(monkeypatch):
    monkeypatch.syspath_prepend(str(FOLDER / "prediction"))
    import queue_slurm as benchmark

    runs = [benchmark.read_run(p) for p in sorted((benchmark.OUT / "slurm").glob("load-0.6-*"))]
    assert len(runs) == 4
    for i, bound in enumerate(benchmark.BOUNDS):
        assert abs(benchmark.pooled(runs, i)) <= bound
        assert all(abs(run.deviation(i)) <= 3 for run in runs)
    for gang, split in (runs[:2], runs[2:]):
        ours = split.simulated(2)[0] / gang.simulated(2)[0]
        assert ours == pytest.approx(split.real[2] / gang.real[2], abs=0.05)
