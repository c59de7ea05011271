"""`make gpu-check` on the software GPU: the stages and checks that need no kernel hold."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path

import pytest
from machine import Machine

pytestmark = pytest.mark.timeout(3600)
ROOT = Path(__file__).parents[2]
#: Stages that run here, and those whose every verdict is on values or times, which are trained elsewhere.
STAGES = ("preflight", "cells", "memory", "clock", "power", "failures")
NOT_RUN = {
    "matrix": "all it compares is what networks compute",
    "steps": "ratios of times",
    "server": "overlap and equality with single; its transports are cells of test_cells.py",
}
#: What the software GPU cannot show of the stages that run: part of a check's name, and why.
CANNOT_SHOW = {
    "a forked child computes on the device": "the sum is a kernel",
    ": an accuracy": "the scores are of kernels: none of the answers counts",
    "a matrix product reaches the datasheet": "it is a kernel",
    "the first step is no slower than three median ones": "the host's times, and it may be busy",
    "phase marks cost less than 1 % of a step": "the host's times, and it may be busy",
}
#: The check without its limits, which are a real GPU's on an idle host, and with fewer cells and cases.
DRIVER = """
import sys
from dataclasses import replace
sys.path.insert(0, "benchmarks/gpu")
import check
check.STAGES = tuple(replace(stage, limit_s=1e6) for stage in check.STAGES)
check.prepare_environment()
import cells, failures, memory
failures.LIMIT_S = 90.0
cells.ON_GPU = tuple(cell for cell in cells.ON_GPU if cell[0] in ("fsdp", "ps-sync"))
memory.ON_GPU = (memory.Case("ddp", 1), memory.Case("fsdp", 2))
sys.exit(check.main(sys.argv[1:]))
"""


def test_what_needs_no_kernel_holds(machine: Machine, tmp_path: Path) -> None:
    out = tmp_path / "gpu-check.json"
    done = subprocess.run(
        [sys.executable, "-c", DRIVER, "--device", "cuda", "--out", str(out), "--stages", *STAGES],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=False,
    )
    found = json.loads(out.read_text())["stages"]
    assert set(found) == set(STAGES)
    ended = {name: stage["reason"] for name, stage in found.items()}
    assert all(
        reason is None or re.fullmatch(r"\d+ of \d+ checks", reason) for reason in ended.values()
    ), ended
    checks = [
        (f"{name}: {check['what']}", check["holds"], check["said"])
        for name, stage in found.items()
        for check in stage["checks"]
    ]
    skipped = [skipped["what"] for stage in found.values() for skipped in stage["skipped"]]
    named = [*(what for what, _, _ in checks), *skipped]
    met = {part for part in CANNOT_SHOW if any(part in what for what in named)}
    assert met == set(CANNOT_SHOW), "a check of this name is no longer made"
    failed = [c for c in checks if not c[1] and not any(part in c[0] for part in CANNOT_SHOW)]
    assert failed == [], done.stdout
    assert len(checks) > 40


def test_every_stage_runs_or_it_is_said_why_not() -> None:
    sys.path.insert(0, str(ROOT / "benchmarks" / "gpu"))
    import check

    assert {stage.name for stage in check.STAGES} == {*STAGES, *NOT_RUN}
