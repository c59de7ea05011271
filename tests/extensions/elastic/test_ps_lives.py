"""What kills and half-done joins could tear: between lives of servers, and where workers come in between."""

from __future__ import annotations

import os
import signal
import socket
import threading
import time
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import ps_harness
import pytest
import torch
from ps_harness import PATIENCE_S, Served, Worked, config, serve_run
from test_ps_elastic import (
    SECRET,
    Held,
    Returning,
    check_run,
    elastic,
    events,
    len_of,
    one_thread,  # noqa: F401  (a fixture)
    policy_of,
    processes,  # noqa: F401  (a fixture)
    serve_all,
)
from test_ps_engine import link_over

from launching import until
from stratbench.extensions.elastic.servers.channel import ReturningChannel
from stratbench.extensions.elastic.servers.journal import (
    Journal,
    collect_score_events,
    get_state_manifest_path,
    is_state_of_all_servers_saved,
    read_journal,
    read_last_incarnation_number,
)
from stratbench.extensions.elastic.servers.run import ElasticRun
from stratbench.extensions.elastic.servers.saved_state import (
    StateSaver,
    save_server_state_and_return_pause_s,
)
from stratbench.extensions.servers.ps.buffers import BufferMean
from stratbench.extensions.servers.ps.client import Channel
from stratbench.extensions.servers.ps.member import Member
from stratbench.extensions.servers.ps.server_config import ServerConfig
from stratbench.extensions.servers.ps.server_run import ServerRun
from stratbench.extensions.servers.ps.snapshots import SnapshotWriter, load_snapshot
from stratbench.extensions.servers.ps.store import EpochLog
from stratbench.extensions.servers.ps.tickets import Ticket, TicketPlan
from stratbench.extensions.servers.wire.frames import Frame, Kind
from stratbench.extensions.servers.wire.link import Left, RunEnded
from stratbench.extensions.servers.wire.shm import Layout
from stratbench.extensions.servers.wire.transport import Closed, Connection

pytestmark = pytest.mark.timeout(300)

ALIVE = lambda: True  # noqa: E731


# --- joining half-way ------------------------------------------------------------------------------


@pytest.mark.slow
def test_a_worker_that_finds_one_server_before_the_other_is_there_comes_again(tmp_path):
    plan = elastic(tmp_path, n_servers=2)
    first = Served(plan, SECRET)
    worker = Returning(plan, 0)
    time.sleep(3.0)  # it gives up its attempt, which takes 1 s, and tries again
    second = Served(replace(plan, server=1), SECRET)
    worker.join()
    check_run(plan, [first.result(), second.result()])
    assert events(plan, "loss") == events(plan, "leave") == []


def test_a_place_that_only_one_server_has_free_yet_is_waited_for(tmp_path, monkeypatch):
    plan = replace(elastic(tmp_path, n_servers=2), workers=1)
    heard, go, on_leave = threading.Event(), threading.Event(), ElasticRun._on_leave

    def leave_late(run, member):
        if run.config.server == 1 and member.worker == 0:
            heard.set()
            assert go.wait(PATIENCE_S)
        on_leave(run, member)

    monkeypatch.setattr(ElasticRun, "_on_leave", leave_late)
    servers = serve_all(plan)
    held = Held(first=10)
    leaving = Worked(plan, SECRET, 0, before_push=held, incarnation=1)
    until(lambda: len(leaving.tickets) > 2, PATIENCE_S)
    threading.Thread(target=leaving.channel.leave, daemon=True).start()
    assert heard.wait(PATIENCE_S)
    until(lambda: events(plan, "leave"), PATIENCE_S)
    held.go.set()
    newcomer = Returning(plan, 1)
    time.sleep(1.0)
    go.set()
    newcomer.join()
    check_run(plan, [server.result() for server in servers])
    assert events(plan, "loss") == []


def test_a_worker_that_cannot_be_taken_in_is_told_why_and_holds_nobody_up(tmp_path, monkeypatch):
    open_lane = Member.open_lane

    def without_memory(member, *args):
        if member.worker == 1:
            raise RuntimeError("can't allocate memory")
        open_lane(member, *args)

    monkeypatch.setattr(Member, "open_lane", without_memory)
    plan = config(tmp_path, workers=2, slices_per_step=2)
    server = Served(plan, SECRET)
    with pytest.raises(RunEnded, match="can't allocate memory"):
        Worked(plan, SECRET, 1).join()
    Worked(plan, SECRET, 0).join()
    found = server.result()
    assert found["status"] == "ok"
    assert [lost["worker"] for lost in found["lost"]] == [1]


