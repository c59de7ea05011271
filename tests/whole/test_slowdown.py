"""A step of a strategy is the same work wherever it is imitated, and a slowed worker's factor is real."""

from __future__ import annotations

import threading
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from ps_harness import Served
from torch import nn

from launching import IN_OUR_LOOP, each_strategy, settings
from stratbench.cell.extensions import import_attribute
from stratbench.cell.run_folder import RunFolder
from stratbench.cell.settings import Settings
from stratbench.extensions.servers.strategy import make_server_configs
from stratbench.extensions.servers.wire.handshake import make_secret, write_secret
from stratbench.strategies import get_strategy_class, slowdown
from stratbench.strategies.base import Worker
from stratbench.strategies.slowdown import Slowdown
from stratbench.telemetry.clock import Phases
from stratbench.telemetry.memory import MemoryMeter
from stratbench.telemetry.timeline import PhaseLog
from stratbench.train import loop
from stratbench.train.beside.profile import record_profiler_trace
from stratbench.workload.data.device_data import DeviceData

pytestmark = pytest.mark.timeout(300)

CPU = torch.device("cpu")
SHAPE = (1, 16, 16)
FACTOR = 3.0
SPLITS = "ps-async-modified"  # its step is a quarter of a batch
PER_SAMPLE_S = 1e-3


class Counted(nn.Module):
    """Notes the batches that it trains on."""

    def __init__(self) -> None:
        super().__init__()
        self.batches: list[int] = []

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.training:
            self.batches.append(len(x))
        return x


def network(first: nn.Module, width: int) -> nn.Module:
    return nn.Sequential(first, nn.Flatten(), nn.Linear(256, width), nn.ReLU(), nn.Linear(width, 3))


@pytest.fixture
def group(tmp_path):
    """A process group of one."""
    store = dist.FileStore(str(tmp_path / "store"), 1)
    dist.init_process_group("gloo", store=store, rank=0, world_size=1)
    yield
    dist.destroy_process_group()


def slowed(name: str, **changes: Any) -> Settings:
    block = {"workers": [0], "factor": FACTOR}
    return settings(name, gpus=1, per_worker_batch=16, slowdown=block, **changes)


def train(s: Settings, model: nn.Module, data: DeviceData, path: Path) -> loop.TrainingResult:
    """What a worker process does, on its own; then a few steps as for a profile."""
    folder = RunFolder(path)
    cls = get_strategy_class(s.strategy)
    strategy = cls(cls.Options(**s.options))
    server = None
    if strategy.kind == "server":
        secret = make_secret()
        write_secret(folder.job_secret_path, secret)
        [config] = make_server_configs(s, data.train_samples, folder, None)
        server = Served(config, secret)
    slow = Slowdown.from_settings(s, 0, model, SHAPE, 3, CPU)
    worker = Worker(s, 0, 1, 1, CPU, folder, [], slow.sleep_before_backward)
    strategy.setup(model, worker)
    log = PhaseLog(folder.get_phase_log_path(0), 0, 0.0)
    run = import_attribute(strategy.loop) if strategy.loop else loop.train
    result = run(
        strategy, data, worker, Phases("cpu", log), log, MemoryMeter(CPU), loop.EpochProgress(None)
    )
    record_profiler_trace(strategy, data, worker, None)
    strategy.close()
    if server is not None:
        server.result()
    return result


#: Strategies that can be slowed.
ABLE = [name for name in IN_OUR_LOOP if name != "pipeline"]


@pytest.mark.parametrize("name", each_strategy(ABLE))
def test_a_slowed_worker_is_as_slow_as_the_study_says(
    name, group, tmp_path, tiny_data, monkeypatch
):
    """By a clock that counts: each sample computed on takes a millisecond, each sleep what it asks.

    Measurement, warm-up, training and profile compute on batches of one size.
    """
    first = Counted()
    slept_s: list[float] = []
    now = SimpleNamespace(
        perf_counter=lambda: PER_SAMPLE_S * sum(first.batches), sleep=slept_s.append
    )
    monkeypatch.setattr(slowdown, "time", now)
    s = slowed(name)
    result = train(s, network(first, 8), DeviceData.load_prepared_data_set(tiny_data), tmp_path)
    samples = get_strategy_class(name).samples_per_step(s)
    assert samples == (4 if name == SPLITS else 16)
    assert set(first.batches) == {samples}
    assert result.samples == samples * result.steps == 64
    computed_s = PER_SAMPLE_S * sum(
        first.batches[-len(slept_s) :]
    )  # the rest were the measurement's
    assert (computed_s + sum(slept_s)) / computed_s == pytest.approx(FACTOR)
    assert len(first.batches) - len(slept_s) < 10


