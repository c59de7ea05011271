"""The coordinator of split synchronous workers, with members that take no real step: who meets whom, when."""

from __future__ import annotations

import errno
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from launching import LIMIT_S, until
from stratbench.cell.run_folder import RunFolder
from stratbench.extensions.elastic import member
from stratbench.extensions.elastic.coordinator import Coordinator
from stratbench.extensions.elastic.member import WorkerMembership, WorkerNotNeeded, join_as_member
from stratbench.extensions.servers.wire.handshake import make_secret, write_secret
from stratbench.extensions.servers.wire.transport import Listeners


class Cell:
    """A coordinator of two places, and its members' seats."""

    def __init__(self, folder: Path) -> None:
        self.folder = RunFolder(folder)
        self.checkpoint: tuple[int, list[dict[str, Any]]] | None = None
        self.epochs: list[dict[str, Any]] = []
        secret = make_secret()
        write_secret(self.folder.job_secret_path, secret)
        listeners = Listeners("127.0.0.1")
        self.coordinator = Coordinator(
            secret,
            listeners,
            2,
            4,
            lambda: self.checkpoint,
            0,
            self.epochs.append,
            lambda score: score is not None and score >= 0.9,
        )
        self.coordinator.start_threads()
        listeners.publish_addresses(self.folder.server_rendezvous_path, 0)
        self.broken: list[int] = []

    def seat(self, number: int, leaving: threading.Event | None = None) -> WorkerMembership:
        broken = lambda: self.broken.append(number)  # noqa: E731
        return join_as_member(self.folder, number, broken, leaving or threading.Event())

    def member(self, number: int) -> WorkerMembership:
        seat = self.seat(number)
        seat.send_message("ready")
        return seat


@pytest.fixture
def cell(tmp_path: Path) -> Iterator[Cell]:
    found = Cell(tmp_path)
    yield found
    found.coordinator.close()


def stop(seat: WorkerMembership, step: int, **more: Any) -> None:
    told = {"failed": False, "leaving": False, "holds": step, "epochs": {}}
    seat.send_message("stopped", step=step, **told | more)


def test_a_result_that_cannot_be_written_ends_the_cell_with_its_reason(cell: Cell) -> None:
    def full(entry: dict[str, Any]) -> None:
        raise OSError(errno.ENOSPC, "No space left on device", str(cell.folder.epoch_results_path))

    cell.coordinator._on_epoch = full
    one = cell.member(0)
    one.wait_for_message()
    one.send_message("begun", pause_s=None)
    one.send_message("epoch", entry={"epoch": 1, "test_loss": 0.5, "score": 0.5})
    until(lambda: cell.coordinator.failure)
    assert cell.coordinator.failure.startswith(
        "the result of epoch 1 cannot be written: [Errno 28]"
    )
    # The disk has room again: the epoch is lost all the same, and none is taken for it.
    cell.coordinator._on_epoch = cell.epochs.append
    one.send_message("epoch", entry={"epoch": 2, "test_loss": 0.5, "score": 0.95})
    one.send_message("through", step=8, epochs={})
    until(lambda: cell.coordinator._finished)
    assert cell.epochs == []
    assert cell.coordinator.done.is_set()


def test_who_is_ready_waits_until_the_others_have_stopped_after_a_step(cell: Cell) -> None:
    first = cell.member(0)
    form = first.wait_for_message()
    assert (form["rank"], form["world"], form["step"]) == (0, 1, 0)
    first.send_message("begun", pause_s=None)
    second = cell.member(1)
    assert first.change.wait(LIMIT_S)
    stop(first, 7)
    one, other = first.wait_for_message(), second.wait_for_message()
    assert [(f["rank"], f["world"], f["step"]) for f in (one, other)] == [(0, 2, 7), (1, 2, 7)]
    assert one["meeting"] == other["meeting"] != form["meeting"]
    assert not first.change.is_set()


def test_a_lost_member_breaks_its_generation_and_the_most_advanced_gives_the_state(
    cell: Cell,
) -> None:
    seats = [cell.member(0)]
    assert seats[0].wait_for_message()["world"] == 1
    seats[0].send_message("begun", pause_s=None)
    seats.append(cell.member(1))
    assert seats[0].change.wait(LIMIT_S)
    stop(seats[0], 0)
    assert [seat.wait_for_message()["world"] for seat in seats] == [2, 2]
    seats[1]._connection.close()
    until(lambda: 0 in cell.broken)
    stop(seats[0], 5, failed=True)
    form = seats[0].wait_for_message()
    assert (form["world"], form["step"], form["load"]) == (1, 5, False)
    assert cell.coordinator.history.lost_members == [1]
    assert cell.coordinator.history.generations[-2].broken