def test_a_descriptor_that_comes_late_is_waited_for():
    ours, theirs = socket.socketpair()
    connection = Connection(ours, tick_s=0.05)

    def send() -> None:
        time.sleep(0.3)
        socket.send_fds(theirs, [b"\0"], [theirs.fileno()])

    sender = threading.Thread(target=send)
    sender.start()
    os.close(connection.read_descriptor())
    sender.join()
    theirs.close()
    with pytest.raises(Closed):
        connection.read_descriptor()
    ours.close()


def test_who_is_asked_to_leave_while_it_joins_has_left(tmp_path):
    leaving, left = threading.Event(), []

    def connect(incarnation):
        leaving.set()
        return SimpleNamespace(leave=lambda: left.append(incarnation))

    (tmp_path / "rendezvous.0").write_text('{"incarnation": 3}')
    with pytest.raises(Left):
        ReturningChannel(connect, tmp_path / "rendezvous", tmp_path, leaving)
    assert left == [3]


# --- the end, seen by a worker -----------------------------------------------------------------------


def channel_over(*servers):
    """A channel to servers that take whatever is said, and the list of that."""
    said, channel = [], Channel(None, 0, "native", None)
    for server in servers:
        connection = SimpleNamespace(
            send=lambda frame, payload=b"", s=server: said.append((s, frame.kind)),
            close=lambda: None,
        )
        channel._links.append(link_over(connection, server))
    return channel, said


@pytest.mark.parametrize("waits", ["_await_reply", "rehearse_exchange"])
def test_a_worker_that_waits_for_weights_hears_that_the_training_is_over(waits):
    """It may be before its last ticket: who was to release the weights may be gone."""
    channel, _ = channel_over(0)
    channel._incarnation, channel._push_tensors, found = 1, channel._prepare_for_reply, []
    channel._prepare_for_reply()
    channel._accept_ticket(Ticket(7, 0, 0, 0))
    call = {
        "_await_reply": lambda: channel._await_reply(0.0),
        "rehearse_exchange": channel.rehearse_exchange,
    }[waits]
    thread = threading.Thread(target=lambda: found.append(call()), daemon=True)
    thread.start()
    time.sleep(0.1)
    assert found == []
    channel._handle_frame(channel._links[0], Frame(Kind.DONE))
    thread.join(PATIENCE_S)
    assert found == [None]
    channel.rehearse_exchange()  # nor is anything waited for that begins then


def test_a_server_hears_that_the_training_is_over_before_the_worker_says_goodbye():
    """A worker that leaves before the end counts as lost."""
    channel, said = channel_over(0, 1)
    channel._incarnation, hold = 1, threading.Event()
    other = channel._links[1]
    other.to_send.put(lambda: hold.wait(PATIENCE_S))
    channel._start_thread(channel._send_queued_frames, other)
    channel._end_training()
    closing = threading.Thread(target=channel.close)
    closing.start()
    time.sleep(0.1)
    hold.set()
    closing.join(PATIENCE_S)
    assert [kind for server, kind in said if server == 1] == [Kind.DONE, Kind.BYE]


# --- lives -------------------------------------------------------------------------------------------


#: A file: the servers' snapshots are on disk when it is there.
GO = "go"


def serve_and_save_late(plan: ServerConfig, secret: bytes) -> None:
    """A server process that saves its state slowly."""
    wait = SnapshotWriter.wait_for_snapshots

    def wait_late(writer: SnapshotWriter) -> None:
        until((Path(plan.rendezvous).parent / GO).exists, PATIENCE_S)
        wait(writer)

    SnapshotWriter.wait_for_snapshots = wait_late
    serve_run(plan, secret)


