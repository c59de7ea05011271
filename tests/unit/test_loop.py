"""The training loop's parts, in one process: evaluation, warm-up, what counts as divergence."""

from __future__ import annotations

import time
from contextlib import contextmanager

import pytest
import torch
import torch.distributed as dist

from launching import settings
from stratbench.data import DeviceData
from stratbench.strategies.base import Worker
from stratbench.strategies.single import Single
from stratbench.telemetry.clock import Phases
from stratbench.telemetry.memory import MemoryMeter
from stratbench.telemetry.timeline import PhaseLog
from stratbench.train import loop


@pytest.fixture
def data(tiny_data) -> DeviceData:
    return DeviceData.load(tiny_data)


def network(dropout: float = 0.0) -> torch.nn.Module:
    torch.manual_seed(3)
    return torch.nn.Sequential(
        torch.nn.Flatten(), torch.nn.Dropout(dropout), torch.nn.Linear(256, 3)
    )


def single(model: torch.nn.Module, **changes) -> tuple[Single, Worker]:
    s = settings("single", gpus=1, per_worker_batch=16, **changes)
    worker = Worker(s, 0, 1, torch.device("cpu"), None, [])
    strategy = Single(Single.Options())
    strategy.setup(model, worker)
    return strategy, worker


def train(strategy: Single, worker: Worker, data: DeviceData, folder) -> loop.Result:
    log = PhaseLog(folder / "phases0.jsonl", 0, 0.0)
    phases, progress = Phases("cpu", log), loop.Progress(folder / "progress.jsonl")
    memory = MemoryMeter(torch.device("cpu"))
    return loop.train(strategy, data, worker, phases, log, memory, progress)


@pytest.mark.parametrize("workers", [1, 2, 3, 7])
@pytest.mark.parametrize("batch", [6, 40, 64])
def test_workers_share_out_the_test_set(data, monkeypatch, workers, batch):
    """Their sums make the whole, each sample once, though all call the model equally often."""
    monkeypatch.setattr(loop, "EVAL_BATCH", batch)
    monkeypatch.setattr(dist, "all_reduce", lambda sums: None)
    model = network()
    calls = []
    model.register_forward_hook(lambda *_: calls.append(1))
    strategy, _ = single(model)
    shares, rounds = [], []
    for rank in range(workers):
        calls.clear()
        shares.append(loop.evaluate(strategy, data, rank, workers))
        rounds.append(len(calls))
    assert len(set(rounds)) == 1
    with torch.no_grad():
        x, y = data.test_batch(0, 40)
        logits = model.eval()(x).double()
    loss = torch.nn.functional.cross_entropy(logits, y)
    accuracy = (logits.argmax(1) == y).double().mean()
    assert sum(s[0] for s in shares) == pytest.approx(float(loss), rel=1e-6)
    assert sum(s[1] for s in shares) == pytest.approx(float(accuracy), abs=1e-12)


def test_warm_up_leaves_no_trace_with_dropout(data):
    """The random generator too is put back."""
    weights = []
    for warm in (False, True):
        strategy, worker = single(network(dropout=0.5))
        torch.manual_seed(11)
        if warm:
            loop.warm_up(strategy, data, worker)
        indices = torch.arange(16)
        for _ in range(3):
            strategy.step(*data.batch(indices))
        weights.append([p.detach().clone() for p in strategy.parameters])
    assert all(torch.equal(a, b) for a, b in zip(*weights, strict=True))


def test_what_happens_in_evaluation_is_in_no_figure_of_training(data, tmp_path, monkeypatch):
    """Neither its time (a clock that jumps by 1000 s) nor its memory (100 MiB)."""
    now_ns, jumps = time.perf_counter_ns, []
    monkeypatch.setattr(time, "perf_counter_ns", lambda: now_ns() + len(jumps) * 10**12)

    class Greedy(Single):
        @contextmanager
        def evaluating(self):
            with super().evaluating() as model:
                held = torch.ones(100 * 2**20 // 4)
                jumps.append(1)
                yield model
                del held

    s = settings("single", gpus=1, per_worker_batch=16, epochs=2)
    worker = Worker(s, 0, 1, torch.device("cpu"), None, [])
    strategy = Greedy(Greedy.Options())
    strategy.setup(network(), worker)
    result = train(strategy, worker, data, tmp_path)
    assert len(jumps) == 3  # one of them in the warm-up
    assert result.clock.train_time_s < 1000
    if result.memory["method"] == "vmhwm":
        assert result.memory["peak_over_base_bytes"] < 50 * 2**20


def test_a_test_loss_that_is_not_finite_is_divergence(data, tmp_path):
    """Training's last loss is from before the last update, so it may miss the explosion."""
    strategy, worker = single(network(), epochs=3)
    real = strategy.step
    steps = []

    def step(x, y):
        loss = real(x, y)
        steps.append(loss)
        if len(steps) == 2 + 4:  # the warm-up's, and an epoch's
            with torch.no_grad():
                strategy.parameters[0].fill_(float("inf"))
        return loss

    strategy.step = step
    result = train(strategy, worker, data, tmp_path)
    assert result.status == "diverged"
    assert "test loss" in result.reason
    assert "epoch 1 of 3" in result.reason
    assert result.progress.per_epoch[0]["test_loss"] is None
    assert result.progress.per_epoch[0]["train_loss"] is not None
    assert loop.Progress(None).per_epoch == []
