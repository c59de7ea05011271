"""Split synchronous training by real processes: whoever comes and goes, the arithmetic is one worker's."""

from __future__ import annotations

import contextlib
import json
import os
import random
import signal
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any
from unittest import mock

import pandas as pd
import pytest
import torch
from process_groups import forking

import invariants
from launching import FOREVER, LIMIT_S, OF_THE_MACHINE, LaunchedCell, settings, until
from stratbench.analysis.records.columns import COLUMNS, build_row_from_record
from stratbench.cell import record
from stratbench.cell.run_folder import RunFolder
from stratbench.extensions.audit.audit import RULES
from stratbench.extensions.audit.rule import AuditData
from stratbench.extensions.checkpoints import checkpoints
from stratbench.extensions.elastic.group import ElasticGroup
from stratbench.extensions.elastic.member import CoordinatorLost, WorkerNotNeeded
from stratbench.extensions.elastic.run_files import RunFiles
from stratbench.extensions.elastic.split import ElasticSynchronous
from stratbench.strategies.ddp import DDP
from stratbench.telemetry.clock import Phases
from stratbench.telemetry.memory import MemoryMeter
from stratbench.telemetry.timeline import PhaseLog
from stratbench.train import loop
from stratbench.train.worker import set_up_model
from stratbench.workload.data.device_data import DeviceData

CPU = torch.device("cpu")
pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]


def jobs(launched: LaunchedCell) -> dict[int, dict[str, Any]]:
    """The worker jobs by number, each as it was last seen."""
    with contextlib.suppress(FileNotFoundError):
        lines = RunFiles(launched.folder).worker_jobs_path.read_text().split("\n")[:-1]
        return {entry["number"]: entry for entry in map(json.loads, lines)}
    return {}


def inside(launched: LaunchedCell) -> list[int]:
    """The numbers of the workers that run and have trained."""
    alive = [n for n, entry in jobs(launched).items() if entry["ended_unix_s"] is None]
    phases = {n: launched.folder.get_phase_log_path(n) for n in alive}
    return [n for n, path in phases.items() if path.exists() and '"join"' in path.read_text()]


def losses(launched: LaunchedCell) -> list[float]:
    """The test losses after each epoch, which tell the weights."""
    return [entry["test_loss"] for entry in launched.read_record()["score"]["per_epoch"]]


def found_in(record_: dict[str, Any]) -> set[str]:
    """The rules of the audit that find something in a record by itself."""
    row = record_["cell"] | build_row_from_record(record_, Path("no timeline"))
    evidence = AuditData(pd.DataFrame([row], columns=list(COLUMNS)), [record_])
    return {rule.id for rule in RULES if any(rule.check(evidence))} - OF_THE_MACHINE


#: fp64, with all that an update may have: momentum, decay, a schedule, clipping; slow enough to be disturbed.
EXACT: dict[str, Any] = {
    "precision": "fp64", "momentum": 0.9, "weight_decay": 1e-3, "nesterov": True, "schedule": "cosine",
    "max_grad_norm": 0.5, "lr": 0.02, "global_batch": 15, "warmup_steps": 1, "epochs": 25,
}  # fmt: skip


def disturb(launched: LaunchedCell, changes: int, seed: int) -> list[str]:
    """Have workers leave by SIGTERM and be lost by SIGKILL, each time that a new one has come.

    At first whoever is there; then one of three, so that two of them share a batch that is odd.
    """
    chance, done = random.Random(seed), []
    known, chosen = set(), set()

    def new() -> list[int] | None:
        assert launched.process.poll() is None, launched.process.communicate()[0]
        now = [n for n in inside(launched) if n not in chosen]
        enough = len(now) >= (1 if len(done) < 2 else 3)
        return now if enough and set(now) - known else None

    while len(done) < changes:
        now = until(new)
        known.update(now)
        number = chance.choice(now)
        chosen.add(number)
        how = chance.choice((signal.SIGTERM, signal.SIGKILL))
        with contextlib.suppress(ProcessLookupError):
            os.kill(int(jobs(launched)[number]["id"]), how)
            done.append(f"{how.name} to worker {number} of {now}")
    return done


