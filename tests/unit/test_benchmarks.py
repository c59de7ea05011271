"""The benchmarks run by hand still run: they call the engine's own functions."""

from __future__ import annotations

import ast
import csv
import subprocess
import sys
from dataclasses import replace
from importlib import import_module
from pathlib import Path

import pytest

from launching import LIMIT_S

FOLDER = Path(__file__).parents[2] / "benchmarks"
#: The benchmark, with blocks as short as can be.
SHORT = f"""
import sys
sys.path.insert(0, {str(FOLDER)!r})
import overhead
overhead.WORKLOADS = {{name: w._replace(steps=2) for name, w in overhead.WORKLOADS.items()}}
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


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_the_training_loops_overhead_can_be_measured(tmp_path):
    (tmp_path / "short.py").write_text(SHORT)
    command = [sys.executable, "short.py", "--processes", "1", "--rounds", "2", "--out", "."]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=LIMIT_S)
    assert done.returncode == 0, done.stdout + done.stderr
    page = (tmp_path / "overhead-1-process.md").read_text()
    assert page.count("| ours | ") == page.count("## ") == 3


#: One condition of a few steps; with an argument, what must not be trained again.
FEW = f"""
import sys
from dataclasses import replace
sys.path.insert(0, {str(FOLDER)!r})
import staleness_adamw as benchmark
kept = sys.argv.pop() == "kept"
few = replace(benchmark.digits(), steps=4, seeds=2)
benchmark.recipes = lambda root: {{"digits": lambda: few}}
benchmark.CONDITIONS = [benchmark.Condition("digits", 2, 3.0)]
if kept:
    benchmark.train = None
benchmark.main()
"""


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_servers_that_take_adamw_are_compared_and_a_stopped_run_goes_on(tmp_path):
    (tmp_path / "few.py").write_text(FEW)
    pages = []
    for what in ("new", "kept"):
        command = [sys.executable, "few.py", "--out", ".", what]
        done = subprocess.run(
            command, cwd=tmp_path, capture_output=True, text=True, timeout=LIMIT_S
        )
        assert done.returncode == 0, done.stdout + done.stderr
        pages.append((tmp_path / "staleness-adamw.md").read_text())
    assert pages[0] == pages[1]
    [row] = [line for line in pages[0].splitlines() if line.startswith("| 2 | 3x |")]
    assert row.count("±") == 4 * 3  # policies x learning rates
    lines = (tmp_path / "staleness-adamw.csv").read_text().splitlines()
    assert len(lines) == 1 + (1 + 4) * 3 * 2
    # Two seeds of a few steps: at the same learning rate and seed all begin with the same weights.
    assert len({line.split(",")[6] for line in lines[1:]}) == 2


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_policies_side_by_side_train_as_each_does_alone(monkeypatch):
    monkeypatch.syspath_prepend(FOLDER)
    import staleness_adamw as benchmark

    few = replace(benchmark.digits(), steps=3, seeds=2, rates=(0.01,))
    condition = benchmark.Condition("digits", 4, 3.0)
    together = list(benchmark.train("", condition, few, few.variants))
    for variant in few.variants:
        alone = list(benchmark.train("", condition, few, [variant]))
        assert alone == [r for r in together if (r["strategy"], r["options"]) == variant]


@pytest.mark.slow
def test_the_decisions_rates_come_out_as_a_page(capsys, monkeypatch):
    monkeypatch.syspath_prepend(str(FOLDER))
    import decision

    monkeypatch.setattr(decision, "DECISIONS", 6)
    decision.main()
    page = capsys.readouterr().out
    committed = (FOLDER / "results" / "decision.md").read_text()
    headings = [line for line in page.splitlines() if line.startswith("#")]
    assert headings == [line for line in committed.splitlines() if line.startswith("#")]
    assert page.count("\n|") == committed.count("\n|")


@pytest.mark.slow
def test_a_machine_that_slows_makes_no_equal_strategy_slower_in_the_workflows_order(monkeypatch):
    monkeypatch.syspath_prepend(str(FOLDER))
    import order_of_execution as benchmark

    monkeypatch.setattr(benchmark, "STUDIES", 60)
    slowing = benchmark.CHANGES["slower by 10 %, steadily"]
    for size in ((3, 3), (5, 3), (3, 5)):
        old, new = (
            benchmark.rates(*size, benchmark.ORDERS[name], slowing, 0.01)
            for name in ("strategy by strategy", "the workflow's")
        )
        assert old["false"] > 40
        assert old["unsaid"] == 0
        assert new["false"] <= 5


@pytest.mark.slow
def test_the_queue_simulators_table_of_theory_comes_out(tmp_path, monkeypatch):
    monkeypatch.syspath_prepend(str(FOLDER))
    import queue_theory as benchmark

    few = [*benchmark.mmc_rows(runs=20, jobs=400), benchmark.checkpoint_row(trainings=20)]
    names = [row["case"] for row in few]
    with open(FOLDER / "results/elastic/theory.csv", newline="") as file:
        committed = list(csv.DictReader(file))
    assert [row["case"] for row in committed] == names
    assert all(row["holds"] == "True" for row in committed), "a bound is missed"
    assert all(
        row["half_width"] < row["plain_half_width"] for row in few if "M/M/16" in row["case"]
    )


def test_the_tables_of_elastic_workers_are_those_of_the_map(monkeypatch):
    monkeypatch.syspath_prepend(str(FOLDER))
    import elastic_map as benchmark

    rows = list(benchmark.kept_rows(benchmark.MAP).values())
    page = (FOLDER.parent / "docs/elastic.md").read_text().splitlines()
    lines = list(benchmark.lines_of_docs(rows, benchmark.OUT / "others.csv"))
    assert len(lines) == 12 + 7 + 9 + 2
    assert [line for line in lines if line not in page] == []


@pytest.mark.slow
def test_a_row_of_the_map_comes_out_again(monkeypatch):
    monkeypatch.syspath_prepend(str(FOLDER))
    import elastic_map as benchmark

    key = next(k for k in benchmark.map_keys() if (k.load, k.width) == (0.7, 8))
    committed = benchmark.kept_rows(benchmark.MAP)
    row = benchmark.row_of(key)
    texts = {name: benchmark.told(row[name]) for name in benchmark.COLUMNS}
    assert texts == committed[tuple(texts[name] for name in benchmark.KEYS)]


@pytest.mark.slow
def test_the_simulator_stays_as_near_to_slurm_as_it_was(monkeypatch):
    monkeypatch.syspath_prepend(str(FOLDER))
    import queue_slurm as benchmark

    runs = [benchmark.read_run(p) for p in sorted((benchmark.OUT / "slurm").glob("load-0.6-*"))]
    assert len(runs) == 4
    for i, bound in enumerate(benchmark.BOUNDS):
        assert abs(benchmark.pooled(runs, i)) <= bound
        assert all(abs(run.deviation(i)) <= 3 for run in runs)
    for gang, split in (runs[:2], runs[2:]):
        ours = split.simulated(2)[0] / gang.simulated(2)[0]
        assert ours == pytest.approx(split.real[2] / gang.real[2], abs=0.05)
