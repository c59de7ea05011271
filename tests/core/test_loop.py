"""The training loop's parts, in one process: evaluation, warm-up, what counts as divergence."""

from __future__ import annotations

import json
import os
import time
from collections.abc import Callable
from contextlib import contextmanager
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from process_groups import forking

from launching import LIMIT_S, settings
from stratbench.cell.run_folder import RunFolder
from stratbench.strategies.base import Worker
from stratbench.strategies.ddp import DDP
from stratbench.strategies.mesh import Mesh
from stratbench.strategies.single import Single
from stratbench.telemetry.clock import Phases, StepClock
from stratbench.telemetry.memory import MemoryMeter
from stratbench.telemetry.timeline import PhaseLog
from stratbench.train import assemble, loop
from stratbench.train.beside.beside import Beside, TrainingStart
from stratbench.workload.data.device_data import DeviceData
from stratbench.workload.tasks import Classification, EvaluationResult, compute_test_loss_and_score

LATE_S = 0.5


@pytest.fixture
def data(tiny_data) -> DeviceData:
    return DeviceData.load_prepared_data_set(tiny_data)


def network(dropout: float = 0.0) -> torch.nn.Module:
    torch.manual_seed(3)
    return torch.nn.Sequential(
        torch.nn.Flatten(), torch.nn.Dropout(dropout), torch.nn.Linear(256, 3)
    )


def single(model: torch.nn.Module, **changes) -> tuple[Single, Worker]:
    s = settings("single", gpus=1, per_worker_batch=16, **changes)
    worker = Worker(s, 0, 1, 1, torch.device("cpu"), None, [])
    strategy = Single(Single.Options())
    strategy.setup(model, worker)
    return strategy, worker


def train(
    strategy: Single,
    worker: Worker,
    data: DeviceData,
    path: Path,
    *besides: Callable[[Phases], Beside],
) -> loop.TrainingResult:
    folder = RunFolder(path)
    log = PhaseLog(folder.get_phase_log_path(0), 0, 0.0)
    phases, progress = Phases("cpu", log), loop.EpochProgress(folder)
    memory = MemoryMeter(torch.device("cpu"))
    made = [beside(phases) for beside in besides]
    return loop.train(strategy, data, worker, phases, log, memory, progress, made)


@pytest.mark.parametrize(
    "mesh",
    [
        Mesh(1),
        Mesh(2),
        Mesh(3),
        Mesh(7),
        Mesh(2, tensor=2),
        Mesh(1, tensor=3),
        Mesh(2, 2, stages=2),
    ],
    ids=str,
)
@pytest.mark.parametrize("batch", [6, 40, 64])
def test_workers_share_out_the_test_set(data, monkeypatch, mesh, batch):
    """Their sums make the whole, each sample once, though all call the model equally often."""
    model = network()
    calls = []
    model.register_forward_hook(lambda *_: calls.append(1))
    strategy, _ = single(model)
    found, rounds = evaluated_by_all(
        strategy, data, Classification(), mesh, monkeypatch, batch, calls
    )
    assert len(set(rounds)) == 1
    with torch.no_grad():
        x, y = data.make_test_batch(0, 40)
        logits = model.eval()(x).double()
    loss = torch.nn.functional.cross_entropy(logits, y)
    accuracy = (logits.argmax(1) == y).double().mean()
    assert found.loss == pytest.approx(float(loss), rel=1e-6)
    assert found.score == pytest.approx(float(accuracy), abs=1e-12)


def evaluated_by_all(
    strategy: Single,
    data: DeviceData,
    task: Classification,
    mesh: Mesh,
    monkeypatch: pytest.MonkeyPatch,
    batch: int,
    calls: list[int],
) -> tuple[EvaluationResult, list[int]]:
    """What the sums of all workers give, in batches of `batch`; how often each called the model."""
    monkeypatch.setattr(loop, "choose_evaluation_batch_size", lambda shape: batch)
    told, rounds = [], []
    monkeypatch.setattr(loop, "compute_test_loss_and_score", told.append)
    monkeypatch.setattr(dist, "all_reduce", lambda sums: None)
    for rank in range(mesh.num_workers):
        calls.clear()
        loop.evaluate_test_set(strategy, data, task, rank, mesh)
        rounds.append(len(calls))
    return compute_test_loss_and_score([sum(each) for each in zip(*told, strict=True)]), rounds


