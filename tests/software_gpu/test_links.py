"""Links between GPUs are measured by NCCL's calls. Times are the software GPU's, and mean nothing."""

from __future__ import annotations

import csv
import subprocess
import sys
from pathlib import Path

from machine import Machine

from launching import WORKFLOW
from stratbench.extensions.links.timing import KINDS

LIMIT_S = 540


def test_every_kind_is_measured_between_gpus(machine: Machine, tmp_path: Path) -> None:
    command = [
        sys.executable, "-m", "stratbench.extensions.links.measure", "--gpus", "--workers", "2", "4",
        "--largest-mib", "1", "--repeats", "1", "--out", str(tmp_path),
    ]  # fmt: skip
    done = subprocess.run(command, cwd=WORKFLOW, capture_output=True, text=True, timeout=LIMIT_S)
    assert done.returncode == 0, done.stderr
    with (tmp_path / "times.csv").open(encoding="utf-8") as file:
        times = list(csv.DictReader(file))
    measured = {(t["library"], t["kind"], int(t["workers"])) for t in times}
    assert measured == {("nccl", kind, n) for kind in KINDS for n in (2, 4)}
    with (tmp_path / "links.csv").open(encoding="utf-8") as file:
        assert {row["level"] for row in csv.DictReader(file)} == {"within"}


def test_more_workers_than_gpus_are_refused(machine: Machine, tmp_path: Path) -> None:
    command = [
        sys.executable, "-m", "stratbench.extensions.links.measure", "--gpus", "--workers", "8",
        "--out", str(tmp_path),
    ]  # fmt: skip
    done = subprocess.run(command, cwd=WORKFLOW, capture_output=True, text=True, timeout=LIMIT_S)
    assert done.returncode == 2
    assert "this machine has 4" in done.stderr
