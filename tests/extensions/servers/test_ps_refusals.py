"""What a server refuses while a run goes on, and that the run is none the worse for it."""

from __future__ import annotations

import contextlib
import errno
import json
import os
import socket
import struct
import subprocess
import sys
import threading
import time
from dataclasses import asdict, replace
from types import SimpleNamespace
from unittest import mock

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from ps_harness import DEADLINE_S, PATIENCE_S, Served, Worked, config, single_run, small_model

from launching import until
from stratbench.extensions.servers.ps import server_run as run_module
from stratbench.extensions.servers.ps.client import Channel, RunEnded, ServerLost
from stratbench.extensions.servers.ps.flat import FlatSpace
from stratbench.extensions.servers.ps.member import Member
from stratbench.extensions.servers.wire import gate
from stratbench.extensions.servers.wire.frames import (
    BUFFERS,
    HEADER_BYTES,
    NO_TICKET,
    Frame,
    Header,
    Kind,
    ProtocolError,
)
from stratbench.extensions.servers.wire.handshake import (
    JoinRefused,
    answer_server_challenge,
    load_secret,
    write_secret,
)
from stratbench.extensions.servers.wire.transport import (
    Connection,
    connect_to_server,
    get_rendezvous_path,
)

pytestmark = pytest.mark.timeout(300)

SECRET = b"s" * 32
KEY = b"k" * 32
#: Of the test's model: 2,688 bytes of float64 in equal shards of 256 bytes at most.
SHARD_BYTES = 248


@pytest.fixture(autouse=True)
def one_thread():
    """The server sets torch to one thread; kernels round differently on more."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


class Paused:
    """A run whose only worker waits at its second ticket until `go`; then it must end as usual."""

    def __init__(self, folder, **changed):
        self.config = config(folder, **changed)
        self.server = Served(self.config, SECRET)
        self._reached, self._go = threading.Event(), threading.Event()
        self.worker = Worked(self.config, SECRET, before_push=self._pause, transport="tcp")
        assert self._reached.wait(PATIENCE_S)
        endpoint = json.loads(get_rendezvous_path(self.config.rendezvous, 0).read_text())
        self.address = (endpoint["host"], endpoint["port"])
        self.local = "\0" + endpoint["local"]

    def _pause(self, worker, ticket, channel):
        if ticket.number == 1:
            self._reached.set()
            self._go.wait(PATIENCE_S)

    def finish(self):
        """Let the run end; checks that it was not harmed. Returns the server's statistics."""
        self._go.set()
        self.worker.join()
        stats = self.server.result()
        reference = single_run(self.config)
        for ours, theirs in zip(
            self.worker.model.parameters(), reference.parameters(), strict=True
        ):
            assert torch.equal(ours, theirs)
        assert stats["status"] == "ok"
        assert stats["lost"] == []
        return stats


@pytest.fixture
def gates(monkeypatch):
    """The gates of the test's servers, as they open."""
    found, accept = [], gate.Gate.accept
    monkeypatch.setattr(
        gate.Gate, "accept", lambda self, listeners: (found.append(self), accept(self, listeners))
    )
    return found


@pytest.fixture
def run(tmp_path):
    return Paused(tmp_path)


def hello(worker=0):
    layout = asdict(FlatSpace(small_model()).layout)
    return {"worker": worker, "layout": layout, "wire": "native", "scaled": False, "start": ""}


def answer_of(sock):
    """Everything the server sends until it closes."""
    sock.settimeout(PATIENCE_S)
    said = b""
    try:
        while part := sock.recv(4096):
            said += part
    except ConnectionResetError:
        pass
    return said


