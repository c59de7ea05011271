"""Servers whose workers come, leave and return: who has which place, and every ticket once."""

from __future__ import annotations

import contextlib
import ctypes
import fcntl
import json
import os
import random
import signal
import socket
import struct
import threading
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from policy_reference import hyper_of
from process_groups import forking
from ps_harness import PATIENCE_S, Served, Worked, config, serve_run

from launching import until
from stratbench.extensions.elastic.servers import run as elastic_run
from stratbench.extensions.elastic.servers.channel import ReturningChannel, RunOverError
from stratbench.extensions.elastic.servers.config import ElasticConfig, ElasticServerConfig
from stratbench.extensions.elastic.servers.evaluations import parse_score_message
from stratbench.extensions.elastic.servers.journal import (
    is_state_of_all_servers_saved,
    read_journal,
    read_run_end_mark,
)
from stratbench.extensions.elastic.servers.saved_state import (
    StateError,
    load_server_state,
    pack_tensors,
    unpack_tensors,
)
from stratbench.extensions.servers.policies.policies import POLICIES as ALL_POLICIES
from stratbench.extensions.servers.policies.policies import make_policy
from stratbench.extensions.servers.ps.client import Channel
from stratbench.extensions.servers.ps.server_config import ServerConfig
from stratbench.extensions.servers.ps.server_run import ServerRun
from stratbench.extensions.servers.ps.shard import Shard
from stratbench.extensions.servers.ps.tickets import CompactIntSet, intersect_sets
from stratbench.extensions.servers.wire.frames import Frame, Kind, ProtocolError
from stratbench.extensions.servers.wire.handshake import JoinLater, JoinRefused
from stratbench.extensions.servers.wire.link import Left
from stratbench.extensions.servers.wire.transport import (
    Closed,
    Connection,
    Silent,
    get_rendezvous_path,
)

pytestmark = pytest.mark.timeout(300)

SECRET = b"s" * 32
#: With which a run may be elastic and is tried here.
POLICIES = ["ps-async", "ps-dana", "ps-backup", "ps-ssp", "ps-ormo"]
PLACES = 4


@pytest.fixture(autouse=True)
def one_thread():
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


def elastic(folder, **changed):
    """A run of up to PLACES workers, two epochs of ten steps."""
    own = {k: changed.pop(k) for k in list(changed) if k in ElasticConfig.__dataclass_fields__}
    facts = {"workers": PLACES, "slices_per_step": PLACES, "epochs": 2, "steps_per_epoch": 10}
    facts |= {"snapshot_dir": str(folder / "snapshots")}
    as_gang = config(folder, **facts | changed)
    return ElasticServerConfig(
        **vars(as_gang), elastic=ElasticConfig(str(folder / "elastic"), **own)
    )


def serve_all(plan):
    return [Served(replace(plan, server=k), SECRET) for k in range(plan.n_servers)]


def events(plan, kind):
    return [e for e in read_journal(plan.elastic.folder) if e["event"] == kind]


def slowly(worker, ticket, channel):
    time.sleep(0.003 * (1 + worker % 3))


class Held:
    """What workers do before each push: `slowly`, but from ticket `first` on only once `go` is set.

    So a run cannot be over before a test has done what it has to do in the middle of one.
    """

    def __init__(self, first):
        self.go, self._first = threading.Event(), first

    def __call__(self, worker, ticket, channel):
        if ticket.number >= self._first:
            assert self.go.wait(PATIENCE_S)
        slowly(worker, ticket, channel)


