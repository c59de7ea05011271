"""A cell that keeps checkpoints goes on after it was killed, and trains what it would have trained."""

from __future__ import annotations

import random
import signal
from collections.abc import Callable
from typing import Any

import psutil
import pytest

from launching import LaunchedCell, settings, until
from stratbench.train.restarts import attempts

pytestmark = pytest.mark.timeout(600)
#: fp64, with all that an update may have: momentum, decay, a schedule, clipping.
EXACT: dict[str, Any] = {
    "precision": "fp64", "momentum": 0.9, "weight_decay": 1e-3, "nesterov": True, "schedule": "cosine",
    "clip_norm": 0.5, "lr": 0.002, "global_batch": 16, "per_worker_batch": 8, "warmup_steps": 1, "epochs": 60,
    "checkpoint_every": 3,
}  # fmt: skip


def results(launched: LaunchedCell) -> list[tuple[float, float]]:
    """The training and test losses of each epoch."""
    epochs = launched.read_record()["score"]["per_epoch"]
    return [(entry["train_loss"], entry["test_loss"]) for entry in epochs]


def kill_all(launched: LaunchedCell) -> None:
    """Kill the launcher and all its processes at once, as a lost node does."""
    processes = [psutil.Process(launched.process.pid)]
    processes += processes[0].children(recursive=True)
    for process in processes:
        process.send_signal(signal.SIGKILL)
    launched.process.communicate()


@pytest.mark.slow
@pytest.mark.parametrize("strategy", ["single", "ddp", "local-sgd", "diloco", "gossip", "fsdp", "zero1"])
def test_a_cell_killed_at_random_trains_what_it_would_have(
    strategy: str, start_cell: Callable[..., LaunchedCell]
) -> None:
    gpus = 1 if strategy == "single" else 2
    s = settings(strategy, **EXACT | {"gpus": gpus, "per_worker_batch": 16 // gpus})
    chance, kills = random.Random(3), 0
    while True:
        launched = start_cell(s)
        run = launched.folder
        before = attempts.common_step(run, gpus) or 0
        ahead = before + chance.randint(10, 60)
        until(lambda: launched.process.poll() is not None or (attempts.common_step(run, gpus) or 0) >= ahead)
        if launched.process.poll() is not None or kills == 3:
            break
        kill_all(launched)
        kills += 1
    code, output = launched.finish()
    assert code == 0, output
    assert kills == 3
    record = launched.read_record()
    found = results(launched)
    assert record["restarts"]["count"] == 3
    assert record["batch"]["updates_applied"] == 60 * 4
    assert not (launched.logs / attempts.FOLDER).exists()
    undisturbed = start_cell(s)
    assert undisturbed.finish()[0] == 0
    for one, other in zip(found, results(undisturbed), strict=True):
        assert one == pytest.approx(other, rel=1e-12)