@pytest.mark.parametrize(
    "said",
    [
        os.urandom(4096),
        b"GET / HTTP/1.1\r\nHost: x\r\n\r\n" * 4,
        b"PS" + os.urandom(200),
        b"",
        Header(b"\0" * 32).pack_frame(Frame(Kind.HELLO, length=1 << 40)) + b"x" * 100,
        Header(b"\0" * 32).pack_frame(Frame(Kind.HELLO, length=100)) + b"x" * 50,
        Header(b"\0" * 32).pack_frame(Frame(Kind.HELLO, length=200)) + b"x" * 200,
        Header(b"\0" * 32).pack_frame(Frame(Kind.PUSH, length=200)) + b"x" * 200,
    ],
    ids=[
        "random",
        "http",
        "magic-then-random",
        "silence",
        "oversized",
        "truncated",
        "no-secret",
        "push-first",
    ],
)
@pytest.mark.parametrize("door", ["tcp", "local"])
def test_strangers_are_refused_and_the_run_goes_on(run, said, door):
    if door == "tcp":
        sock = socket.create_connection(run.address)
    else:
        sock = socket.socket(socket.AF_UNIX)
        sock.connect(run.local)
    with contextlib.suppress(OSError):  # refused before all of it was said
        sock.sendall(said)
        sock.shutdown(socket.SHUT_WR)
    answer = answer_of(sock)
    assert SECRET not in answer
    stats = run.finish()
    assert stats["refused"] == 1, stats["refusals"]


def test_a_stranger_that_says_nothing_is_refused_at_the_deadline(gates, run):
    gates[0]._deadline_s = 0.3  # only now: the worker had all the time it needed
    started = time.monotonic()
    with socket.create_connection(run.address) as sock:
        sock.sendall(b"P")
        answer_of(sock)
    assert time.monotonic() - started > 0.25
    assert "deadline" in run.finish()["refusals"][0]


def join_late(folder, before_join):
    """A run of one worker, which joins when `before_join(address)` has done its worst; statistics."""
    plan = config(folder)
    server = Served(plan, SECRET)
    file = get_rendezvous_path(plan.rendezvous, 0)
    while not file.exists():
        time.sleep(0.01)
    endpoint = json.loads(file.read_text())
    held = before_join((endpoint["host"], endpoint["port"]))
    Worked(plan, SECRET, transport="tcp").join()
    stats = server.result()
    assert stats["status"] == "ok"
    del held
    for thread in threading.enumerate():  # strangers still here would log into the next test
        if "_handle_connection" in thread.name:
            thread.join(PATIENCE_S)
    return stats


def test_strangers_that_fill_the_gate_keep_no_worker_out(tmp_path, caplog):
    """The oldest of them has to go for each that comes; the time of the others is not over."""

    def fill(address):
        held = [socket.create_connection(address) for _ in range(80)]
        while len([r for r in caplog.records if "refused" in r.getMessage()]) < 80 - 64:
            time.sleep(0.01)
        return held

    stats = join_late(tmp_path, fill)
    assert 80 - 64 <= stats["refused"] <= 81
    assert not any("deadline" in reason for reason in stats["refusals"])


def test_a_worker_closed_as_its_handshake_ends_comes_again(tmp_path, caplog, gates, monkeypatch):
    """It had to make room in that moment: it must not be taken into the run, and then be lost."""
    dismissed, open_handshake = [], gate.challenge_worker

    def dismissing(connection, secret):
        said = open_handshake(connection, secret)
        if not dismissed:
            dismissed.append(connection)
            gates[0]._close_oldest_unproved()
        return said

    monkeypatch.setattr(gate, "challenge_worker", dismissing)
    stats = join_late(tmp_path, lambda address: None)
    assert stats["lost"] == []
    assert "in favour of a newer one" in caplog.text


def test_connections_that_are_reset_leave_one_bounded_log_and_no_traceback(tmp_path, caplog):
    tracebacks = []

    def reset_many(address):
        for _ in range(150):
            sock = socket.create_connection(address)
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
            sock.close()
        time.sleep(0.5)

    with mock.patch.object(threading, "excepthook", tracebacks.append):
        join_late(tmp_path, reset_many)
    assert tracebacks == []
    assert len([r for r in caplog.records if r.message.startswith("refused")]) <= 100