def test_any_history_of_joins_and_leaves_gives_the_weights_of_one_process(
    start_cell: Callable[..., LaunchedCell], warm: dict[str, str]
) -> None:
    alone = start_cell(settings("single", gpus=1, per_worker_batch=15, **EXACT), env=warm)
    assert alone.finish()[0] == 0
    slow = {"workers": [0, 1, 2], "factor": 8}
    s = settings(
        "ddp",
        gpus=3,
        per_worker_batch=5,
        more={"elastic": {"elastic": True}},
        slowdown=slow,
        **EXACT,
    )
    launched = start_cell(s, env=warm)
    seed = random.randrange(1 << 30)
    print("seed:", seed)
    history = disturb(launched, changes=5, seed=seed)
    code, output = launched.finish()
    assert code == 0, output
    found = launched.read_record()
    assert losses(launched) == pytest.approx(losses(alone), rel=1e-12), history
    told = found["elastic"]
    assert told["joins"] >= 3 + 1
    assert any(
        len(g["members"]) == 2 and g["to_step"] > g["from_step"] for g in told["generations"]
    )
    assert told["losses"] + told["leaves"] >= len(history)
    assert told["pauses"]["count"] >= 1
    record.validate_record(found)
    assert found_in(found) == set()
    for name, plant in PLANTED.items():
        copy = json.loads(json.dumps(found))
        plant(copy["elastic"], copy)
        assert invariants.broken(copy), name


class Heard:
    """A seat that keeps what its member says."""

    def __init__(self) -> None:
        self.said: list[dict[str, Any]] = []
        self.change = threading.Event()

    def send_message(self, what: str, **said: Any) -> None:
        self.said.append({"what": what} | said)

    def wait_for_message(self) -> dict[str, Any]:
        raise WorkerNotNeeded("the training is over")


def member(folder: Path, data_dir: Path, epochs: int = 1) -> tuple[ElasticSynchronous, Heard]:
    """A member of a cell, in this process, set up as its worker's process does it."""
    s = settings("ddp", precision="fp64", weight_decay=1e-3, epochs=epochs)
    phases = Phases("cpu", PhaseLog(RunFolder(folder).get_phase_log_path(0), 0, 0.0))
    group, data = (
        ElasticGroup(folder, CPU),
        DeviceData.load_prepared_data_set(data_dir, dtype=torch.float64),
    )
    group.form_single_member_group()
    strategy = DDP(DDP.Options(**s.options))
    me = set_up_model(
        s,
        strategy,
        data,
        CPU,
        0,
        rank=0,
        world_size=1,
        local_world_size=1,
        folder=RunFolder(folder),
    ).worker
    loop.warm_up(strategy, data, me)
    heard = Heard()
    return ElasticSynchronous(strategy, data, me, phases, group, heard, threading.Event(), 0), heard


def be_lost_while_meeting(folder: Path, data_dir: Path, rank: int) -> None:
    """Form a group of two, as the first rank give the weights, and be gone before all is sent."""
    split, _ = member(folder, data_dir)
    for tensor in split.strategy.list_training_state_tensors():
        tensor.fill_(7)
    split._group.form_group("once", rank, 2)
    if rank == 0:
        split.strategy.wrap(split.strategy.model, split.worker)
    os._exit(0)