@pytest.mark.slow
@pytest.mark.parametrize("epochs", [1, 2])
def test_an_epoch_that_ends_while_the_state_is_saved_is_evaluated_in_the_next_incarnation(
    tmp_path,
    monkeypatch,
    processes,  # noqa: F811
    epochs,
):
    """The one worker that there is cannot train on before it has evaluated."""
    plan = elastic(tmp_path, save_interval_s=0.1, epochs=epochs, steps_per_epoch=2)
    asked, hold = threading.Event(), threading.Event()

    def load_late(folder, epoch, wait_s):
        asked.set()
        assert hold.wait(PATIENCE_S)
        return load_snapshot(folder, epoch, 20.0)

    monkeypatch.setattr(ps_harness, "load_snapshot", load_late)
    servers = processes(plan)
    servers.target = serve_and_save_late
    servers.start()
    worker = Returning(plan, 0, before_push=lambda *_: time.sleep(0.3))
    assert asked.wait(PATIENCE_S)  # the first epoch is over; what is being saved does not say so
    (tmp_path / GO).touch()
    until(lambda: is_state_of_all_servers_saved(Path(plan.elastic.folder), 1), PATIENCE_S)
    servers.end(signal.SIGKILL)
    servers.start(incarnation=2, resumes=True)
    hold.set()
    worker.join()
    (found,) = servers.statistics()
    assert (found["status"], found["tickets_settled"]) == ("ok", len_of(plan))
    assert [s["epoch"] for s in found["elastic"]["scores"]] == list(range(epochs))


def test_what_is_saved_beside_the_shards_is_of_a_moment_after_theirs(tmp_path):
    said = []
    shard = SimpleNamespace(state=lambda: said.append("shard") or {"floor": 0, "above": set()})
    layout = Layout(4, "float32", 0, "float32", "")
    store = SimpleNamespace(shards={0: shard}, buffers=None, layout=layout)
    save_server_state_and_return_pause_s(tmp_path, 0, lambda: said.append("facts") or {}, store)
    assert said == ["shard", "facts"]


def test_servers_that_end_while_they_save_end(tmp_path):
    run, go = ElasticRun(elastic(tmp_path), SECRET), threading.Event()
    shard = SimpleNamespace(state=lambda: {"floor": int(go.wait(PATIENCE_S)), "above": set()})
    layout = Layout(4, "float32", 0, "float32", "")
    run._store = SimpleNamespace(shards={0: shard}, buffers=None, layout=layout)
    run._start_state_save()
    closing = threading.Thread(target=run.close, daemon=True)
    closing.start()
    time.sleep(0.2)
    go.set()
    closing.join(PATIENCE_S)
    assert not closing.is_alive()


def test_a_snapshot_that_fails_in_any_way_ends_the_run_and_is_waited_for_no_longer(tmp_path):
    def fail():
        raise MemoryError("can't allocate memory")

    told, weights = [], torch.zeros(4)
    policy = SimpleNamespace(weights=weights)
    shard = SimpleNamespace(policy=policy, request_snapshot=lambda out: None, save_snapshots=fail)
    writer = SnapshotWriter(tmp_path, 0, 1, told.append)
    writer.request_snapshot(0, 1.0, [shard], None)
    waiting = threading.Thread(target=writer.wait_for_snapshots, daemon=True)
    waiting.start()
    waiting.join(PATIENCE_S)
    assert not waiting.is_alive()
    assert "epoch 1 could not be written" in told[0]
    assert "can't allocate memory" in told[0]