def test_a_worker_comes_again_when_the_server_could_not_start_a_thread(tmp_path):
    """As under a limit of processes; the accepting thread must live on."""
    start, failed = threading.Thread.start, []

    def sometimes(thread):
        if getattr(thread._target, "__name__", "") == "_handle_connection" and len(failed) < 2:
            failed.append(thread)
            raise RuntimeError("can't start new thread")
        start(thread)

    with mock.patch.object(threading.Thread, "start", sometimes):
        stats = join_late(tmp_path, lambda address: None)
    assert len(failed) == 2
    assert stats["refused"] == 2
    assert "can't start new thread" in stats["refusals"][0]


def test_a_server_without_descriptors_waits_for_some(tmp_path):
    """It neither ends nor spins: the connection stays in the queue, and is accepted later."""
    accept, times = socket.socket.accept, []

    def full(listener):
        times.append(time.monotonic())
        if times[-1] - times[0] < 0.3:
            raise OSError(errno.EMFILE, os.strerror(errno.EMFILE))
        return accept(listener)

    with mock.patch.object(socket.socket, "accept", full):
        stats = join_late(tmp_path, lambda address: None)
    assert 2 <= len(times) <= 8
    assert "Too many open files" in stats["refusals"][0]


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can pose as another user")
def test_another_users_local_connection_is_refused_at_once(run):
    code = (
        "import os, socket, sys; os.setuid(65534); s = socket.socket(socket.AF_UNIX); "
        "s.connect(chr(0) + sys.argv[1]); s.settimeout(60); sys.exit(len(s.recv(100)))"
    )
    command = [sys.executable, "-c", code, run.local[1:]]
    assert (
        subprocess.run(command, timeout=PATIENCE_S, check=False).returncode == 0
    )  # nothing was said
    assert "the peer's user 65534 is not the user of this job" in run.finish()["refusals"][0]


def test_a_wrong_secret_is_refused_on_both_sides(run):
    flat = FlatSpace(small_model())
    for transport in ("tcp", "shm"):
        with pytest.raises(JoinRefused, match="does not know this job's secret"):
            Channel.connect(run.config.rendezvous, 0, flat, b"x" * 32, transport)
    assert run.finish()["refused"] == 2


def test_a_worker_does_not_join_a_server_that_does_not_know_the_secret(tmp_path):
    """The false server accepts any HELLO and makes up the WELCOME."""
    listener = socket.create_server(("127.0.0.1", 0))
    endpoint = {"host": "127.0.0.1", "port": listener.getsockname()[1], "local": "", "boot_id": ""}
    (tmp_path / "r.0").write_text(json.dumps(endpoint))

    def pretend():
        connection = Connection(listener.accept()[0])
        connection.set_frame_keys(b"\0" * 32, b"\0" * 32, 4096)
        connection.send(Frame(Kind.CHALLENGE), b"n" * 32)
        connection.discard_payload(connection.receive().length)
        connection.send(Frame(Kind.WELCOME), b"m" * 32 + b'{"limit_bytes": 4096}')

    threading.Thread(target=pretend, daemon=True).start()
    with pytest.raises(JoinRefused, match="the server does not know"):
        Channel.connect(tmp_path / "r", 0, FlatSpace(small_model()), SECRET, "tcp")


def test_a_recorded_handshake_cannot_be_replayed(tmp_path):
    run = Paused(tmp_path, workers=1)
    recorder = Recorder(run.config, tmp_path)
    with pytest.raises(JoinRefused, match="connected already"):  # the secret itself was right
        Channel.connect(recorder.rendezvous, 0, FlatSpace(small_model()), SECRET, "tcp")
    with socket.create_connection(run.address) as sock:
        sock.sendall(b"".join(recorder.from_worker))
        answer_of(sock)
    refusals = run.finish()["refusals"]
    assert "connected already" in refusals[0]
    assert "does not know this job's secret" in refusals[1]