def history(folder, policy, n_servers, seed, numbers=12):
    """A run whose workers join, leave and are lost at random moments; returns its servers' reports."""
    rng = random.Random(seed)
    plan = elastic(folder, policy=policy, n_servers=n_servers)
    servers, here, came, come = serve_all(plan), [], [], 0
    deadline = time.monotonic() + PATIENCE_S
    while not all(s.done for s in servers):
        assert time.monotonic() < deadline, f"the run of seed {seed} hangs"
        if come < numbers and rng.random() < 0.6:
            here.append(Worked(plan, SECRET, come, before_push=slowly, incarnation=1))
            came.append(here[-1])
            come += 1
        elif here and come < numbers and rng.random() < 0.5:
            worker = here.pop(rng.randrange(len(here)))
            if hasattr(worker, "channel"):
                rng.choice([worker.channel.leave, worker.channel._close_connections])()
        time.sleep(rng.uniform(0.0, 0.05))
        if come == numbers and not any(w.running for w in here):
            here.append(
                Worked(plan, SECRET, come, before_push=slowly, incarnation=1)
            )  # or nobody finished it
            came.append(here[-1])
            come, numbers = come + 1, numbers + 1
    # Who came too late dials on, and would meet another test's server on the same port.
    for server in range(n_servers):
        get_rendezvous_path(plan.rendezvous, server).write_text("[]")
    until(lambda: all(hasattr(w, "channel") or not w.running for w in came))
    found = [s.result() for s in servers]
    check_run(plan, found)
    return plan, found


def check_run(plan, found):
    n = plan.epochs * plan.steps_per_epoch * plan.slices_per_step
    assert [(s["status"], s["error"]) for s in found] == [("ok", None)] * len(found)
    assert found[0]["tickets_settled"] == n
    assert sum(w["tickets"] for w in found[0]["workers"]) >= n
    for server in found:
        applied = [sum(c) + d for c, d in zip(server["staleness"], server["dropped"], strict=True)]
        assert set(applied) == {n}  # every shard saw every ticket once
        assert all(0 <= w["place"] < plan.workers for w in server["workers"])
    assert [s["epoch"] for s in found[0]["elastic"]["scores"]] == list(range(plan.epochs))
    assert places_are_held_one_at_a_time(plan)


def places_are_held_one_at_a_time(plan):
    held = {}
    for event in read_journal(plan.elastic.folder):
        if event["event"] == "join":
            assert event["place"] not in held.values()
            held[event["worker"]] = event["place"]
        elif event["event"] in ("leave", "loss"):
            held.pop(event["worker"], None)
    return True


#: Random histories of each policy and number of servers: STRATBENCH_HISTORIES=50 takes two to ten minutes.
HISTORIES = int(os.environ.get("STRATBENCH_HISTORIES", "2"))


@pytest.mark.slow
@pytest.mark.parametrize("n_servers", [1, 2])
@pytest.mark.parametrize("policy", POLICIES)
def test_every_ticket_is_settled_once_whoever_comes_and_goes(tmp_path, policy, n_servers):
    for seed in range(HISTORIES):
        history(tmp_path / str(seed), policy, n_servers, seed)


class Returning(Worked):
    """A worker that knocks, and goes on with whatever life of the servers there is."""

    def __init__(self, plan, number, silence_s=PATIENCE_S, **habits):
        self.leaving = threading.Event()
        self._silence_s = silence_s
        super().__init__(plan, SECRET, number, **habits)

    def connect(self, config, secret, worker, transport, wire):
        def join(incarnation):
            rest = (transport, wire, 1.0, None, config.n_servers, incarnation)
            return Channel.connect(config.rendezvous, worker, self.flat, secret, *rest)

        channel = ReturningChannel(
            join, config.rendezvous, config.elastic.folder, self.leaving, self._silence_s
        )
        channel._send_initial_tensors = channel._channel._send_initial_tensors
        return channel


class ServerProcesses:
    """The servers of a run as processes; an incarnation begins with `start` and ends with `end`."""

    target = staticmethod(serve_run)

    def __init__(self, plan):
        self.plan, self.processes = replace(plan, stats_path=str(plan.rendezvous) + ".stats"), []

    def start(self, incarnation=1, resumes=False):
        own = replace(self.plan.elastic, incarnation=incarnation, resumes_saved_state=resumes)
        plans = [replace(self.plan, server=k, elastic=own) for k in range(self.plan.n_servers)]
        plans = [replace(p, stats_path=f"{p.stats_path}{p.server}") for p in plans]
        self.processes = [forking().Process(target=self.target, args=(p, SECRET)) for p in plans]
        for process in self.processes:
            process.start()

    def end(self, signum):
        for process in self.processes:
            os.kill(process.pid, signum)
        self.wait()

    def wait(self):
        for process in self.processes:
            process.join(PATIENCE_S)
            assert not process.is_alive(), "a server hangs"

    def statistics(self):
        self.wait()
        paths = [Path(f"{self.plan.stats_path}{k}") for k in range(self.plan.n_servers)]
        return [json.loads(path.read_text()) for path in paths]


