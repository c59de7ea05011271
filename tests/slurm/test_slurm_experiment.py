"""Gang or elastic on a real SLURM: the benchmark, with few jobs of others."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from cluster import SlurmCluster

from launching import LIMIT_S

ROOT = Path(__file__).parents[2]
pytest_plugins = ["cluster_fixtures"]
pytestmark = [pytest.mark.slurm, pytest.mark.slow, pytest.mark.timeout(600)]
#: GPUs and seconds of the others' jobs.
JOBS = [(1, 450), (3, 450), (64, 225), (2, 900)]
ARMS = {"none": "no training", "gang": "gang", "spare-split": "split synchronous, preemptible"}


def test_the_experiment_runs_among_the_jobs_of_a_trace(slurm: SlurmCluster, tmp_path: Path) -> None:
    """On clusters of its own: `slurm` says that there can be one."""
    trace = tmp_path / "made.csv"
    rows = [f"{300 * i},{gpus},{duration_s}" for i, (gpus, duration_s) in enumerate(JOBS)]
    trace.write_text("\n".join(["submit_s,gpus,duration_s", *rows]) + "\n")
    options = ["--trace", str(trace), "--jobs", str(len(JOBS)), "--moments", "1", "--load", "0.5"]
    command = [sys.executable, str(ROOT / "benchmarks/elastic_slurm.py"), *options]
    done = subprocess.run(
        [*command, "--arms", *ARMS, "--out", str(tmp_path)],
        env=os.environ | {"PYTHONPATH": str(ROOT / "workflow")},
        capture_output=True,
        text=True,
        timeout=LIMIT_S,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    [path] = (tmp_path / "experiment").iterdir()
    assert path.name == "load-0.5-seed-1-made.json"
    run = json.loads(path.read_text())
    # As wide as the cluster at most, and a power of two; compressed by 225.
    assert [row[1:3] for row in run["others"]] == [[1, 2.0], [4, 2.0], [16, 1.0], [2, 4.0]]
    work = sum(gpus * seconds for _, gpus, seconds, _ in run["others"])
    assert work / run["others"][-1][0] / 16 == pytest.approx(0.5, rel=0.01)
    page = (tmp_path / "experiment.md").read_text()
    for name, title in ARMS.items():
        assert f"\n| {title} |" in page
        trainings = run["arms"][name]["trainings"]
        assert len(trainings) == (name != "none")
        for training in trainings:
            # An hour on 8 GPUs; dates are rounded to hundredths.
            assert training["gpu_s"] >= 127.9
            assert training["done_s"] >= training["started_s"] + 15.9
            assert 1 <= training["joins"] <= (1 if name == "gang" else 8 + training["losses"])