@pytest.mark.parametrize("rank", [0, 1])
def test_a_meeting_that_fails_leaves_a_members_state_as_it_was(
    rank: int, tmp_path: Path, tiny_data: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Half of another state was received, or a checkpoint read: it would count as that after fewer steps."""
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "lo")
    split, heard = member(tmp_path, tiny_data)
    try:
        state = split.strategy.list_training_state_tensors()
        before = [t.clone() for t in state]
        checkpoints.write_checkpoint(tmp_path, 9, [torch.full_like(t, 5) for t in state])
        other = forking().Process(
            target=be_lost_while_meeting, args=(tmp_path, tiny_data, 1 - rank), daemon=True
        )
        other.start()
        form = {"generation": 1, "epochs_done": 0, "meeting": "once", "rank": rank, "world": 2}
        split._train_in_generation(form | {"step": 9, "load": rank == 0}, MemoryMeter(CPU))
        assert heard.said == [
            {
                "what": "stopped",
                "failed": True,
                "leaving": False,
                "holds": 0,
                "step": 0,
                "epochs": {},
            }
        ]
        assert all(map(torch.equal, state, before))
        other.join(LIMIT_S)
        assert other.exitcode == 0
    finally:
        split._group.leave_group()


def leave_groups_that_ddp_holds(folder: Path) -> None:
    """Form and leave groups of one, each of which a module of DDP outlives."""
    group = ElasticGroup(folder, CPU)
    for _ in range(300):
        group.form_single_member_group()
        module = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(8, 8))
        torch.distributed.broadcast(torch.zeros(4), 0)
        group.leave_group()
        del module
    os._exit(0)


def test_a_group_is_left_although_ddp_still_holds_it(tmp_path: Path) -> None:
    """PyTorch's reducer would wait for the group's threads, and one of these for the interpreter's lock."""
    other = forking().Process(target=leave_groups_that_ddp_holds, args=(tmp_path,), daemon=True)
    other.start()
    other.join(LIMIT_S)
    assert other.exitcode == 0


#: How a member is called that trains alone.
ALONE = {"generation": 0, "epochs_done": 0, "meeting": "a", "rank": 0, "world": 1, "step": 0}
ALONE |= {"load": False}


@pytest.fixture
def alone(
    tmp_path: Path, tiny_data: Path, monkeypatch: pytest.MonkeyPatch
) -> Iterator[tuple[ElasticSynchronous, Heard]]:
    """A member, of three epochs of 4 steps, that will train alone."""
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "lo")
    split, heard = member(tmp_path, tiny_data, epochs=3)
    yield split, heard
    split._group.leave_group()


def test_a_member_tells_what_an_epoch_gave_at_its_end(
    alone: tuple[ElasticSynchronous, Heard],
) -> None:
    """What it told at the end alone would be as long as the training, and be lost with it."""
    split, heard = alone
    with pytest.raises(WorkerNotNeeded):
        split._train_in_generation(ALONE, MemoryMeter(CPU))
    told = [(m["what"], {e: x[1] for e, x in m.get("epochs", {}).items()}) for m in heard.said]
    assert told == [
        *[("begun", {}), ("trained", {0: 4}), ("epoch", {}), ("trained", {1: 4}), ("epoch", {})],
        *[("epoch", {}), ("through", {2: 4})],
    ]


@pytest.mark.parametrize(("generation", "in_setup"), [(0, True), (1, False)])
def test_the_wait_for_a_later_generation_is_no_set_up(
    generation: int, in_setup: bool, alone: tuple[ElasticSynchronous, Heard]
) -> None:
    """Others train meanwhile: set-up and training time together would be longer than the cell."""
    split, _ = alone
    with pytest.raises(WorkerNotNeeded):
        split._train_in_generation(ALONE | {"generation": generation}, MemoryMeter(CPU))
    times = split._phases.compute_seconds_by_phase()
    assert ("rendezvous_s" in times, "regroup_s" in times) == (in_setup, not in_setup)