class LeavesOut(Classification):
    """Has no loss of the first test sample alone: its class is left out, and the mean is 0 / 0."""

    def __init__(self, first: int) -> None:
        self.first = first

    def loss(self, outputs, targets):
        return torch.nn.functional.cross_entropy(outputs, targets, ignore_index=self.first)


@pytest.mark.parametrize("mesh", [Mesh(3), Mesh(1, tensor=3), Mesh(1, stages=2)], ids=str)
def test_what_does_not_count_is_not_asked_for_its_loss(data, monkeypatch, mesh):
    """0 times a loss that is no number would be none, and so would be the loss of all workers."""
    strategy, _ = single(network())
    task = LeavesOut(int(data.make_test_batch(0, 1)[1]))
    found, _ = evaluated_by_all(strategy, data, task, mesh, monkeypatch, 40, [])
    with torch.no_grad():
        x, y = data.make_test_batch(0, 40)
        loss = task.loss(strategy.model.eval()(x).double(), y)
    assert found.loss == pytest.approx(float(loss), rel=1e-12)


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
            strategy.step(*data.make_training_batch(indices))
        weights.append([p.detach().clone() for p in strategy.parameters])
    assert all(torch.equal(a, b) for a, b in zip(*weights, strict=True))


@pytest.mark.slow
def test_what_happens_in_evaluation_is_in_no_figure_of_training(data, tmp_path, monkeypatch):
    """Neither its time (a clock that jumps by 1000 s) nor its memory (100 MiB)."""
    now_ns, jumps = time.perf_counter_ns, []
    monkeypatch.setattr(time, "perf_counter_ns", lambda: now_ns() + len(jumps) * 10**12)

    class Greedy(Single):
        @contextmanager
        def open_evaluation_model(self):
            with super().open_evaluation_model() as model:
                held = torch.ones(100 * 2**20 // 4)
                jumps.append(1)
                yield model
                del held

    s = settings("single", gpus=1, per_worker_batch=16, epochs=2)
    worker = Worker(s, 0, 1, 1, torch.device("cpu"), None, [])
    strategy = Greedy(Greedy.Options())
    strategy.setup(network(), worker)
    result = train(strategy, worker, data, tmp_path)
    assert len(jumps) == 3  # one of them in the warm-up
    assert result.clock.train_time_s < 1000
    if result.memory["method"] == "vmhwm":
        assert result.memory["peak_over_base_bytes"] < 50 * 2**20


class Noted(Single):
    """Two workers of which one is here: what synchronises them is only noted."""

    def batches(self, order, epoch):
        yield from order.view(4, 16)


def test_nothing_stands_between_the_barrier_and_the_clock(data, tmp_path, monkeypatch):
    """Tables, garbage collection and files come before it."""
    did: list[str] = []

    def note(owner, name: str, label: str) -> None:
        real = getattr(owner, name)
        monkeypatch.setattr(owner, name, lambda *a, **k: (did.append(label), real(*a, **k))[1])

    monkeypatch.setattr(dist, "barrier", lambda device_ids: None)
    monkeypatch.setattr(dist, "all_reduce", lambda value: None)
    s = settings("single", gpus=2, per_worker_batch=16, epochs=2)
    worker = Worker(s, 0, 2, 2, torch.device("cpu"), None, [])
    strategy = Noted(Noted.Options())
    strategy.setup(network(), worker)
    for owner, name, label in (
        (data, "draw_order_and_augmentation", "tables"), (loop.gc, "collect", "garbage"),
        (PhaseLog, "write_phase_event", "log"),
        (loop.EpochProgress, "append_epoch", "progress"), (dist, "barrier", "barrier"),
        (StepClock, "begin_epoch", "begin"), (StepClock, "end_epoch", "end"),
    ):  # fmt: skip
        note(owner, name, label)
    train(strategy, worker, data, tmp_path)
    text = " ".join(did)
    assert text.count("tables garbage log barrier begin end log") == 2
    assert text.count("barrier") == text.count("begin") == 2


@pytest.mark.parametrize("most", [1, 4, 5, 11])
def test_a_cell_of_so_many_steps_trains_no_other(data, tmp_path, most):
    """Also where they end within an epoch of 4."""
    s = settings("single", gpus=1, global_batch=16, per_worker_batch=16, steps=most, epochs=0)
    worker = Worker(s, 0, 1, 1, torch.device("cpu"), None, [])
    strategy = Noted(Noted.Options())
    strategy.setup(network(), worker)
    result = train(strategy, worker, data, tmp_path)
    assert strategy.steps == result.steps == most
    assert result.samples == 16 * most


def late_worker(rank: int, folder: str, tiny_data: str) -> None:
    """One of two processes; the second takes half a second longer before each epoch."""
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    torch.set_num_threads(1)
    store = dist.FileStore(f"{folder}/store", 2)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=2)
    data = DeviceData.load_prepared_data_set(tiny_data)
    ready_s, tables = [], data.draw_order_and_augmentation

    def late_tables(*arguments):
        time.sleep(LATE_S * rank)
        ready_s.append(time.perf_counter())
        return tables(*arguments)

    data.draw_order_and_augmentation = late_tables
    s = settings("ddp", epochs=2)
    worker = Worker(s, rank, 2, 2, torch.device("cpu"), None, [])
    strategy = DDP(DDP.Options())
    strategy.setup(network(), worker)
    own = Path(folder, str(rank))
    own.mkdir()
    starts_s = train(strategy, worker, data, own).clock.epoch_starts_s
    (own / "times.json").write_text(json.dumps([ready_s, starts_s]), encoding="utf-8")
    dist.barrier()
    os._exit(0)  # as a worker does: taking a group apart whose other end has gone may hang


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_a_late_worker_is_waited_for_before_the_clock_starts(tmp_path, tiny_data):
    context = forking()
    group = [
        context.Process(target=late_worker, args=(r, str(tmp_path), str(tiny_data)), daemon=True)
        for r in range(2)
    ]
    for process in group:
        process.start()
    for process in group:
        process.join(LIMIT_S)
    assert [p.exitcode for p in group] == [0, 0]
    (_, starts_s), (ready_s, _) = (
        json.loads((tmp_path / str(rank) / "times.json").read_text(encoding="utf-8"))
        for rank in range(2)
    )
    epochs = zip(starts_s, ready_s[-2:], strict=True)  # before them was the warm-up
    assert all(start > ready for start, ready in epochs)


