"""The training loop with checkpoints: a training that dies in any step goes on bit for bit."""

from __future__ import annotations

from itertools import accumulate
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from test_loop import data, network, single, train  # noqa: F401

from launching import until
from stratbench.cell.run_folder import RunFolder
from stratbench.extensions.checkpoints import attempts
from stratbench.extensions.checkpoints.keeping import CheckpointWriter
from stratbench.telemetry.clock import Phases
from stratbench.workload.data.device_data import DeviceData


class Ended(Exception):
    """The process of a training is gone."""


def kept(
    data: DeviceData,  # noqa: F811
    path: Path,
    dies_at: int | None,
    from_step: int,
) -> tuple:
    """A training with dropout that keeps checkpoints, until it dies in a step.

    Its result, how many checkpoints it counts, and its weights.
    """
    torch.manual_seed(5)
    strategy, worker = single(
        network(dropout=0.3),
        epochs=3,
        more={"checkpoints": {"checkpoint_every": 3}},
        schedule="cosine",
        warmup_steps=1,
    )
    worker.folder, worker.total_steps = RunFolder(path / "run"), 12
    take, taken = strategy.step, []

    def step(x, y):
        if len(taken) - 1 == dies_at:  # the first is the warm-up's
            raise Ended
        taken.append(take(x, y))
        return taken[-1]

    strategy.step = step
    worker.folder.path.mkdir(parents=True, exist_ok=True)
    keepers = []

    def make_keeper(phases: Phases) -> CheckpointWriter:
        job = SimpleNamespace(earlier_attempts=[{"next_step": from_step}] if from_step else ())
        keepers.append(CheckpointWriter(job, strategy, data, worker, phases))
        return keepers[0]

    result = train(strategy, worker, data, worker.folder.path, make_keeper)
    count = keepers[0].end(result.status, reports_for_all=True)["checkpoints"]["count"]
    return result, count, [p.detach().clone() for p in strategy.local]


@pytest.mark.parametrize("dies_at", range(12))
def test_a_training_that_dies_in_any_step_goes_on_bit_for_bit(data, tmp_path, dies_at):  # noqa: F811
    whole, count, weights = kept(data, tmp_path / "whole", None, 0)
    with pytest.raises(Ended):
        kept(data, tmp_path / "cut", dies_at, 0)
    folder = RunFolder(tmp_path / "cut" / "run")
    until(
        lambda: (attempts.find_newest_common_checkpoint_step(folder, 1) or 0) == dies_at // 3 * 3
    )  # it is written beside
    again, counted, others = kept(data, tmp_path / "cut", None, dies_at // 3 * 3)
    assert all(map(torch.equal, weights, others))
    entries = [
        [{key: e[key] for key in ("epoch", "train_loss", "test_loss", "score")} for e in epochs]
        for epochs in (whole.progress.epoch_results, again.progress.epoch_results)
    ]
    assert entries[0] == entries[1]
    assert (again.steps, len(again.clock.step_ms), len(again.clock.epoch_times_s)) == (12, 12, 3)
    assert counted == count == 3
    ends_s = [entry["train_time_s"] for entry in again.progress.epoch_results]
    assert ends_s == pytest.approx(list(accumulate(again.clock.epoch_times_s)))
