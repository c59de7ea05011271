"""The benchmarks run by hand still run: they call the engine's own functions."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

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


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_the_training_loops_overhead_can_be_measured(tmp_path):
    (tmp_path / "short.py").write_text(SHORT)
    command = [sys.executable, "short.py", "--processes", "1", "--rounds", "2", "--out", "."]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=250)
    assert done.returncode == 0, done.stdout + done.stderr
    page = (tmp_path / "overhead-1-process.md").read_text()
    assert page.count("| ours | ") == page.count("## ") == 3