@pytest.mark.parametrize(
    ("changed", "reason"),
    [
        ({}, "connected already"),
        ({"worker": 7}, "is not in 0 to 0"),
        ({"worker": "0"}, "is not in"),
        ({"worker": True}, "is not in"),
        ({"wire": "int8"}, "wire format 'int8'"),
        ({"layout": {}}, "malformed HELLO"),
        ({"scaled": 1}, "malformed HELLO"),
        ({"layout": None}, "malformed HELLO"),
        ({"layout": hello()["layout"] | {"numel": 2.5}}, "malformed HELLO"),
        ({"layout": hello()["layout"] | {"dtype": "int8"}}, "malformed HELLO"),
    ],
)
def test_a_peer_that_knows_the_secret_is_held_to_the_protocol(run, changed, reason):
    sock, _ = connect_to_server(run.config.rendezvous, 0, "tcp", time.monotonic() + PATIENCE_S)
    connection = Connection(sock)
    with pytest.raises(JoinRefused, match=reason):
        answer_server_challenge(connection, SECRET, hello() | changed)
    assert run.finish()["refused"] == 1


@pytest.mark.slow
def test_a_worker_with_another_model_is_refused(tmp_path, monkeypatch):
    passed_s, real = [0.0], time.monotonic
    clock = SimpleNamespace(monotonic=lambda: real() + passed_s[0], perf_counter=time.perf_counter)
    monkeypatch.setattr(run_module, "time", clock)
    plan = config(tmp_path, workers=2, slices_per_step=2)
    server = Served(plan, SECRET)
    first = Worked(plan, SECRET, 0)
    assert first.asked.wait(PATIENCE_S)
    other = FlatSpace(torch.nn.Linear(3, 3).double())
    with pytest.raises(JoinRefused, match="the model of worker 1 differs"):
        Channel.connect(plan.rendezvous, 1, other, SECRET)
    passed_s[0] = DEADLINE_S
    with pytest.raises(RunEnded, match=r"only workers \[0\] of 2 were ready to start"):
        first.join()
    assert server.result()["status"] == "lost"


# --- frames of a worker that has been let in -----------------------------------------------------


class Recorder:
    """Stands between a worker and the server; `meddle(frames so far, new)` says what goes on."""

    def __init__(self, plan, folder, meddle=lambda seen, frame: [frame]):
        self.from_worker = []
        endpoint = json.loads(get_rendezvous_path(plan.rendezvous, 0).read_text())
        self._listener = socket.create_server(("127.0.0.1", 0))
        self._address = (endpoint["host"], endpoint["port"])
        endpoint |= {"port": self._listener.getsockname()[1], "local": ""}
        self.rendezvous = folder / "between"
        get_rendezvous_path(self.rendezvous, 0).write_text(json.dumps(endpoint))
        self._meddle = meddle
        threading.Thread(target=self._run, daemon=True).start()

    def _run(self):
        worker, _ = self._listener.accept()
        server = socket.create_connection(self._address)
        for sock in (worker, server):  # as those between which it stands
            sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        threading.Thread(target=self._copy_back, args=(server, worker), daemon=True).start()
        stream = worker.makefile("rb")
        with contextlib.suppress(OSError):
            while head := stream.read(HEADER_BYTES):
                (length,) = struct.unpack_from("<Q", head, 28)
                frame = head + stream.read(length)
                parts = self._meddle(self.from_worker, frame)
                self.from_worker.append(frame)
                for part in parts:
                    server.sendall(part)
            server.shutdown(socket.SHUT_RDWR)

    def _copy_back(self, server, worker):
        with contextlib.suppress(OSError):
            while part := server.recv(1 << 16):
                worker.sendall(part)
            worker.shutdown(socket.SHUT_RDWR)


def kind_of(frame):
    return Kind(frame[3])


def start_through(folder, meddle, **changed):
    plan = config(folder, **changed)
    server = Served(plan, SECRET)
    while not get_rendezvous_path(plan.rendezvous, 0).exists():
        time.sleep(0.01)
    recorder = Recorder(plan, folder, meddle)
    return (
        plan,
        server,
        Worked(replace(plan, rendezvous=str(recorder.rendezvous)), SECRET, 0, "tcp"),
    )


