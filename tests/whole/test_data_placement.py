"""Data in host memory: bit for bit the batches and the training of data on the device."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace
from typing import ClassVar
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from process_groups import forking

from launching import each_strategy, settings, until
from stratbench.cell.run_folder import RunFolder
from stratbench.extensions.plan.footprint.request import compute_batch_buffer_bytes
from stratbench.extensions.plan.needs import compute_data_bytes_on_device
from stratbench.extensions.servers.ps.tickets import Ticket
from stratbench.extensions.servers.strategy import ParameterServer
from stratbench.extensions.splitting.pipeline import Pipeline
from stratbench.strategies import REGISTRY, get_strategy_class
from stratbench.strategies.base import Worker
from stratbench.strategies.needs import iter_missing_requirements
from stratbench.telemetry.clock import Phases, StepClock
from stratbench.telemetry.memory import MemoryMeter
from stratbench.telemetry.timeline import PhaseLog
from stratbench.train import loop
from stratbench.workload.data import placement
from stratbench.workload.data.datasets import make_dataset_metadata
from stratbench.workload.data.device_data import DeviceData
from stratbench.workload.data.placement import HostRows
from stratbench.workload.data.prepare import prepare_data_set

pytestmark = pytest.mark.timeout(300)

CPU = torch.device("cpu")
#: Of those that take any network.
COLLECTIVES = [
    name
    for name in REGISTRY
    if (cls := get_strategy_class(name)).kind == "collective" and not issubclass(cls, Pipeline)
]
TEXT = {"source": "markov-text", "train_samples": 64, "test_samples": 16, "sequence": 8,
        "vocabulary": 300}  # fmt: skip


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Images that are augmented and enlarged, and a text of more than 256 tokens."""
    at = tmp_path_factory.mktemp("data")
    prepare_data_set("digits", at / "digits")
    prepare_data_set("chain", at / "chain", spec=TEXT)
    return {"images": at / "digits", "text": at / "chain"}


def loaded(folder: Path, where: str) -> DeviceData:
    shape = (1, 16, 16) if folder.name == "digits" else None
    return DeviceData.load_prepared_data_set(folder, CPU, shape, data_placement=where)


@pytest.mark.parametrize("kind", ["images", "text"])
def test_every_batch_is_the_same_whatever_was_expected(folders, kind):
    on_device, in_host = (loaded(folders[kind], where) for where in ("device", "host"))
    assert not on_device.fetches_next_batch_early
    rng = torch.Generator().manual_seed(0)
    for epoch in range(2):
        order, drawn = on_device.draw_order_and_augmentation(0, epoch, augment=True).to_device(CPU)
        steps = order[:64].view(8, 8)
        for i, indices in enumerate(steps):
            expected = on_device.make_training_batch(indices, drawn)
            found = in_host.make_training_batch(indices, drawn)
            guess = int(torch.randint(8, (), generator=rng))
            if guess < 6:  # mostly right, and now and then wrong or missing
                in_host.prefetch(steps[(i + 1) % 8 if guess < 4 else guess], drawn)
            for a, b in zip(expected, found, strict=True):
                assert torch.equal(a, b)
                assert a.dtype == b.dtype
    for a, b in zip(
        on_device.make_test_batch(3, 900), in_host.make_test_batch(3, 900), strict=True
    ):
        assert torch.equal(a, b)
    # The same samples, augmented by other tables than was expected.
    _, before = in_host.draw_order_and_augmentation(0, 0, augment=True).to_device(CPU)
    in_host.prefetch(steps[0], before)
    assert torch.equal(
        on_device.make_training_batch(steps[0], drawn)[0],
        in_host.make_training_batch(steps[0], drawn)[0],
    )
    # Batches of another size, as the warm-up and the last of a test set have them.
    assert torch.equal(
        on_device.make_training_batch(order[:3])[0], in_host.make_training_batch(order[:3])[0]
    )