def test_where_nobody_has_the_state_the_first_rank_reads_the_checkpoint(cell: Cell) -> None:
    cell.checkpoint = 12, []
    form = cell.member(3).wait_for_message()
    assert (form["step"], form["load"]) == (12, True)


def test_what_epochs_gave_is_not_lost_with_the_coordinator_that_did_not_hear_it(cell: Cell) -> None:
    """The members went on beyond the end of an epoch, and kept their state, while nobody listened."""
    entries = [{"epoch": n, "test_loss": 0.5, "score": 0.1 * n} for n in (1, 2)]
    cell.checkpoint = 10, entries
    first = cell.member(0)
    form = first.wait_for_message()
    assert (form["step"], form["epochs_done"]) == (10, 2)
    first.send_message("epoch", entry={"epoch": 3, "test_loss": 0.5, "score": 0.95})
    first.send_message("through", step=12, epochs={})
    with pytest.raises(WorkerNotNeeded):
        first.wait_for_message()
    assert [e["epoch"] for e in cell.epochs] == [1, 2, 3]


def test_a_pause_after_the_last_step_is_of_the_last_epoch(cell: Cell) -> None:
    first = cell.member(0)
    first.wait_for_message()
    first.send_message("begun", pause_s=None)
    stop(first, 8, failed=True)  # somebody else was lost in the evaluation
    first.wait_for_message()
    first.send_message("begun", pause_s=0.5)
    first.send_message("through", step=8, epochs={})
    with pytest.raises(WorkerNotNeeded):
        first.wait_for_message()
    assert {n: e.pause_s for n, e in cell.coordinator.history.totals_by_epoch.items()} == {1: 0.5}


def test_a_leaver_is_let_go_and_the_others_meet_again(cell: Cell) -> None:
    first = cell.member(0)
    first.wait_for_message()
    first.send_message("begun", pause_s=None)
    stop(first, 3, leaving=True)
    assert first.wait_for_message()["what"] == "leave"
    assert cell.coordinator.history.left_members == [0]
    assert cell.member(1).wait_for_message()["world"] == 1


def test_an_epoch_counts_once_and_the_target_ends_it_for_all(cell: Cell) -> None:
    first = cell.member(0)
    first.wait_for_message()
    entry = {"epoch": 1, "test_loss": 0.5, "score": 0.5}
    for _ in range(2):
        first.send_message("epoch", entry=entry)
    first.send_message("epoch", entry=entry | {"epoch": 2, "score": 0.95})
    first.send_message("through", step=8, epochs={"1": [2.0, 4, 1, 0.5]})
    with pytest.raises(WorkerNotNeeded):
        first.wait_for_message()
    assert cell.coordinator.done.is_set()
    assert [e["epoch"] for e in cell.epochs] == [1, 2]
    with pytest.raises(WorkerNotNeeded, match="over"):
        cell.seat(1)


@pytest.mark.parametrize(
    ("number", "reason"),
    [(0, "has joined before"), (-1, "is not the number"), ("7", "is not the number")],
)
def test_numbers_never_come_again(cell: Cell, number: Any, reason: str) -> None:
    cell.member(0)
    with pytest.raises(WorkerNotNeeded, match=reason):
        cell.seat(number)


def test_strangers_and_surplus_workers_are_sent_away(
    cell: Cell, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(member, "AGAIN_S", 0.01)
    cell.member(0)
    second = cell.member(1)
    got: list[WorkerMembership] = []
    surplus = threading.Thread(target=lambda: got.append(cell.seat(2)))
    surplus.start()
    until(lambda: cell.coordinator.refusals.count >= 2)
    assert not got
    second._connection.close()
    surplus.join(LIMIT_S)
    assert got[0].place == second.place
    stranger = Cell.__new__(Cell)
    stranger.folder = RunFolder(tmp_path / "other")
    stranger.folder.path.mkdir()
    write_secret(stranger.folder.job_secret_path, make_secret())
    Path(f"{stranger.folder.server_rendezvous_path}.0").write_text(
        Path(f"{cell.folder.server_rendezvous_path}.0").read_text()
    )
    with pytest.raises(WorkerNotNeeded):
        join_as_member(stranger.folder, 9, lambda: None, threading.Event())
    until(lambda: any("secret" in reason for reason in cell.coordinator.refusals.first_texts))
    assert cell.coordinator.num_present_members == 2


def test_nobody_there_to_let_a_worker_in_is_no_error(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(member, "NOBODY_S", 0.2)
    with pytest.raises(WorkerNotNeeded, match="nobody"):
        join_as_member(RunFolder(tmp_path), 0, lambda: None, threading.Event())