def test_no_garbage_is_left_for_a_served_workers_clock(tmp_path, tiny_data, monkeypatch):
    """Orders are drawn and garbage is collected before the first ticket is timed."""
    did: list[str] = []
    for owner, name in (
        (DeviceData, "draw_order_and_augmentation"),
        (loop.gc, "freeze"),
        (loop.StepClock, "begin_epoch"),
    ):
        real = getattr(owner, name)

        def noted(*args: Any, name: str = name, real: Any = real, **kwargs: Any) -> Any:
            did.append(name)
            return real(*args, **kwargs)

        monkeypatch.setattr(owner, name, noted)
    s = settings("ps-async", gpus=1, per_worker_batch=16)
    train(s, network(nn.Identity(), 8), DeviceData.load_prepared_data_set(tiny_data), tmp_path)
    assert did[: did.index("begin_epoch") + 1][-3:] == [
        "draw_order_and_augmentation",
        "freeze",
        "begin_epoch",
    ]


def test_a_step_in_parts_is_slowed_by_the_whole_of_it(monkeypatch):
    """By the same clock: 16 samples in 4 parts take 16 ms."""
    first = Counted()
    now = SimpleNamespace(perf_counter=lambda: PER_SAMPLE_S * sum(first.batches))
    monkeypatch.setattr(slowdown, "time", now)
    s = settings("single", gpus=1, per_worker_batch=16, gradient_accumulation_steps=4)
    step_s = slowdown.measure_forward_backward_s(s, network(first, 8), SHAPE, 3, CPU)
    assert set(first.batches) == {4}
    assert step_s == pytest.approx(16 * PER_SAMPLE_S)


# ---------------------------------------------------------------- by hand


@pytest.fixture
def naps(monkeypatch) -> list[float]:
    """What this thread has slept, without sleeping; others of the process do."""
    found: list[float] = []
    here, sleep = threading.get_ident(), time.sleep

    def nap(seconds: float) -> None:
        (found.append if threading.get_ident() == here else sleep)(seconds)

    monkeypatch.setattr("time.sleep", nap)
    return found


def test_a_factor_adds_what_is_missing(naps):
    slow = Slowdown(0.1, factor=3.0, sigma=0.0, seed=0, device=torch.device("cpu"))
    for _ in range(4):
        slow.sleep_before_backward()
    assert naps == pytest.approx([0.2] * 4)
    assert slow.summarize_slowdown()["mean_factor"] == 3.0


def test_nobody_is_slowed_without_a_factor(naps):
    slow = Slowdown(0.1, factor=1.0, sigma=0.0, seed=0, device=torch.device("cpu"))
    slow.sleep_before_backward()
    assert naps == []


def test_random_factors_are_seeded_and_never_below_one(naps):
    def drawn(seed: int) -> list[float]:
        slow = Slowdown(0.1, factor=1.0, sigma=0.5, seed=seed, device=torch.device("cpu"))
        for _ in range(200):
            slow.sleep_before_backward()
        return slow.factors

    assert drawn(1) == drawn(1) != drawn(2)
    assert min(drawn(1)) == 1.0
    assert max(drawn(1)) > 1.5
    assert min(naps) == 0


def test_the_step_is_measured_without_a_trace():
    model = torch.nn.Sequential(torch.nn.Flatten(), torch.nn.Linear(256, 3))
    before = [p.detach().clone() for p in model.parameters()]
    s = settings("single", gpus=2, slowdown={"workers": [1], "factor": 2})
    shape = (1, 16, 16)
    assert Slowdown.from_settings(s, 0, model, shape, 3, torch.device("cpu")).compute_s == 0
    assert Slowdown.from_settings(s, 1, model, shape, 3, torch.device("cpu")).compute_s > 0
    assert all(torch.equal(a, b) for a, b in zip(before, model.parameters(), strict=True))
    assert all(p.grad is None for p in model.parameters())
