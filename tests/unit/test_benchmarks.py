"""The benchmarks run by hand still run: they call the engine's own functions."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_the_training_loops_overhead_can_be_measured(tmp_path):
    command = [sys.executable, "benchmarks/overhead.py", "--processes", "1", "--rounds", "2"]
    done = subprocess.run(
        [*command, "--out", str(tmp_path)], cwd=ROOT, capture_output=True, text=True, timeout=250
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert "ours" in (tmp_path / "overhead-1-process.md").read_text()