@pytest.mark.parametrize("settled", [3, 4])
def test_an_epoch_that_is_over_and_was_not_noted_ends_with_the_next_incarnation(settled):
    """A worker's last push may be in the shards when the state is saved, and not yet be counted."""
    ended, finished = [], []
    writer = SimpleNamespace(
        request_snapshot=lambda epoch, seconds, *_: ended.append((epoch, seconds))
    )
    shard = SimpleNamespace(finish=lambda: finished.append(True))
    store = SimpleNamespace(shards={0: shard}, buffers=None)
    epochs = EpochLog(TicketPlan(2, 2, 1), writer)
    epochs.restore_completed_tickets(range(settled), [], 9.0, store)
    assert ended == [(0, 9.0), (1, 9.0)][: settled // 2]
    assert [e["epoch"] for e in epochs.ends] == [e for e, _ in ended]
    assert bool(finished) == epochs.is_complete == (settled == 4)


def test_a_line_of_the_journal_that_was_cut_off_is_gone_in_the_next_incarnation(tmp_path):
    journal = Journal(tmp_path, 1)
    journal.append_event("incarnation", settled=0)
    journal.close()
    with (tmp_path / "journal.jsonl").open("ab") as file:
        file.write(b'{"incarnation": 1, "eve')
    journal = Journal(tmp_path, 2)
    journal.append_event("incarnation", settled=3)
    journal.close()
    assert [e["incarnation"] for e in read_journal(tmp_path)] == [1, 2]
    assert read_last_incarnation_number(tmp_path) == 2


def test_what_the_disk_takes_only_half_of_is_written_to_its_end(tmp_path, monkeypatch):
    write = os.write
    monkeypatch.setattr(os, "write", lambda file, data: write(file, data[: len(data) // 2 + 1]))
    journal = Journal(tmp_path, 1)
    journal.append_event("incarnation", settled=0)
    journal.close()
    assert read_last_incarnation_number(tmp_path) == 1


def test_a_score_of_a_state_that_was_lost_is_none(tmp_path):
    """Life 2 went on from before the second epoch's end: what that was in incarnation 1 is no more."""
    journal = Journal(tmp_path, 1)
    for incarnation, settled, epochs in ((1, 0, (0, 1)), (2, 45, ()), (3, 90, ())):
        journal._incarnation = incarnation
        journal.append_event("incarnation", settled=settled)
        for epoch in epochs:
            journal.append_event("score", epoch=epoch, settled=40 * (epoch + 1))
    journal.close()
    assert sorted(collect_score_events(read_journal(tmp_path))) == [0]


def test_servers_that_begin_anew_leave_no_state_of_a_training_that_is_gone(tmp_path):
    """Else a later incarnation could put one server's part of one training beside another's."""
    plan = elastic(tmp_path, n_servers=2)
    folder = Path(plan.elastic.folder)
    folder.mkdir()
    for server in range(2):
        get_state_manifest_path(folder, server).write_text("{}")
    ElasticRun(replace(plan, server=1), SECRET)
    assert [get_state_manifest_path(folder, server).exists() for server in range(2)] == [
        True,
        False,
    ]


def test_buffers_of_an_earlier_incarnation_count_only_until_somebody_pushes():
    before, after = BufferMean(torch.zeros(2)), BufferMean(torch.zeros(2))
    for place in range(3):
        before.store_worker_buffers(place, torch.full((2,), float(place)), ALIVE)
    after.load(before.state())
    assert after.compute_mean().tolist() == [1.0, 1.0]
    after.store_worker_buffers(1, torch.full((2,), 7.0), ALIVE)
    assert after.compute_mean().tolist() == [7.0, 7.0]


def test_a_state_that_cannot_be_saved_ends_the_run_with_the_reason(tmp_path):
    told, policy = [], policy_of("ps-async")
    policy.window = object()
    store = SimpleNamespace(shards={0: policy}, buffers=None, layout=None)
    saver = StateSaver(tmp_path, 0, told.append)
    saver.start_state_save(store, dict)
    saver.wait_for_state_save()
    assert len(told) == 1
    assert "an attribute of a policy is a object, which cannot be saved" in told[0]


# --- a worker that was given up meanwhile --------------------------------------------------------------


@pytest.mark.parametrize("idle", [True, False])
def test_what_a_worker_said_before_it_was_given_up_changes_nothing_after(tmp_path, idle):
    """Its reader may have waited for the lock meanwhile, and its place may be another's."""
    run = ElasticRun(elastic(tmp_path), SECRET)
    member = SimpleNamespace(
        alive=False, idle=idle, is_ready_to_start=False, place=0, worker=0, queue_frame=None
    )
    changed = []
    run._initialised = True
    run._store = SimpleNamespace(join=changed.append, leave=lambda *a, **k: changed.append(a))
    run._on_pull(member, Frame(Kind.PULL))
    run._on_wait(member, Frame(Kind.WAIT))
    assert changed == []
    assert events(run.config, "join") == []


def test_a_failure_while_a_lost_worker_is_struck_off_ends_the_run(tmp_path, monkeypatch):
    def lose(run, member, reason):
        raise OSError("No space left on device")

    def receive():
        raise Closed("the connection was closed")

    monkeypatch.setattr(ServerRun, "_lose_member", lose)
    run = ServerRun(config(tmp_path), SECRET)
    connection = SimpleNamespace(receive=receive)
    member = SimpleNamespace(
        connection=connection, worker=0, sender=threading.Thread(), close_transport=lambda: None
    )
    member.sender.start()
    run._serve_worker(member)
    assert run.over.is_set()
    assert "No space left on device" in run.error