@pytest.mark.parametrize(("unheard_of", "step"), [("epoch", 4), ("trained", 4), ("through", 12)])
def test_a_member_whose_coordinator_is_gone_keeps_its_state_and_what_it_did(
    unheard_of: str,
    step: int,
    alone: tuple[ElasticSynchronous, Heard],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    split, heard = alone

    def say(what: str, **said: Any) -> None:
        if what == unheard_of:
            raise CoordinatorLost("the coordinator is gone")

    monkeypatch.setattr(heard, "send_message", say)
    monkeypatch.setattr(heard, "wait_for_message", lambda: {"what": "form"} | ALONE, raising=False)
    split.train_until_training_ends(MemoryMeter(CPU))
    folder = split.worker.folder
    assert max(checkpoints.list_checkpoint_steps(folder.path)) == step
    evaluated = checkpoints.read_checkpoint_metadata(folder.path, step)["epochs"]
    assert [e["epoch"] for e in evaluated] == list(range(1, step // 4 + (unheard_of != "trained")))
    told = RunFiles(folder).read_unreported_result(0)
    assert (told["step"], told["generation"]) == (step, 0)
    (_, steps, world, seconds) = told["epochs"].get(str(step // 4 - 1), [0, 4, 1, 1.0])
    assert (steps, world) == (4, 1)
    assert seconds > 0


def test_a_member_of_a_cell_that_has_ended_leaves_no_checkpoint_behind(
    alone: tuple[ElasticSynchronous, Heard], monkeypatch: pytest.MonkeyPatch
) -> None:
    split, heard = alone
    folder = split.worker.folder
    RunFiles(folder).end_marker_path.touch()
    gone = CoordinatorLost("the coordinator is gone")
    monkeypatch.setattr(heard, "send_message", mock.Mock(side_effect=[None, gone]))  # ready, begun
    monkeypatch.setattr(heard, "wait_for_message", lambda: {"what": "form"} | ALONE | {"step": 4})
    split.train_until_training_ends(MemoryMeter(CPU))
    assert split._step == 4
    assert not checkpoints.list_checkpoint_steps(folder.path)


def test_a_damaged_checkpoint_is_deleted_and_the_members_meet_again(
    alone: tuple[ElasticSynchronous, Heard],
) -> None:
    split, heard = alone
    folder, state = split.worker.folder.path, split.strategy.list_training_state_tensors()
    checkpoints.write_checkpoint(folder, 9, state)
    path = checkpoints.get_checkpoint_path(folder, 9)
    path.write_bytes(path.read_bytes()[:-1])
    for _ in range(2):  # then there is none
        split._train_in_generation(ALONE | {"step": 9, "load": True}, MemoryMeter(CPU))
        assert heard.said[-1]["failed"]
        assert not path.exists()


@pytest.mark.parametrize("on_a_device", [False, True])
def test_what_was_computed_in_a_group_that_was_broken_up_counts_for_nothing_on_a_device(
    on_a_device: bool, alone: tuple[ElasticSynchronous, Heard], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A collective that is aborted there ends without an error, and leaves anything."""
    split, heard = alone
    strategy = split.strategy
    if on_a_device:
        split._initial = strategy.save()
    before = [t.clone() for t in strategy.list_training_state_tensors()]
    step, taken = strategy.step, []

    def step_and_lose_a_peer(x: Any, y: Any) -> Any:
        taken.append(step(x, y))
        if len(taken) == 6:
            split._leave_requested.set()
            split._group.break_up_group()
        return taken[-1]

    monkeypatch.setattr(strategy, "step", step_and_lose_a_peer)
    split._train_in_generation(ALONE, MemoryMeter(CPU))
    told = heard.said[-1]
    assert (told["what"], told["failed"]) == ("stopped", True)
    assert told["step"] == 6
    assert told["epochs"][1][1] == (0 if on_a_device else 2)
    assert told["holds"] == (0 if on_a_device else 6)
    assert all(map(torch.equal, strategy.list_training_state_tensors(), before)) == on_a_device
    # Who leaves then may be the last: others were lost.
    assert checkpoints.list_checkpoint_steps(split.worker.folder.path) == (
        set() if on_a_device else {6}
    )


def longest(told: dict[str, Any]) -> dict[str, Any]:
    """The generation that took most steps."""
    return max(told["generations"], key=lambda g: (g["to_step"] or 0) - g["from_step"])


#: Faults that break an invariant of a record: of the block `elastic`, and of the whole.
PLANTED: dict[str, Callable[[dict[str, Any], dict[str, Any]], Any]] = {
    "a job that trained has gone": lambda e, r: e["jobs"].remove(
        next(j for j in e["jobs"] if j["first_step_s"] is not None)
    ),
    "a pause is left out": lambda e, r: e["pauses"].update(count=e["pauses"]["count"] - 1),
    "pauses are half as long": lambda e, r: e["pauses"].update(total_s=e["pauses"]["total_s"] / 2),
    "GPUs were held for less": lambda e, r: e.update(allocated_s=e["allocated_s"] / 2),
    "nobody was idle": lambda e, r: e.update(idle_s=0.0),
    "steps are missing": lambda e, r: longest(e).update(from_step=longest(e)["from_step"] + 5),
    "nothing was repeated": lambda e, r: e.update(steps_repeated=e["steps_repeated"] + 3),
    "a member twice": lambda e, r: longest(e)["members"].append(longest(e)["members"][0]),
    "a stranger": lambda e, r: longest(e)["members"].append(99),
    "it ended before it started": lambda e, r: e["jobs"][-1].update(ended_s=-5.0),
    "one slot too many": lambda e, r: e["jobs"][-1].update(slot=3),
    "fewer came": lambda e, r: e.update(joins=e["joins"] - 1),
    "a worker did more": lambda e, r: r["workers"][-1].update(steps=10**6),
    "it is not elastic": lambda e, r: r.pop("elastic"),
}


def generations(launched: LaunchedCell) -> list[dict[str, Any]]:
    """Who has trained together so far."""
    return [
        g
        for path in RunFiles(launched.folder).list_member_history_paths()
        for g in json.loads(path.read_text())["generations"]
    ]


def together(launched: LaunchedCell, members: int) -> bool:
    """Whether so many train now."""
    assert launched.process.poll() is None, launched.process.communicate()[0]
    last = generations(launched)[-1:]
    return any(len(g["members"]) == members and g["began_unix_s"] is not None for g in last)


def test_a_member_that_falls_silent_is_parted_from_and_the_others_go_on(
    start_cell: Callable[..., LaunchedCell], warm: dict[str, str]
) -> None:
    """A stopped process stands for a node that is gone: its connections stay open, and no collective ends."""
    slow = {"workers": [0, 1], "factor": 5}
    s = settings(
        "ddp", gpus=2, more={"elastic": {"elastic": True}}, epochs=FOREVER, lr=1e-6, slowdown=slow
    )
    launched = start_cell(s, env=warm)
    until(lambda: together(launched, 2))
    silent = generations(launched)[-1]["members"][1]
    os.kill(int(jobs(launched)[silent]["id"]), signal.SIGSTOP)
    began = len(generations(launched))
    until(lambda: any(silent not in g["members"] for g in generations(launched)[began:]))
    until(lambda: together(launched, 2))  # another has come in its place
    lost = json.loads(RunFiles(launched.folder).list_member_history_paths()[-1].read_text())[
        "lost_members"
    ]
    assert silent in lost
    # All are asked to leave at once, as where all are preempted: the state is kept, and gone on with.
    here = generations(launched)[-1]["members"]
    for number in (signal.SIGSTOP, signal.SIGTERM, signal.SIGCONT):
        for worker in here:
            os.kill(int(jobs(launched)[worker]["id"]), number)
    began = len(generations(launched))
    until(lambda: any(not {*here} & {*g["members"]} for g in generations(launched)[began:]))
    back = next(g for g in generations(launched) if g["from_checkpoint"])
    assert back["from_step"] == generations(launched)[back["number"] - 1]["to_step"] > 0
    launched.process.terminate()
    assert launched.finish()[0] == 128 + signal.SIGTERM


@pytest.mark.parametrize("asked_to_leave", [False, True])
def test_a_member_that_never_took_part_ends_in_order(
    asked_to_leave: bool, alone: tuple[ElasticSynchronous, Heard]
) -> None:
    """Its memory was not measured: that is no error, by which its job would count as failed."""
    split, heard = alone
    if asked_to_leave:
        split._leave_requested.set()
    with pytest.raises(WorkerNotNeeded):
        split.train_until_training_ends(MemoryMeter(CPU))
    assert [said["what"] for said in heard.said] == ["ready", "left"][: 1 + asked_to_leave]
