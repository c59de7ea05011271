"""A cell that keeps checkpoints goes on after it was ended, and trains what it would have trained."""

from __future__ import annotations

import errno
import os
import random
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from test_elastic_split import found_in
from test_saved_state import BATCH, CPU, STEPS, equal, network, settings_of

from launching import IN_OUR_LOOP, LaunchedCell, each_strategy, kill_all, settings, until
from stratbench.cell.coordinates import Cell
from stratbench.cell.run_folder import RunFolder
from stratbench.extensions.checkpoints import attempts, checkpoints
from stratbench.extensions.checkpoints.keeping import CheckpointWriter
from stratbench.strategies import get_strategy_class
from stratbench.strategies.base import Worker
from stratbench.telemetry.clock import Phases, StepClock
from stratbench.telemetry.memory import get_optimizer_state
from stratbench.telemetry.timeline import PhaseLog
from stratbench.train.job import Job
from stratbench.workload import users_code

pytestmark = pytest.mark.timeout(600)
ABLE = [name for name in IN_OUR_LOOP if get_strategy_class(name).begins_anew is None]


@pytest.fixture(scope="module")
def group(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    store = dist.FileStore(str(tmp_path_factory.mktemp("group") / "store"), 1)
    dist.init_process_group("gloo", store=store, rank=0, world_size=1)
    yield
    dist.destroy_process_group()


def made(name: str, precision: str) -> Any:
    """A strategy that is set up, with one worker."""
    s = replace(settings_of(name, precision), schedule="cosine", max_grad_norm=0.5)
    strategy = get_strategy_class(name)(get_strategy_class(name).Options(**s.options))
    model = network(precision)
    worker = Worker(s, 0, 1, 1, CPU, RunFolder(Path()), [("linear", [model[4]])], total_steps=STEPS)
    strategy.setup(model, worker)
    return strategy


def held(strategy: Any) -> list[Any]:
    """All that tells two trainings apart."""
    report = strategy.report()
    tensors = [t.clone() for t in strategy.list_training_state_tensors()]
    return [*tensors, report["updates_applied"], report["details"]["skipped_steps"]]


@pytest.mark.usefixtures("group")
@pytest.mark.parametrize("precision", ["fp64", "fp16"])
@pytest.mark.parametrize("name", each_strategy(ABLE))
def test_a_checkpoint_holds_all_that_the_next_steps_depend_on(
    name: str, precision: str, tmp_path: Path
) -> None:
    if precision == "fp16" and name in ("local-sgd", "diloco", "gossip"):
        pytest.skip("which it refuses")
    generator = torch.Generator().manual_seed(1)
    x = torch.randn(STEPS * BATCH, 1, 6, 6, generator=generator)
    x, y = x.to(torch.float64 if precision == "fp64" else torch.float32), torch.arange(len(x)) % 3
    whole, first, second = (made(name, precision) for _ in range(3))
    batches = list(whole.batches(torch.arange(len(x)), 0))
    for i in batches:
        whole.step(x[i], y[i])
    for i in batches[:3]:
        first.step(x[i], y[i])
    checkpoints.write_checkpoint(
        tmp_path, 3, first.list_training_state_tensors(), {"counts": first.export_step_counts()}
    )
    second.step(3 * x[:BATCH], y[:BATCH])  # whatever it held is written over
    second.reset()
    checkpoints.read_checkpoint_into_tensors(tmp_path, 3, second.list_training_state_tensors())
    second.load_step_counts(checkpoints.read_checkpoint_metadata(tmp_path, 3)["counts"])
    for i in batches[3:]:
        second.step(x[i], y[i])
    assert equal(held(second), held(whole))
    for strategy in (whole, first, second):
        strategy.close()


@pytest.mark.usefixtures("group")
@pytest.mark.parametrize("forgotten", ["counts", "momentum", "buffers"])
def test_that_test_sees_what_is_forgotten(forgotten: str, tmp_path: Path) -> None:
    whole, first, second = (made("ddp", "fp64") for _ in range(3))
    x, y = torch.randn(BATCH, 1, 6, 6, dtype=torch.float64), torch.arange(BATCH) % 3
    for _ in range(STEPS):
        whole.step(x, y)
    for _ in range(3):
        first.step(x, y)
    tensors = second.list_training_state_tensors()
    state = get_optimizer_state(second.optimizer).values()
    lost = {
        "counts": [],
        "momentum": [t for entry in state for t in entry.values()],
        "buffers": list(second.model.buffers()),
    }[forgotten]
    before = [t.clone() for t in lost]
    for mine, other in zip(tensors, first.list_training_state_tensors(), strict=True):
        mine.copy_(other)
    for t, old in zip(lost, before, strict=True):
        t.detach().copy_(old)
    if forgotten != "counts":
        second.load_step_counts(first.export_step_counts())
    for _ in range(STEPS - 3):
        second.step(x, y)
    assert not equal(held(second), held(whole))


def test_a_clock_goes_on_with_an_epoch() -> None:
    one = StepClock(CPU)
    one.begin_epoch()
    one.mark_step_end()
    one.end_epoch()
    history = one.export_measured_times()
    one.begin_epoch()
    one.end_epoch()
    other = StepClock(CPU)
    other.load_measured_times(history)
    other.begin_epoch(continues_epoch=True)
    other.mark_step_end()
    other.end_epoch()
    assert len(other.step_ms) == 2
    assert len(other.epoch_times_s) == len(other.epoch_starts_s) == 1
    assert other.epoch_times_s[0] > history["epoch_times_s"][0]
    assert len(history["epoch_times_s"]) == 1  # a copy, whatever the clock did then


# ---------------------------------------------------------------- attempts


def job_in(folder: Path, **changes: Any) -> Job:
    s = settings("ddp", more=EXACT["more"], **changes)
    run = RunFolder(folder / "run")
    run.path.mkdir(parents=True, exist_ok=True)
    return Job(
        cell=Cell("s", "e", "ddp", s.model, "tiny", 2, 0), settings=s, data_dir=folder, data={"sha256": "0"},
        folder=run, workers_per_node=2, use_cuda=False, threads=1, origin_unix_s=0.0, origin_s=0.0,
        time_limit_s=None,
    )  # fmt: skip


def keep(job: Job, rank: int, *steps: int) -> None:
    folder = attempts.get_checkpoint_folder(job.folder, rank)
    for step in steps:
        checkpoints.write_checkpoint(folder, step, [torch.zeros(1)])


def test_an_attempt_goes_on_from_the_newest_checkpoint_that_all_have(tmp_path: Path) -> None:
    job = attempts.make_next_attempt_job(job_in(tmp_path), None)
    assert job.earlier_attempts == ()
    begun = job.earlier_attempts or attempts.find_last_write_unix_s(job.folder)
    assert begun is None  # nothing was written to the run folder yet
    keep(job, 0, 3, 6, 9)
    keep(job, 1, 3, 6)
    attempts.delete_checkpoints_before_common_step(job.folder, 0, 2)
    assert checkpoints.list_checkpoint_steps(attempts.get_checkpoint_folder(job.folder, 0)) == {
        6,
        9,
    }
    left = attempts.get_checkpoint_folder(job.folder, 1) / ".0123456789abcdef.checkpoint-9.bin"
    left.write_bytes(b"half of it")
    job.folder.get_log_path("rank0").write_text("alive")
    ended_s = attempts.find_last_write_unix_s(job.folder)
    again = attempts.make_next_attempt_job(job_in(tmp_path), ended_s)
    assert again.earlier_attempts[-1]["next_step"] == 6
    # Two attempts of a GPU's may differ in the last bits: all go on with one's.
    folders = [attempts.get_checkpoint_folder(job.folder, rank) for rank in (0, 1)]
    assert list(map(checkpoints.list_checkpoint_steps, folders)) == [{6}, {3, 6}]
    assert not left.exists()
    assert again.earlier_attempts[0]["ran_s"] >= again.earlier_attempts[0]["repeated_s"] >= 0
    third = attempts.make_next_attempt_job(job_in(tmp_path), ended_s)
    assert len(third.earlier_attempts) == 2


@pytest.mark.parametrize("change", [{"lr": 0.5}, {"seed": 8}])
def test_nobody_goes_on_with_another_training(change: dict[str, Any], tmp_path: Path) -> None:
    job = attempts.make_next_attempt_job(job_in(tmp_path), None)
    keep(job, 0, 3)
    keep(job, 1, 3)
    job.folder.get_log_path("rank0").write_text("alive")
    other = attempts.make_next_attempt_job(
        job_in(tmp_path, **change), attempts.find_last_write_unix_s(job.folder)
    )
    assert other.earlier_attempts == ()
    assert attempts.find_newest_common_checkpoint_step(job.folder, 2) is None


# ---------------------------------------------------------------- real processes


#: fp64, with all that an update may have: momentum, decay, a schedule, clipping.
EXACT: dict[str, Any] = {
    "precision": "fp64", "momentum": 0.9, "weight_decay": 1e-3, "nesterov": True, "schedule": "cosine",
    "max_grad_norm": 0.5, "lr": 0.05, "global_batch": 16, "warmup_steps": 1, "epochs": 8,
    "more": {"checkpoints": {"checkpoint_every": 3}},
}  # fmt: skip


#: While there is a file, each process stays in a step behind the first ones, as many as stand in it.
STAYS = """
import time
from pathlib import Path

from torch import nn

STAY = Path(__file__).with_name("stay")

class Block(nn.Sequential):
    pass

class Net(nn.Module):
    def __init__(self, classes):
        super().__init__()
        self.block = Block(nn.Conv2d(1, 5, 3), nn.BatchNorm2d(5), nn.ReLU(), nn.AdaptiveAvgPool2d(2))
        self.head, self.steps = nn.Linear(20, classes), 0

    def forward(self, x):
        self.steps += self.training
        while self.training and STAY.exists() and self.steps > int(STAY.read_text()):
            time.sleep(0.01)
        return self.head(self.block(x).flatten(1))
"""


def losses(launched: LaunchedCell) -> list[float]:
    """The training and test losses of the epochs, which tell the weights."""
    epochs = launched.read_record()["score"]["per_epoch"]
    return [entry[name] for entry in epochs for name in ("train_loss", "test_loss")]


def find_checkpoint(launched: LaunchedCell) -> int:
    """The steps of the newest checkpoint that both workers have."""
    return attempts.find_newest_common_checkpoint_step(launched.folder, 2) or 0


@pytest.mark.slow
@pytest.mark.parametrize("strategy", ["ddp", "fsdp"])
def test_a_cell_killed_at_random_trains_what_it_would_have(
    strategy: str,
    start_cell: Callable[..., LaunchedCell],
    warm: dict[str, str],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """All processes at once, as where a node is lost; or the launcher, and its workers by their server."""
    (tmp_path / "staying.py").write_text(STAYS)
    monkeypatch.setenv(users_code.CODE_VARIABLE, str(tmp_path))
    spec = {"call": "staying.Net", "kwargs": {}, "wrap_classes": ["Block"]}
    spec |= users_code.compute_code_fingerprint(spec["call"], [tmp_path])
    s, chance = settings(strategy, model="net", own_model=spec, **EXACT), random.Random(3)
    shared, at, stay = warm | {users_code.CODE_VARIABLE: str(tmp_path)}, 0, tmp_path / "stay"
    for begun in range(2):
        stay.write_text(str(chance.randint(6, 12)))
        launched = start_cell(s, env=os.environ if (strategy, begun) == ("ddp", 0) else shared)
        until(lambda: launched.process.poll() is not None or find_checkpoint(launched) > at)  # noqa: B023
        assert launched.process.poll() is None, launched.process.communicate()[0]
        kill_all(launched.process)
        at = find_checkpoint(launched)
    stay.unlink()
    launched = start_cell(s, env=shared)
    code, output = launched.finish()
    assert code == 0, output
    record, found = launched.read_record(), losses(launched)
    assert record["restarts"]["count"] == 2
    assert record["restarts"]["from_steps"][1] >= record["restarts"]["from_steps"][0] > 0
    assert record["batch"]["updates_applied"] == EXACT["epochs"] * 4
    assert not launched.folder.saved_state_dir.exists()
    assert found_in(record) == {"keeps-checkpoints"}
    undisturbed = start_cell(replace(s, more={}), env=shared)
    assert undisturbed.finish()[0] == 0
    assert "restarts" not in undisturbed.read_record()
    assert found == pytest.approx(losses(undisturbed), rel=1e-12)


def test_a_checkpoint_that_cannot_be_written_is_an_error_whatever_the_reason(
    tmp_path: Path,
) -> None:
    writer = checkpoints.AsyncCheckpointWriter(tmp_path)
    writer.start_checkpoint_write_unless_busy(3, [torch.zeros(1)], metadata={"counts": {1, 2}})
    with pytest.raises(TypeError, match="set is not JSON serializable"):
        writer.wait_for_checkpoint_write()


@pytest.mark.parametrize("part", ["tensors", "facts"])
def test_a_damaged_checkpoint_is_deleted_so_that_the_next_attempt_takes_the_one_before(
    tmp_path: Path, part: str
) -> None:
    strategy = made("single", "fp64")
    strategy.worker = replace(
        strategy.worker, settings=settings("single", more={"checkpoints": {"checkpoint_every": 2}})
    )
    strategy.worker.folder = RunFolder(tmp_path / "run")
    clock, log = StepClock(CPU), mock.create_autospec(PhaseLog)
    phases = Phases(CPU, log)

    def keeper_after(*before: dict[str, int]) -> CheckpointWriter:
        job = SimpleNamespace(earlier_attempts=before)
        return CheckpointWriter(job, strategy, None, strategy.worker, phases)

    keeper = keeper_after()
    keeper.restore_training_start(clock, [])
    folder = attempts.get_checkpoint_folder(strategy.worker.folder, 0)
    for step in (2, 4):
        clock.begin_epoch()
        clock.mark_step_end()
        clock.mark_step_end()
        clock.end_epoch()
        keeper.act_after_step(step, [])
    assert keeper.end("ok", reports_for_all=True)["checkpoints"]["count"] == 2
    assert checkpoints.list_checkpoint_steps(folder) == {4}
    path = checkpoints.get_checkpoint_path(folder, 4)
    held = path.read_bytes()
    if part == "tensors":
        held = held[:-1] + bytes([held[-1] ^ 1])
    else:
        held = held.replace(b'"count": 2', b'"count": 3', 1)
    assert held != path.read_bytes()
    path.write_bytes(held)
    with pytest.raises(checkpoints.DamagedCheckpoint, match="changed after"):
        keeper_after({"next_step": 4}).restore_training_start(clock, [])
    assert checkpoints.list_checkpoint_steps(folder) == set()


def test_a_device_that_went_on_after_its_group_broke_leaves_no_checkpoint(tmp_path: Path) -> None:
    counts = [True, False]
    writer = checkpoints.AsyncCheckpointWriter(tmp_path, counts=lambda: counts.pop(0))
    for step in (2, 4):
        event = mock.Mock()
        writer._write_copies_to_disk(step, event, [torch.zeros(1)], None)
        event.synchronize.assert_called_once()
    assert checkpoints.list_checkpoint_steps(tmp_path) == {2}


def test_what_a_killed_writer_left_goes_with_the_last_checkpoint(tmp_path: Path) -> None:
    half, other = tmp_path / ".0123456789abcdef.checkpoint-4.bin", tmp_path / "other.bin"
    for path in (half, other, tmp_path / "checkpoint-2.bin"):
        path.write_bytes(b"0")
    checkpoints.delete_checkpoints(tmp_path, before_step=9)
    assert {p.name for p in tmp_path.iterdir()} == {half.name, other.name}  # it may be under way
    checkpoints.delete_checkpoints(tmp_path)
    assert list(tmp_path.iterdir()) == [other]


def test_a_checkpoint_that_the_disk_does_not_keep_is_none(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    checkpoints.write_checkpoint(tmp_path, 3, [torch.zeros(1)])

    def fail(_descriptor: int) -> None:
        raise OSError(errno.EIO, "Input/output error")

    monkeypatch.setattr(checkpoints.os, "fsync", fail)
    writer = checkpoints.AsyncCheckpointWriter(
        tmp_path, lambda folder, step: checkpoints.delete_checkpoints(folder, step)
    )
    writer.start_checkpoint_write_unless_busy(6, [torch.zeros(1)])
    with pytest.raises(OSError, match="Input/output error"):
        writer.wait_for_checkpoint_write()
    assert checkpoints.list_checkpoint_steps(tmp_path) == {3}