@pytest.fixture
def processes():
    """Makes server processes, and ends them with the test."""
    made = []

    def make(plan):
        made.append(ServerProcesses(plan))
        return made[-1]

    yield make
    for each in made:
        for process in each.processes:
            process.kill()


@pytest.mark.slow
@pytest.mark.parametrize("signum", [signal.SIGKILL, signal.SIGTERM])
@pytest.mark.parametrize(("policy", "n_servers"), [("ps-ormo", 1), ("ps-backup", 2)])
def test_another_incarnation_of_the_servers_goes_on(tmp_path, processes, policy, n_servers, signum):
    plan = elastic(
        tmp_path, policy=policy, n_servers=n_servers, save_interval_s=0.1, steps_per_epoch=60
    )
    servers = processes(plan)
    servers.start()
    held = Held(first=200)
    workers = [Returning(plan, number, before_push=held) for number in range(2)]
    until(lambda: is_state_of_all_servers_saved(Path(plan.elastic.folder), n_servers), PATIENCE_S)
    until(lambda: sum(len(w.tickets) for w in workers) > 100, PATIENCE_S)
    servers.end(signum)
    held.go.set()
    assert read_run_end_mark(plan.elastic.folder) is None
    servers.start(incarnation=2, resumes=True)
    workers.append(Returning(plan, 2, before_push=slowly))
    for worker in workers:
        worker.join()
    found = servers.statistics()
    n = 2 * 60 * PLACES
    for server in found:
        assert (server["status"], server["error"]) == ("ok", None)
        applied = [sum(c) + d for c, d in zip(server["staleness"], server["dropped"], strict=True)]
        assert set(applied) == {n}
    assert found[0]["tickets_settled"] == n
    own = found[0]["elastic"]
    assert 0 < own["settled_before"] <= n
    if signum == signal.SIGTERM and n_servers == 1:
        assert own["done_twice"] == 0  # the state was saved as it was
    assert [w.channel.returns for w in workers] == [1, 1, 0]
    settled = own["settled_before"] + sum(w["tickets"] for w in found[0]["workers"])
    assert settled == n
    assert read_run_end_mark(plan.elastic.folder) == {"error": None}
    with pytest.raises(RunOverError):
        Returning(plan, 9).join()


# --- places ----------------------------------------------------------------------------------------


def has_read(member):
    """Whether nothing is on its way to `member`: all is sent, or its worker has closed the connection.

    A heartbeat that meets a closed connection ends the sender, and what is queued behind it stays.
    """
    if not member.sender.is_alive():
        return True
    return not member.has_queued_replies and not member._sending.locked()


def weights_at_the_end(monkeypatch, plan, join):
    """The servers' weights after a run whose tickets are pushed in the order of their numbers."""
    turn, changed, kept = [0], threading.Condition(), {}
    finish_push, close, pushed = ServerRun._finish_push, ServerRun.close, {}

    def finish_and_pass_on(run, member):
        ticket = member.ticket
        finish_push(run, member)
        for other in list(run._members.values()):  # all who may read now have read
            until(lambda other=other: has_read(other), PATIENCE_S)
        with changed:
            pushed[ticket] = pushed.get(ticket, 0) + 1
            turn[0] += pushed[ticket] == plan.n_servers
            changed.notify_all()

    def close_and_keep(run):
        close(run)
        kept.update({k: s.policy.weights.clone() for k, s in run._store.shards.items()})

    def wait_for_turn(worker, ticket, channel):
        if ticket.number == 0:
            until(lambda: len(workers) == PLACES and all(w.tickets for w in workers), PATIENCE_S)
        with changed:
            assert changed.wait_for(lambda: turn[0] == ticket.number, PATIENCE_S)

    monkeypatch.setattr(ServerRun, "_finish_push", finish_and_pass_on)
    monkeypatch.setattr(ServerRun, "close", close_and_keep)
    workers = []
    servers = serve_all(plan)
    for number in range(PLACES):
        workers.append(join(plan, number, wait_for_turn))
        until(lambda number=number: hasattr(workers[number], "channel"), PATIENCE_S)
    for worker in workers:
        worker.join()
    stats = [server.result() for server in servers]
    assert [s["status"] for s in stats] == ["ok"] * plan.n_servers
    return kept, [[t.number for t in w.tickets] for w in workers]


