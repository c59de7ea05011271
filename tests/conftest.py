"""Shared by the tests: a tiny data set, and cells trained by the real launcher on it."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import pytest

from stratbench import data
from stratbench.cells import Cell
from stratbench.config import Settings, option_defaults

WORKFLOW = Path(__file__).parents[1] / "workflow"
TINY = {
    "source": "synthetic", "train_samples": 64, "test_samples": 40, "classes": 3, "channels": 1,
    "size": 16,
}  # fmt: skip


@dataclass
class LaunchedCell:
    """A launcher at work, and where it leaves what."""

    cell: Cell
    process: subprocess.Popen[str]
    record: Path
    timeline: Path
    logs: Path

    @property
    def run_dir(self) -> Path:
        return self.logs / "run"

    def finish(self, timeout_s: float = 120) -> tuple[int, str]:
        """Exit code, and what was printed (stdout and stderr)."""
        output, _ = self.process.communicate(timeout=timeout_s)
        return self.process.returncode, output

    def read_record(self) -> dict[str, Any]:
        return json.loads(self.record.read_text())


@pytest.fixture(scope="session")
def tiny_data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """64 training and 40 test images of 16x16 pixels in 3 classes, prepared."""
    folder = tmp_path_factory.mktemp("data") / "tiny"
    data.prepare("tiny", folder, spec=TINY)
    return folder


def settings(strategy: str = "ddp", **changes: Any) -> Settings:
    """Settings of a short cell on 2 CPU workers; `options` are the strategy's defaults."""
    base = Settings(
        strategy=strategy, options={}, model="vgg-compact", dataset="tiny", gpus=2, seed=7,
        epochs=1, global_batch=16, per_worker_batch=8, lr=0.05, momentum=0.9, weight_decay=0.0,
        nesterov=False, precision="fp32", augment=False, warmup_steps=2, device="cpu", threads=1,
        slowdown=None,
    )  # fmt: skip
    if "options" not in changes:
        changes["options"] = option_defaults(strategy)
    return replace(base, **changes)


@pytest.fixture
def start_cell(tmp_path: Path, tiny_data: Path) -> Iterator[Callable[..., LaunchedCell]]:
    """A function that starts a cell's launcher; what still runs at the end of the test is killed."""
    started: list[LaunchedCell] = []

    def start(
        s: Settings,
        *,
        time_limit_s: float = 0,
        workflow: Path = WORKFLOW,
        data_dir: Path = tiny_data,
        **popen: Any,
    ) -> LaunchedCell:
        cell = Cell("tests", "tiny", s.strategy, s.model, s.dataset, s.gpus, 0)
        record, logs = cell.record_path(tmp_path), cell.log_dir(tmp_path)
        timeline = record.with_name("timeline.csv")
        command = [
            sys.executable, "-m", "stratbench.train.launch", "--cell", json.dumps(asdict(cell)),
            "--settings", s.as_json(), "--data", str(data_dir), "--record", str(record),
            "--timeline", str(timeline), "--logs", str(logs), "--time-limit-s", str(time_limit_s),
        ]  # fmt: skip
        process = subprocess.Popen(
            command,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            env=popen.pop("env", os.environ) | {"PYTHONPATH": str(workflow)},
            **popen,
        )
        started.append(LaunchedCell(cell, process, record, timeline, logs))
        return started[-1]

    yield start
    for launched in started:
        launched.process.kill()
        launched.process.wait()