def losses_of(name: str, folder: Path, where: str, path: Path, rank: int) -> list[float]:
    """The loss of every step of two epochs of a worker, the only one or one of two."""
    workers = 1 if get_strategy_class(name).max_workers == 1 else 2
    s = settings(name, gpus=workers, epochs=2, global_batch=128, per_worker_batch=128 // workers,
                 augment=True, warmup_steps=1, data_placement=where)  # fmt: skip
    data = loaded(folder, where)
    torch.manual_seed(0)
    model = torch.nn.Sequential(
        torch.nn.Flatten(), torch.nn.Linear(256, 8), torch.nn.ReLU(), torch.nn.Linear(8, 10)
    )
    strategy = get_strategy_class(name)(get_strategy_class(name).Options(**s.options))
    steps = s.epochs * (data.train_samples // s.global_batch)
    run = RunFolder(path)
    worker = Worker(s, rank, workers, workers, CPU, run, [("0", [model[1]])], total_steps=steps)
    strategy.setup(model, worker)
    found: list[torch.Tensor] = []
    step = strategy.step

    def noted(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        found.append(step(x, y))
        return found[-1]

    strategy.step = noted
    log = PhaseLog(run.get_phase_log_path(rank), rank, 0.0)
    loop.train(
        strategy, data, worker, Phases(CPU, log), log, MemoryMeter(CPU), loop.EpochProgress(None)
    )
    return torch.stack(found).tolist()


def train_all(rank: int, folder: Path, out: Path) -> None:
    """What each process runs: every collective strategy, with the data on the device and in host memory."""
    torch.set_num_threads(1)
    dist.init_process_group(
        "gloo", store=dist.FileStore(str(out / "store"), 2), rank=rank, world_size=2
    )
    found = {}
    for name in COLLECTIVES:
        cls = get_strategy_class(name)
        if (rank == 0 or cls.max_workers != 1) and not any(
            iter_missing_requirements([(name, cls, {})])
        ):
            found[name] = [losses_of(name, folder, at, out, rank) for at in ("device", "host")]
    (out / f"{rank}.json").write_text(json.dumps(found))
    dist.barrier()
    dist.destroy_process_group()


@pytest.fixture(scope="module")
def trained(folders, tmp_path_factory) -> list[dict[str, list[list[float]]]]:
    """The losses that both processes wrote: by strategy, of each data_placement."""
    out = tmp_path_factory.mktemp("trained")
    context = forking()
    workers = [
        context.Process(target=train_all, args=(rank, folders["images"], out), daemon=True)
        for rank in range(2)
    ]
    for process in workers:
        process.start()
    for process in workers:
        process.join(300)
        assert process.exitcode == 0
    return [json.loads((out / f"{rank}.json").read_text()) for rank in range(2)]


@pytest.mark.slow
@pytest.mark.parametrize("name", each_strategy(COLLECTIVES))
def test_collectives_train_the_same_bit_for_bit(trained, name):
    for found in trained:
        if name in found:
            on_device, in_host = found[name]
            assert len(on_device) == 2 * 11 + 1  # with the warm-up's
            assert on_device == in_host
            assert in_host[-1] < in_host[0]


@pytest.mark.slow
def test_servers_train_the_same_bit_for_bit(folders, start_cell, warm):
    """Real servers and workers; and the record says how many batches were buffered."""
    records = []
    for where in ("device", "host"):
        s = settings("ps-sync", augment=True, data_placement=where, model="vgg-compact", epochs=2,
                     global_batch=128, per_worker_batch=64, dataset="digits",
                     data_spec=None)  # fmt: skip
        cell = start_cell(s, data_dir=folders["images"], env=warm)
        cell.finish_with(0)
        records.append(cell.read_record())
    first, second = ([{k: e[k] for k in ("test_loss", "score")} for e in r["score"]["per_epoch"]]
                     for r in records)  # fmt: skip
    assert first == second
    assert "data" in records[1]["time"]["breakdown_ms"]
    assert "buffered_batches" not in records[0]["data"]
    assert records[1]["data"]["buffered_batches"] == 2


def test_the_likely_ticket_is_the_same_slice_of_the_next_step():
    strategy = mock.Mock(spec=ParameterServer)
    strategy.worker = SimpleNamespace(
        settings=settings("ps-sync", epochs=2, global_batch=16, per_worker_batch=8), total_steps=6
    )
    cls = get_strategy_class("ps-sync")
    strategy.samples_per_step = cls.samples_per_step
    strategy._get_sample_slice = lambda step, part: cls._get_sample_slice(strategy, step, part)
    found = []
    for epoch, step in ((0, 0), (0, 2), (1, 2)):
        strategy.ticket = mock.Mock(spec=Ticket, epoch=epoch, step=step, slice=1)
        found.append(cls.predict_next_ticket(strategy, 50))
    assert found == [(0, slice(24, 32)), (1, slice(8, 16)), None]


def test_a_batch_is_gathered_while_the_one_before_is_trained_on(folders, monkeypatch):
    """A step ends when its next batch is there."""
    data = loaded(folders["images"], "host")
    gather, gathered = torch.index_select, []

    def noted(*args, **kwargs):
        found = gather(*args, **kwargs)
        gathered.append(found)
        return found

    def step(x, y):
        steps.append(x)
        batches = min(len(steps) + 1, 5)
        until(lambda: len(gathered) == 2 * batches)  # inputs and targets
        return x.sum()

    steps = []
    monkeypatch.setattr(torch, "index_select", noted)
    order = torch.arange(40).view(5, 8)
    loop.run_timed_steps(SimpleNamespace(step=step), data, StepClock(CPU), order)
    assert len(steps) == 5


def test_an_error_of_the_thread_is_the_workers_error(folders):
    data = loaded(folders["images"], "host")
    with pytest.raises(IndexError):
        data.make_training_batch(torch.tensor([10**9]))


class Recorded:
    """Stands for CUDA's streams and events: notes who waits for what, and never computes."""

    log: ClassVar[list[tuple[str, ...]]] = []

    def __init__(self, name: str = "event") -> None:
        self.name = name

    def record(self, stream: Recorded) -> None:
        self.log.append(("record", stream.name))

    def wait_event(self, event: Recorded) -> None:
        assert isinstance(event, Recorded)
        self.log.append(("wait", self.name))

    def synchronize(self) -> None:
        self.log.append(("host waits", self.name))

    def __enter__(self) -> None: ...

    def __exit__(self, *args: object) -> None: ...


def test_on_cuda_copies_wait_for_the_step_and_the_step_for_the_copy(monkeypatch):
    """The calls on a stand-in: no GPU takes part, so that only their order is held."""
    monkeypatch.setattr(Recorded, "log", [])
    cuda = SimpleNamespace(
        Stream=lambda device: Recorded("copies"), Event=Recorded, stream=lambda s: s,
        current_stream=lambda device: Recorded("current"),
        synchronize=lambda device: Recorded.log.append(("host waits", "device")),
    )  # fmt: skip
    empty, empty_like = torch.empty, torch.empty_like
    monkeypatch.setattr(torch, "cuda", cuda)
    monkeypatch.setattr(torch, "empty", lambda shape, dtype, pin_memory: empty(shape, dtype=dtype))
    monkeypatch.setattr(torch, "empty_like", lambda t, device: empty_like(t))
    rows = HostRows(torch.arange(40.0).view(20, 2), torch.arange(20), torch.device("cuda"))
    for i in range(4):
        x, y, _ = rows.take_fetched_batch(torch.tensor([i, i + 1]), None)
        assert y.tolist() == [i, i + 1]
        assert x[:, 1].tolist() == [2 * i + 1, 2 * i + 3]
        assert x.data_ptr() != rows._slots[0].staged[0].data_ptr()
        rows.begin_fetching_batch(torch.tensor([i + 1, i + 2]), None)
    rows._start_thread.shutdown()
    one_fetch = [("record", "current"), ("wait", "copies"), ("record", "copies")]
    again = [one_fetch[0], ("host waits", "event"), *one_fetch[1:]]
    taken = ("wait", "current")
    room = ("host waits", "device")
    log = sorted(Recorded.log)
    # Each slot is made once; only the thread waits on the host, and for events alone.
    assert log == sorted([room, *one_fetch, room, *one_fetch, *again * 3, *[taken] * 4])


def test_the_plan_counts_two_batches_and_names_the_remedy():
    data = make_dataset_metadata("cifar10")
    sample = 3 * 32 * 32 + 8
    assert (
        compute_batch_buffer_bytes(data, 64, augment=False)
        == placement.BUFFERED_BATCHES * 64 * sample
    )
    assert compute_batch_buffer_bytes(data, 64, augment=True) == 2 * 64 * (sample + 24)
    assert (
        compute_batch_buffer_bytes(make_dataset_metadata("chain", TEXT), 4, augment=False)
        == 2 * 4 * 2 * 8 * 4
    )

    def subject(where: str, on_cuda: bool) -> SimpleNamespace:
        s = settings("single", gpus=1, data_placement=where, model="vgg16")
        request = SimpleNamespace(is_on_cuda=on_cuda, input_shape=data.shape)
        return SimpleNamespace(settings=s, data=data, samples_per_step=64, request=request)

    whole = compute_data_bytes_on_device(subject("device", True))
    assert whole > 60_000 * 3 * 32 * 32
    assert compute_data_bytes_on_device(subject("host", True)) == 2 * 64 * sample
    # On a CPU what is mapped becomes resident.
    assert compute_data_bytes_on_device(subject("host", False)) == whole