@pytest.mark.parametrize("n_servers", [1, 2])
@pytest.mark.parametrize("policy", [*POLICIES, "ps-preview", "ps-kbatch"])
def test_with_all_workers_from_the_start_it_is_the_run_of_a_gang_bit_for_bit(
    tmp_path, monkeypatch, policy, n_servers
):
    plan = elastic(tmp_path / "elastic", policy=policy, n_servers=n_servers, steps_per_epoch=4)
    plan = replace(plan, snapshot_dir=None)
    told = {key: value for key, value in vars(plan).items() if key != "elastic"}
    gang = ServerConfig(**told | {"rendezvous": str(tmp_path / "gang")})
    ours, tickets = weights_at_the_end(
        monkeypatch, plan, lambda *a: Worked(a[0], SECRET, a[1], before_push=a[2], incarnation=1)
    )
    monkeypatch.undo()
    theirs, gangs_tickets = weights_at_the_end(
        monkeypatch, gang, lambda *a: Worked(a[0], SECRET, a[1], before_push=a[2])
    )
    assert tickets == gangs_tickets
    assert ours.keys() == theirs.keys()
    assert all(torch.equal(ours[k], theirs[k]) for k in theirs)


def test_who_leaves_says_so_before_its_training_ends_the_connection(tmp_path):
    """`leave` is another thread's than the training, which ends as soon as it sees that."""
    plan = replace(elastic(tmp_path), workers=2)
    servers, held = serve_all(plan), Held(first=0)
    here = [Worked(plan, SECRET, n, before_push=held, incarnation=1) for n in (0, 1)]
    until(lambda: all(w.tickets for w in here), PATIENCE_S)
    leaving = here[0].channel
    say = leaving._send_farewell

    def say_late(kind):
        held.go.set()
        here[0]._start_thread.join(0.5)  # it would have closed the connection by then
        say(kind)

    leaving._send_farewell = say_late
    leaving.leave()
    with pytest.raises(Left):
        here[0].join()
    here[1].join()
    (found,) = [server.result() for server in servers]
    check_run(plan, [found])
    assert found["lost"] == []


def test_a_place_comes_back_and_a_number_does_not(tmp_path):
    plan = replace(elastic(tmp_path), workers=2)
    servers = serve_all(plan)
    held = Held(first=10)
    here = [Worked(plan, SECRET, n, before_push=held, incarnation=1) for n in (5, 3)]
    until(lambda: all(w.tickets for w in here), PATIENCE_S)
    with pytest.raises(
        JoinLater, match="the cell has 2 slots, and all have workers; try again later"
    ):
        Worked(plan, SECRET, 8, incarnation=1).join()
    first = here[0]
    first.channel.leave()
    with pytest.raises(JoinRefused, match="worker 5 was here and cannot come back"):
        Worked(plan, SECRET, 5, incarnation=1).join()
    here[0] = Worked(plan, SECRET, 8, before_push=slowly, incarnation=1)
    until(lambda: here[0].tickets, PATIENCE_S)
    held.go.set()
    with pytest.raises(Left):
        first.join()
    for worker in here:
        worker.join()
    (found,) = [server.result() for server in servers]
    check_run(plan, [found])
    places = {w["worker"]: w["place"] for w in found["workers"]}
    assert places[8] == places[5]
    assert set(places.values()) == {0, 1}
    assert found["lost"] == []
    (left,) = events(plan, "leave")
    assert left["worker"] == 5
    assert [r["from"] for r in found["reassigned"]] == [5] * len(left["tickets"])
    assert found["refused"] == 1  # a spare that asks too early has done nothing wrong