def test_replayed_frames_change_nothing_and_are_logged(tmp_path, caplog):
    def replay(seen, frame):
        old = [f for f in seen if kind_of(f) in (Kind.PUSH, Kind.PULL)][-3:]
        return [*old, frame] if kind_of(frame) is Kind.PUSH else [frame]

    plan, server, worker = start_through(tmp_path, replay)
    worker.join()
    stats = server.result()
    reference = single_run(plan)
    for ours, theirs in zip(worker.model.parameters(), reference.parameters(), strict=True):
        assert torch.equal(ours, theirs)
    assert stats["workers"][0]["replayed_frames"] > 10
    assert stats["refused"] == stats["workers"][0]["replayed_frames"]
    assert "replayed frame: PUSH" in caplog.text


def flipped(frame, at):
    return frame[:at] + bytes([frame[at] ^ 1]) + frame[at + 1 :]


@pytest.mark.parametrize("at", [0, 2, 3, 4, 8, 12, 20, 28, 36, 44, HEADER_BYTES - 1])
def test_a_changed_header_is_refused_and_its_worker_let_go(tmp_path, at):
    def corrupt(seen, frame):
        return [flipped(frame, at)] if kind_of(frame) is Kind.PUSH else [frame]

    _, server, worker = start_through(tmp_path, corrupt)
    with pytest.raises((ServerLost, RunEnded)):
        worker.join()
    stats = server.result()
    assert stats["refused"] == 1
    assert "malformed frame" in stats["refusals"][0]
    assert stats["tickets_settled"] == 0


@pytest.mark.parametrize("meddle", ["random", "dropped", "truncated"])
def test_a_broken_stream_loses_that_worker_only(tmp_path, meddle):
    def garble(seen, frame):
        pushes = sum(kind_of(f) is Kind.PUSH for f in seen)
        if kind_of(frame) is not Kind.PUSH or pushes != 7:
            return [frame]
        return {"random": [os.urandom(300), frame], "dropped": [], "truncated": [frame[:-9]]}[
            meddle
        ]

    plan = config(tmp_path, workers=2, slices_per_step=2, steps_per_epoch=10)
    server = Served(plan, SECRET)
    other = Worked(plan, SECRET, 1)
    while not get_rendezvous_path(plan.rendezvous, 0).exists():
        time.sleep(0.01)
    recorder = Recorder(plan, tmp_path, garble)
    broken = Worked(replace(plan, rendezvous=str(recorder.rendezvous)), SECRET, 0, "tcp")
    with pytest.raises((ServerLost, RunEnded)):
        broken.join()
    other.join()
    stats = server.result()
    assert stats["status"] == "ok"
    assert stats["refused"] == 1
    assert [lost["worker"] for lost in stats["lost"]] == [0]
    assert stats["tickets_settled"] == 20
    assert set(stats["updates"]) == {20}


class Insider:
    """Knows the secret, joins as a worker, and then sends what it should not."""

    def __init__(self, plan, worker):
        sock, _ = connect_to_server(plan.rendezvous, 0, "tcp", time.monotonic() + PATIENCE_S)
        self.connection = Connection(sock)
        self.connection.deadline = time.monotonic() + PATIENCE_S
        self.welcome = answer_server_challenge(self.connection, SECRET, hello(worker))
        self.connection.send(Frame(Kind.PULL))

    def until(self, kind):
        """The next frame of that kind; its payload is still to be read."""
        while (frame := self.connection.receive()).kind is not kind:
            self.connection.discard_payload(frame.length)
        return frame

    def ticket(self):
        """Number of the ticket it is handed."""
        frame = self.until(Kind.TICKET)
        self.connection.discard_payload(frame.length)
        return frame.ticket

    def reason(self):
        """Why the server has let it go."""
        return self.connection.read_payload(self.until(Kind.ERR).length).decode()