def test_only_workers_on_one_node_have_a_common_clock():
    def worker(node: str, *starts_s: float) -> dict:
        return {"epoch_starts_s": list(starts_s), "provenance": {"host": {"name": node}}}

    a = [worker("a", 10.0, 20.0), worker("a", 10.002, 20.001)]
    b = [worker("b", 7.0, 17.0), worker("b", 7.001, 17.004)]
    assert assemble.compute_start_skew_ms(a) == pytest.approx([2.0, 1.0])
    assert assemble.compute_start_skew_ms(a + b) == pytest.approx([2.0, 4.0])
    assert assemble.compute_start_skew_ms([a[0], b[0]]) is None
    assert assemble.compute_start_skew_ms([]) is None


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
    assert result.progress.epoch_results[0]["test_loss"] is None
    assert result.progress.epoch_results[0]["train_loss"] is not None
    assert loop.EpochProgress(None).epoch_results == []


class Noting(Beside):
    """Has the clock stand after every so many steps, and notes when it was asked and told."""

    def __init__(self, every: int) -> None:
        self.every, self.asked, self.told = every, 0, []

    def restore_training_start(self, clock: StepClock, epochs: list[dict]) -> TrainingStart:
        self.clock = clock
        return TrainingStart()

    def find_next_clock_stop_step(self) -> int:
        self.asked += 1
        return (len(self.told) + 1) * self.every

    def act_after_step(self, step: int, losses: list[torch.Tensor]) -> None:
        assert not self.clock.is_running
        self.told.append((step, len(losses)))


def test_what_happens_beside_is_asked_between_stretches_alone(data, tmp_path):
    """Epochs have four steps; after the last of one the evaluation comes first, and after all nothing."""
    strategy, worker = single(network(), epochs=3)
    third, eighth = Noting(3), Noting(8)
    train(strategy, worker, data, tmp_path, lambda _: third, lambda _: eighth)
    assert third.told == [(3, 3), (6, 2), (9, 1)]
    assert eighth.told == [(8, 0)]
    never = Noting(100)
    train(*single(network(), epochs=3), data, tmp_path, lambda _: never)
    assert never.asked <= 2 * 3  # per epoch, not per step