def test_a_worker_of_another_incarnation_of_the_servers_is_sent_away(tmp_path):
    plan = elastic(tmp_path, incarnation=4)
    servers = serve_all(plan)
    with pytest.raises(JoinLater, match=r"restarted .incarnation 4"):
        Worked(plan, SECRET, 0, incarnation=3).join()
    with pytest.raises(JoinRefused, match="does not know this job's secret"):
        Worked(plan, b"x" * 32, 0, incarnation=4).join()
    Worked(plan, SECRET, 0, incarnation=4).join()
    check_run(plan, [server.result() for server in servers])


def test_training_outlives_its_last_worker(tmp_path):
    plan = elastic(tmp_path)
    servers = serve_all(plan)
    held = Held(first=10)
    only = Worked(plan, SECRET, 0, before_push=held, incarnation=1)
    until(lambda: len(only.tickets) > 4, PATIENCE_S)
    only.channel._close_connections()
    until(lambda: events(plan, "loss"), PATIENCE_S)
    held.go.set()
    time.sleep(0.1)
    assert not servers[0].done
    Worked(plan, SECRET, 1, incarnation=1).join()
    (found,) = [server.result() for server in servers]
    check_run(plan, [found])
    assert [w["worker"] for w in found["lost"]] == [0]


def set_loopback(up: bool) -> None:
    """The network of this process's own, on or off: off, all that is sent is lost without a word."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as any_socket:
        flags = struct.pack("16sH14x", b"lo", 0x1 if up else 0)  # IFF_UP
        fcntl.ioctl(any_socket, 0x8914, flags)  # SIOCSIFFLAGS


def cut_the_network(folder: Path, out: Any) -> None:
    """Train with a worker whose network is cut, then with another; in a network of its own, or say so."""
    if ctypes.CDLL(None, use_errno=True).unshare(
        0x40000000 | 0x10000000
    ):  # CLONE_NEWNET, CLONE_NEWUSER
        out.put(("skip", os.strerror(ctypes.get_errno())))
        return
    set_loopback(True)
    elastic_run._VANISHED_S = 2.0
    plan = elastic(folder)  # whose heartbeat is waited for longer than any test takes
    servers = serve_all(plan)
    held = Held(first=10)
    first = Worked(plan, SECRET, 0, "tcp", before_push=held, incarnation=1)
    until(lambda: len(first.tickets) > 4, PATIENCE_S)
    set_loopback(False)
    held.go.set()
    (lost,) = until(lambda: events(plan, "loss"), PATIENCE_S)
    set_loopback(True)
    Worked(plan, SECRET, 1, "tcp", incarnation=1).join()
    found = [server.result() for server in servers]
    check_run(plan, found)
    out.put(("lost", lost["reason"]))


@pytest.mark.slow
def test_a_worker_whose_host_is_gone_is_lost_long_before_its_heartbeat_is_overdue(tmp_path):
    context = forking()
    out = context.SimpleQueue()
    process = context.Process(target=cut_the_network, args=(tmp_path, out))
    process.start()
    process.join(PATIENCE_S)
    assert not out.empty(), process.exitcode
    what, reason = out.get()
    if what == "skip":
        pytest.skip(f"no network of its own: {reason}")
    assert reason == "the peer's host has not answered for 2 s"


@pytest.mark.slow
def test_the_host_of_a_process_that_stands_still_answers_for_it():
    """Also where that has so much to read that nothing more is sent."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        ours = Connection(socket.create_connection(listener.getsockname()))
        theirs, _ = listener.accept()
    ours.set_frame_keys(b"k" * 32, b"k" * 32, 1 << 30)
    ours.vanished_s, ours.silence_s = 0.5, 4.0

    def flood() -> None:
        with contextlib.suppress(Closed):
            while True:
                ours.send(Frame(Kind.OK), bytes(1 << 20))

    sending = threading.Thread(target=flood)
    sending.start()
    with theirs, pytest.raises(Silent, match="the peer has sent nothing for 4 s"):
        ours.receive()
    ours.close()
    sending.join(PATIENCE_S)