@pytest.mark.parametrize(
    ("frame", "payload", "reason"),
    [
        (Frame(Kind.PUSH, 0, 1, 999), bytes(SHARD_BYTES), "but worker 1 has ticket"),
        (Frame(Kind.PUSH, 0, 1, -2), bytes(SHARD_BYTES), "but worker 1 has ticket"),
        (Frame(Kind.PUSH, 1, 1, -1), bytes(SHARD_BYTES), "PUSH has no ticket"),
        (Frame(Kind.APPLY), b"", "APPLY came before all shards"),
        (
            Frame(Kind.PUSH, 0, 1),
            bytes(SHARD_BYTES - 1),
            f"{SHARD_BYTES - 1} bytes, expected {SHARD_BYTES}",
        ),
        (
            Frame(Kind.PUSH, 0, 2),
            bytes(SHARD_BYTES),
            f"{SHARD_BYTES} bytes, expected {2 * SHARD_BYTES}",
        ),
        (Frame(Kind.PUSH, 0, 0), b"", r"PUSH of shards 0 to -1"),
        (Frame(Kind.PUSH, 10_000, 1), bytes(SHARD_BYTES), "PUSH of shards 10000"),
        (Frame(Kind.PUSH, 0, 0xFFFFFFFE), bytes(SHARD_BYTES), "PUSH of shards"),
        (Frame(Kind.PUSH, 0xFFFFFFFF, 0), bytes(3), "3 bytes, expected"),
        (Frame(Kind.INIT, 0, 1), bytes(SHARD_BYTES), "INIT was not requested"),
        (Frame(Kind.SKIP, ticket=5), b"", "but worker 1 has ticket"),
        (Frame(Kind.SKIP), b"x", "1 bytes, expected 0"),
        (Frame(Kind.SETTLE, 1), b"", "SETTLE must go to server 0"),
        (Frame(Kind.WELCOME), b"", "a worker sent WELCOME"),
        (Frame(Kind.MEMORY), b"", "a worker sent MEMORY"),
        (Frame(Kind.BYE), b"{}", "malformed BYE"),
        (Frame(Kind.BYE), b"[1]", "malformed BYE"),
        (Frame(Kind.BYE), b'{"wait_s": 1}', "left before the run was over"),
        (Frame(Kind.PUSH, 0, 1), bytes(70_000), "oversized frame: it has 70000 bytes of payload"),
    ],
)
def test_what_a_worker_may_not_send_loses_that_worker_only(tmp_path, frame, payload, reason):
    plan = config(tmp_path, workers=2, slices_per_step=2)
    server = Served(plan, SECRET)
    other = Worked(plan, SECRET, 0)
    assert other.asked.wait(PATIENCE_S)  # for the initial weights: the insider has none
    insider = Insider(plan, 1)
    number = insider.ticket()
    of_ticket = frame.kind in (Kind.PUSH, Kind.SKIP, Kind.APPLY)
    if of_ticket and frame.ticket == NO_TICKET and "has no ticket" not in reason:
        frame = frame._replace(ticket=number)
    insider.connection.send(frame, payload)
    with pytest.raises(Exception, match=reason):
        raise AssertionError(insider.reason())
    other.join()
    stats = server.result()
    assert stats["status"] == "ok"
    assert set(stats["updates"]) == {8}
    assert [lost["worker"] for lost in stats["lost"]] == [1]


def test_a_shard_pushed_twice_for_one_ticket_is_refused(tmp_path):
    plan = config(tmp_path, workers=2, slices_per_step=2)
    server = Served(plan, SECRET)
    other = Worked(plan, SECRET, 0)
    assert other.asked.wait(PATIENCE_S)  # for the initial weights: the insider has none
    insider = Insider(plan, 1)
    number = insider.ticket()
    for _ in range(2):
        insider.connection.send(Frame(Kind.PUSH, 0, 1, number), bytes(SHARD_BYTES))
    assert "shard 0 was pushed already" in insider.reason()
    other.join()
    assert set(server.result()["updates"]) == {8}


