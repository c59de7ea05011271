"""Streams that do all as late as CUDA allows change nothing, bit for bit: the host waits where it must.

Gradients are values that a kernel which is run has filled in, another one in each step; so what a parameter
server's workers push, and when they read it, decides its weights.
"""

from __future__ import annotations

import re
import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
from design import IMAGES
from machine import Machine

from launching import WORKFLOW, LaunchedCell, settings

pytestmark = pytest.mark.timeout(900)
LIMIT_S = 540
#: Put into a copy of the product: gradients with values, and a line with what is evaluated.
BEFORE_A_BUCKET = "        self._waiting.discard(bucket)\n"
FILL = """
        self._filled = getattr(self, "_filled", 0) + 1
        self._flat.grads[low:high].fill_(self._filled / 1024)
"""
SHOW = """

_evaluate = evaluate_test_set


def evaluate_test_set(strategy, *rest, **more):
    from stratbench.telemetry.provenance import hash_state_dict

    with strategy.open_evaluation_model() as model:
        print("weights", hash_state_dict(model.state_dict()), flush=True)
    return _evaluate(strategy, *rest, **more)
"""
WAIT = "                arrived.synchronize()\n"


@pytest.fixture
def weights(
    machine: Machine,
    start_cell: Callable[..., LaunchedCell],
    data: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> Callable[..., str]:
    """A function that trains ps-sync in a copy of the product; returns a hash of the weights at the end."""
    copies = 0

    def train(lazy: bool, gpus: int, transport: str, waits: bool = True) -> str:
        nonlocal copies
        copies += 1
        copy = tmp_path / f"copy{copies}" / "workflow"
        shutil.copytree(WORKFLOW, copy, ignore=shutil.ignore_patterns("*.pyc.*"))
        change(
            copy / "stratbench/extensions/servers/ps/device.py",
            BEFORE_A_BUCKET,
            BEFORE_A_BUCKET + FILL,
        )
        if not waits:
            change(copy / "stratbench/extensions/servers/ps/device.py", WAIT, "")
        with (copy / "stratbench/train/loop.py").open("a") as loop:
            loop.write(SHOW)
        monkeypatch.setenv("SOFTWARE_GPU_LAZY", str(int(lazy)))
        s = settings(
            "ps-sync", device="cuda", gpus=gpus, global_batch=32, per_worker_batch=32 // gpus,
            weight_decay=0.05, lr=0.5, **IMAGES,
        )  # fmt: skip
        s = replace(s, options=s.options | {"transport": transport})
        cell = start_cell(s, data_dir=data, workflow=copy)
        code, output = cell.finish(LIMIT_S)
        assert code == 0, output
        text = "".join(path.read_text() for path in cell.folder.list_log_paths())
        (found,) = re.findall(r"^weights (\w+)$", text, re.MULTILINE)
        cell.record.unlink()
        shutil.rmtree(cell.logs)
        return found

    return train


def change(path: Path, old: str, new: str) -> None:
    text = path.read_text()
    assert text.count(old) == 1, f"{old!r} is not once in {path}"
    path.write_text(text.replace(old, new))


@pytest.mark.parametrize(("gpus", "transport"), [(2, "shm"), (2, "tcp"), (4, "shm")])
def test_weights_are_those_of_eager_streams(
    weights: Callable[..., str], gpus: int, transport: str
) -> None:
    assert weights(True, gpus, transport) == weights(False, gpus, transport)


def test_a_missing_wait_would_show(weights: Callable[..., str]) -> None:
    eager = weights(False, 2, "shm", waits=False)
    assert eager == weights(False, 2, "shm"), "else this fault would show without lazy streams"
    assert weights(True, 2, "shm", waits=False) != eager