@pytest.mark.parametrize("policy", POLICIES)
def test_one_worker_alone_trains_where_there_are_places_for_four(tmp_path, policy):
    """A bounded or averaging policy waits for nobody who never came."""
    plan = elastic(tmp_path, policy=policy)
    servers = serve_all(plan)
    Worked(plan, SECRET, 0, incarnation=1).join()
    check_run(plan, [server.result() for server in servers])


# --- evaluation --------------------------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.parametrize("n_servers", [1, 2])
def test_the_first_epoch_that_reaches_the_target_ends_the_run(tmp_path, n_servers):
    """`figures_of` gives the fourth epoch a score of 0.4."""
    plan = elastic(tmp_path, epochs=8, target_score=0.35, n_servers=n_servers)
    servers = serve_all(plan)
    workers = [Worked(plan, SECRET, n, before_push=slowly, incarnation=1) for n in range(3)]
    for worker in workers:
        worker.join()
    found = [server.result() for server in servers]
    assert [s["status"] for s in found] == ["ok"] * n_servers
    own = found[0]["elastic"]
    assert own["finished_at_epoch"] == 3
    assert [s["score"] for s in own["scores"]][:4] == [0.1, 0.2, 0.3, 0.4]
    assert found[0]["train_time_s"] == found[0]["epochs"][3]["end_s"]
    assert found[0]["tickets_settled"] < len_of(plan)
    assert sorted(e for w in workers for e in w.evaluated)[:4] == [0, 1, 2, 3]


def len_of(plan):
    return plan.epochs * plan.steps_per_epoch * plan.slices_per_step


def test_others_train_while_one_evaluates(tmp_path, monkeypatch):
    plan = elastic(tmp_path)
    hold, begun = threading.Event(), threading.Event()
    score = Channel.send_evaluation

    def score_when_told(channel, figures):
        begun.set()
        assert hold.wait(PATIENCE_S)
        return score(channel, figures)

    monkeypatch.setattr(Channel, "send_evaluation", score_when_told)
    servers = serve_all(plan)
    workers = [Worked(plan, SECRET, n, before_push=slowly, incarnation=1) for n in range(3)]
    assert begun.wait(PATIENCE_S)
    of_first_epoch = plan.steps_per_epoch * plan.slices_per_step
    until(lambda: sum(len(w.tickets) for w in workers) > of_first_epoch + 10, PATIENCE_S)
    hold.set()
    for worker in workers:
        worker.join()
    check_run(plan, [server.result() for server in servers])


@pytest.mark.parametrize("goes", ["leave", "_close_connections"])
def test_what_a_worker_that_goes_was_to_evaluate_another_evaluates(tmp_path, monkeypatch, goes):
    plan = elastic(tmp_path)
    score, gone = Channel.send_evaluation, []

    def go_the_first_time(channel, figures):
        if gone:
            return score(channel, figures)
        gone.append(channel.worker)
        getattr(channel, goes)()
        raise Left("gone")

    monkeypatch.setattr(Channel, "send_evaluation", go_the_first_time)
    servers = serve_all(plan)
    workers = [Worked(plan, SECRET, n, before_push=slowly, incarnation=1) for n in range(3)]
    for number, worker in enumerate(workers):
        with contextlib.suppress(Left):
            worker.join()
        assert (number in gone) == (worker.error is not None)
    check_run(plan, [server.result() for server in servers])
    assert len(gone) == 1


def test_a_score_that_is_none_is_refused():
    good = {"test_loss": 1.0, "score": None, "score_error": 0.1}
    assert parse_score_message(good) == good
    for bad in (
        3,
        [],
        {},
        good | {"score": "1"},
        good | {"score": float("inf")},
        good | {"more": 1.0},
    ):
        with pytest.raises(ProtocolError, match="malformed SCORE"):
            parse_score_message(bad)


# --- the saved state ---------------------------------------------------------------------------------


def policy_of(name, workers=3, numel=50):
    hyper = hyper_of(name, lr=0.1, momentum=0.9, workers=workers)
    return make_policy(name, torch.linspace(-1, 1, numel, dtype=torch.float64), hyper, {})


