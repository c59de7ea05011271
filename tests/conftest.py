"""Shared by the tests: a tiny data set, and cells trained by the real launcher on it."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest

from launching import TINY, WORKFLOW, LaunchedCell
from stratbench.cell.coordinates import Cell
from stratbench.cell.settings import Settings
from stratbench.workload.prepare import prepare


@pytest.fixture(scope="session")
def tiny_data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """64 training and 40 test images of 16x16 pixels in 3 classes, prepared."""
    folder = tmp_path_factory.mktemp("data") / "tiny"
    prepare("tiny", folder, spec=TINY)
    return folder


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
        parent: int | None = None,
        **popen: Any,
    ) -> LaunchedCell:
        cell = Cell("tests", "tiny", s.strategy, s.model, s.dataset, s.gpus, 0)
        record, logs = cell.record_path(tmp_path), cell.log_dir(tmp_path)
        timeline = record.with_name("timeline.csv")
        command = [
            sys.executable, "-m", "stratbench.train.launch", "--cell", json.dumps(asdict(cell)),
            "--settings", s.as_json(), "--data", str(data_dir), "--record", str(record),
            "--timeline", str(timeline), "--logs", str(logs), "--time-limit-s", str(time_limit_s),
            *(["--parent", str(parent)] if parent else []),
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