@pytest.mark.slow
def test_an_initialiser_given_up_half_way_changes_nothing_when_it_goes_on(
    tmp_path, caplog, monkeypatch
):
    half_way, silent_s = threading.Event(), Member.compute_silence_s

    def long(member, now, awake_since):
        """The insider counts as silent for long as soon as it is at all."""
        late_s = DEADLINE_S * (half_way.is_set() and member.worker == 0)
        return silent_s(member, now + late_s, awake_since)

    monkeypatch.setattr(Member, "compute_silence_s", long)
    plan = config(tmp_path, workers=2, shard_bytes=1 << 20)
    server = Served(plan, SECRET)
    while not get_rendezvous_path(plan.rendezvous, 0).exists():
        time.sleep(0.01)
    insider = Insider(plan, 0)
    insider.until(Kind.INIT)
    layout = FlatSpace(small_model()).layout
    connection, n_bytes = insider.connection, layout.weight_bytes
    connection.send(Frame(Kind.INIT, BUFFERS), bytes(layout.buffer_bytes))
    head = connection._out.pack_frame(Frame(Kind.INIT, 0, 1, length=n_bytes))
    connection.sock.sendall(head + bytes(n_bytes // 2))
    half_way.set()
    reached, go = threading.Event(), threading.Event()

    def pause(worker, ticket, channel):
        if ticket.number == 1:
            reached.set()
            go.wait(PATIENCE_S)

    other = Worked(plan, SECRET, 1, before_push=pause)  # it starts when the insider is given up
    assert reached.wait(PATIENCE_S)
    connection.sock.sendall(bytes(n_bytes - n_bytes // 2))
    until(lambda: "INIT from a worker that was declared lost" in caplog.text)
    go.set()
    other.join()
    stats = server.result()
    assert stats["status"] == "ok"
    assert [lost["worker"] for lost in stats["lost"]] == [0]
    for ours, theirs in zip(other.model.parameters(), single_run(plan).parameters(), strict=True):
        assert torch.equal(ours, theirs)


# --- headers -------------------------------------------------------------------------------------


@given(st.binary(min_size=HEADER_BYTES, max_size=HEADER_BYTES))
@settings(max_examples=300)
def test_no_random_header_is_accepted(head):
    with pytest.raises(ProtocolError, match="malformed"):
        Header(KEY).unpack_frame(head, 1 << 20)


def test_a_header_is_good_once_in_order_and_on_its_own_connection():
    sender, receiver = Header(KEY), Header(KEY)
    heads = [sender.pack_frame(Frame(Kind.PUSH, n, 1, 5, 2, 100)) for n in range(3)]
    assert receiver.unpack_frame(heads[0], 100) == (Frame(Kind.PUSH, 0, 1, 5, 2, 100), False)
    assert receiver.unpack_frame(heads[0], 100)[1] is True  # a replay
    with pytest.raises(ProtocolError, match="number 2, expected 1"):
        receiver.unpack_frame(heads[2], 100)
    with pytest.raises(
        ProtocolError, match="oversized frame: it has 100 bytes of payload, at most 99"
    ):
        receiver.unpack_frame(heads[1], 99)
    assert receiver.unpack_frame(heads[1], 100)[1] is False
    with pytest.raises(ProtocolError, match="tag"):
        Header(b"o" * 32).unpack_frame(heads[0], 100)


# --- the secret ----------------------------------------------------------------------------------


def test_the_secret_travels_in_a_file_that_others_cannot_read(tmp_path):
    path = tmp_path / "secret"
    write_secret(path, SECRET)
    assert path.stat().st_mode & 0o777 == 0o600
    assert load_secret(path) == SECRET
    with pytest.raises(FileExistsError):
        write_secret(path, SECRET)
    for mode in (0o644, 0o640, 0o601):
        path.chmod(mode)
        with pytest.raises(
            ValueError, match=f"mode 0{mode:o} lets others read the secret; chmod 600"
        ):
            load_secret(path)


@pytest.mark.parametrize("text", ["", "zz", "abcd"])
def test_a_secret_that_is_none_is_not_accepted(tmp_path, text):
    path = tmp_path / "file"
    path.write_text(text)
    path.chmod(0o600)
    with pytest.raises(ValueError, match="secret"):
        load_secret(path)