@pytest.mark.parametrize("name", sorted(ALL_POLICIES))
def test_a_policy_goes_on_from_its_saved_state_bit_for_bit(tmp_path, name):
    """Three workers push in turn, one is away for a while; saved at an odd moment, through a file."""
    rng = torch.Generator().manual_seed(1)

    def act(policy, steps, reads):
        for step in steps:
            worker = step % 3
            if step == 7 and policy.options.survives_worker_loss:
                policy.on_leave(2)
            if step == 13 and policy.options.survives_worker_loss:
                policy.on_join(2)
            if worker == 2 and 7 <= step < 13 and policy.options.survives_worker_loss:
                continue
            out = torch.empty_like(policy.weights)
            grads = torch.randn(50, generator=rng, dtype=torch.float64)
            policy.on_push(worker, grads, reads.get(worker, 0))
            reads[worker] = policy.view(worker, out)

    whole, part, reads = policy_of(name), policy_of(name), {}
    act(part, range(10), reads)
    path = tmp_path / "state"
    with path.open("wb") as file:
        packed = json.loads(json.dumps(pack_tensors(part.state(), file)))
    with path.open("rb") as file:
        whole.load(unpack_tensors(packed, file))
    drawn, reads_too = rng.get_state(), dict(reads)
    act(part, range(10, 20), reads)
    rng.set_state(drawn)
    act(whole, range(10, 20), reads_too)
    assert whole.version == part.version
    assert reads == reads_too
    assert torch.equal(whole.weights, part.weights)
    assert torch.equal(
        *(p.view(1, torch.empty_like(p.weights)) and p.weights for p in (whole, part))
    )


@pytest.mark.slow
def test_a_state_that_was_changed_on_the_disk_is_not_gone_on_with(tmp_path):
    plan = elastic(tmp_path, save_interval_s=0.0, steps_per_epoch=40)
    servers = serve_all(plan)
    worker = Worked(plan, SECRET, 0, before_push=slowly, incarnation=1)
    folder = Path(plan.elastic.folder)
    until(lambda: is_state_of_all_servers_saved(folder, 1), PATIENCE_S)
    worker.join()
    servers[0].result()
    saved = load_server_state(folder, 0)
    assert sorted(saved.shards) == list(range(len(saved.shards)))
    (data,) = folder.glob("state0.*.bin")
    whole = bytearray(data.read_bytes())
    whole[len(whole) // 2] ^= 1
    data.write_bytes(whole)
    with pytest.raises(StateError, match="is damaged"):
        load_server_state(folder, 0)


def test_a_policy_that_keeps_what_cannot_be_saved_says_so():
    policy = policy_of("ps-async")
    policy.window = object()
    with pytest.raises(
        TypeError, match="an attribute of a policy is a object, which cannot be saved"
    ):
        policy.state()


def test_what_all_sets_have_in_common():
    sets = [CompactIntSet(5, {7, 9}), CompactIntSet(3, {5, 6, 7}), CompactIntSet(8, {9})]
    assert sorted(intersect_sets(sets)) == [0, 1, 2, 7]
    assert sorted(intersect_sets([CompactIntSet(4, {6})])) == [0, 1, 2, 3, 6]


def test_a_shard_that_goes_on_takes_no_ticket_twice_and_nobody_is_there():
    alive = lambda: True  # noqa: E731
    released = []

    def shard():
        return Shard(0, policy_of("ps-ssp"), lambda *release: released.append(release))

    before, after = shard(), shard()
    for ticket, worker in enumerate((0, 1, 2, 0)):
        before.push(worker, ticket, torch.ones(50, dtype=torch.float64), alive)
    after.load(before.state())
    weights = after.policy.weights.clone()
    assert torch.equal(weights, before.policy.weights)
    assert sorted(after._taken) == [0, 1, 2, 3]
    released.clear()
    after.push(1, 3, torch.ones(50, dtype=torch.float64), alive)
    assert torch.equal(after.policy.weights, weights)
    assert released == [(1, 0)]  # it is answered, and waits for none of those who were there
    after.push(1, 4, torch.ones(50, dtype=torch.float64), alive)
    assert not torch.equal(after.policy.weights, weights)
