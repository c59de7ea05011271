"""Parameter-server runs from end to end: what is trained, counted and kept."""

from __future__ import annotations

import contextlib
import copy
import json
import re
import socket
import threading
import time
from dataclasses import asdict, replace
from types import SimpleNamespace

import pytest
import torch
import torch.nn.functional as F
from ps_harness import (
    HYPER,
    PATIENCE_S,
    Served,
    Worked,
    batch,
    config,
    run_all,
    single_run,
    small_model,
)

from launching import until
from stratbench.extensions.servers.policies import asynchronous
from stratbench.extensions.servers.policies.asynchronous import AsyncPolicy
from stratbench.extensions.servers.policies.policies import POLICIES
from stratbench.extensions.servers.ps import server_run as run_module
from stratbench.extensions.servers.ps.client import Channel, RunEnded
from stratbench.extensions.servers.ps.flat import FlatSpace
from stratbench.extensions.servers.ps.member import Hello, Member
from stratbench.extensions.servers.ps.server_run import ServerRun
from stratbench.extensions.servers.ps.snapshots import load_snapshot
from stratbench.extensions.servers.ps.tickets import Ticket, TicketPlan
from stratbench.extensions.servers.wire import transport as transport_module
from stratbench.extensions.servers.wire.frames import Frame, Kind, ProtocolError
from stratbench.extensions.servers.wire.handshake import JoinRefused
from stratbench.extensions.servers.wire.link import Link
from stratbench.extensions.servers.wire.transport import Closed, Connection, Listeners, Silent

pytestmark = pytest.mark.timeout(300)

SECRET = b"s" * 32
TRANSPORTS = ["tcp", "shm"]


@pytest.fixture(autouse=True)
def one_thread():
    """The server sets torch to one thread; kernels round differently on more."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


def equal_parameters(a, b):
    return all(torch.equal(x, y) for x, y in zip(a.parameters(), b.parameters(), strict=True))


def floats(model):
    return {n: t for n, t in model.state_dict().items() if t.is_floating_point()}


def from_snapshot(folder, epoch, dtype=torch.float64):
    model = small_model(dtype)
    _, weights, buffers = load_snapshot(folder, epoch, wait_s=300)
    FlatSpace(model).load_tensors(weights, buffers)
    return model


# --- what is trained -----------------------------------------------------------------------------


@pytest.mark.parametrize("transport", TRANSPORTS)
@pytest.mark.parametrize("policy", sorted(POLICIES))
def test_one_worker_trains_bit_for_bit_as_without_a_server(tmp_path, policy, transport):
    options = {"pushes_per_batch": 1} if policy == "ps-async-modified" else {}
    plan = config(
        tmp_path,
        policy=policy,
        policy_options=options,
        steps_per_epoch=8,
        snapshot_dir=str(tmp_path),
    )
    _, (worker,) = run_all(plan, transport=transport)
    trained, served = floats(worker.model), floats(from_snapshot(tmp_path, 0))
    # ps-ormo forms the same sums in another order; AdamW's kernels round a shard not as its tensors.
    apart = {"ps-ormo": 1e-12, "ps-preview": 1e-9}.get(policy, 0)
    for name, tensor in floats(single_run(plan)).items():  # BatchNorm's statistics too
        assert float((served[name] - tensor).abs().max()) <= apart, name
        assert float((trained[name] - tensor).abs().max()) <= apart, name


@pytest.mark.parametrize("transport", TRANSPORTS)
@pytest.mark.parametrize("n_servers", [2, 3])
def test_shards_may_lie_with_several_servers(tmp_path, n_servers, transport):
    plan = config(tmp_path, n_servers=n_servers, epochs=2, snapshot_dir=str(tmp_path))
    stats, (worker,) = run_all(plan, transport=transport)
    assert equal_parameters(worker.model, single_run(plan))
    assert equal_parameters(from_snapshot(tmp_path, 1), worker.model)
    assert stats["tickets_settled"] == 8
    assert len(worker.channel.transports) == n_servers


def test_workers_begin_to_join_at_different_servers_and_go_round(tmp_path, monkeypatch):
    doors: dict[int, list[int]] = {0: [], 1: [], 2: [], 3: []}
    join = Channel._join_server

    def noted(channel, rendezvous, server, *rest):
        doors[channel.worker].append(server)
        return join(channel, rendezvous, server, *rest)

    monkeypatch.setattr(Channel, "_join_server", noted)
    plan = config(tmp_path, workers=4, slices_per_step=4, n_servers=3)
    _, workers = run_all(plan)
    assert doors == {0: [0, 1, 2], 1: [1, 2, 0], 2: [2, 0, 1], 3: [0, 1, 2]}
    for worker in workers:  # whatever the order, the rest of the code finds server k in place k
        assert [link.server for link in worker.channel._links] == [0, 1, 2]


def test_a_worker_told_of_another_number_of_servers_does_not_join(tmp_path):
    plan = config(tmp_path, n_servers=2)
    servers = [Served(replace(plan, server=s, start_deadline_s=1.0), SECRET) for s in range(2)]
    flat = FlatSpace(small_model())
    with pytest.raises(JoinRefused, match="the run has 2 servers, but this worker expects 1"):
        Channel.connect(plan.rendezvous, 0, flat, SECRET)
    assert servers[0].result()["status"] == "lost"


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_the_models_dtype_is_kept(tmp_path, dtype):
    plan = config(tmp_path, snapshot_dir=str(tmp_path), hyper={"lr": 0.5})
    _, (worker,) = run_all(plan, dtype=dtype)
    assert worker.flat.weights.dtype == dtype
    assert equal_parameters(worker.model, single_run(plan, dtype))
    assert equal_parameters(from_snapshot(tmp_path, 0, dtype), worker.model)


def averaged_by_hand(plan):
    """N replicas with their own BatchNorm, one SGD step on the mean gradient of each step's slices.

    Returns the model with the replicas' mean buffers.
    """
    replicas = [small_model() for _ in range(plan.slices_per_step)]
    leader = replicas[0]
    optimizer = torch.optim.SGD(leader.parameters(), **plan.hyper)
    tickets = TicketPlan(plan.epochs, plan.steps_per_epoch, plan.slices_per_step)
    for step in range(plan.epochs * plan.steps_per_epoch):
        for slice_, replica in enumerate(replicas):
            replica.zero_grad()
            x, y = batch(tickets.get_ticket(step * plan.slices_per_step + slice_))
            F.cross_entropy(replica(x), y).backward()
        for parameters in zip(*(r.parameters() for r in replicas), strict=True):
            parameters[0].grad = sum(p.grad for p in parameters) / len(parameters)
        optimizer.step()
        for replica in replicas[1:]:
            for mine, theirs in zip(replica.parameters(), leader.parameters(), strict=True):
                mine.data.copy_(theirs.data)
    result = copy.deepcopy(leader)
    for buffers in zip(result.buffers(), *(r.buffers() for r in replicas), strict=True):
        if buffers[0].is_floating_point():
            buffers[0].copy_(sum(buffers[1:]) / plan.slices_per_step)
    return result


@pytest.mark.parametrize("transport", TRANSPORTS)
@pytest.mark.parametrize("workers", [2, 4])
def test_sync_is_sgd_on_the_mean_gradient(tmp_path, workers, transport):
    plan = config(
        tmp_path,
        policy="ps-sync",
        workers=workers,
        slices_per_step=workers,
        steps_per_epoch=20,
        snapshot_dir=str(tmp_path),
    )
    stats, trained = run_all(plan, transport=transport)
    reference = floats(averaged_by_hand(plan))
    served = floats(from_snapshot(tmp_path, 0))
    for name, tensor in reference.items():
        assert (served[name] - tensor).abs().max() < 1e-12, name
    for worker in trained:
        assert [t.slice for t in worker.tickets] == [trained.index(worker)] * 20
    assert stats["staleness_all_shards"] == [20 * workers * len(stats["updates"])]
    assert set(stats["updates"]) == {20}


def test_transports_agree_bit_for_bit_alone_and_mixed(tmp_path):
    results = []
    for number, mix in enumerate((["tcp"] * 3, ["shm"] * 3, ["shm", "tcp", "auto"])):
        folder = tmp_path / str(number)
        plan = config(
            folder,
            policy="ps-sync",
            workers=3,
            slices_per_step=3,
            steps_per_epoch=10,
            snapshot_dir=str(folder / "snapshots"),
        )
        server = Served(plan, b"s" * 32)
        workers = [Worked(plan, b"s" * 32, w, transport) for w, transport in enumerate(mix)]
        for worker in workers:
            worker.join()
        used = [row["transport"] for row in server.result()["workers"]]
        assert used == [t.replace("auto", "shm") for t in mix]
        results.append(floats(from_snapshot(folder / "snapshots", 0)))
    for other in results[1:]:
        assert all(torch.equal(other[name], tensor) for name, tensor in results[0].items())


@pytest.mark.parametrize("policy", sorted(POLICIES))
@pytest.mark.parametrize("n_servers", [1, 2])
def test_every_policy_settles_every_ticket_once(tmp_path, policy, n_servers):
    """Ten tickets for three workers: at the end some are idle while others still work."""
    plan = config(
        tmp_path,
        policy=policy,
        workers=3,
        steps_per_epoch=5,
        slices_per_step=2,
        n_servers=n_servers,
    )
    if policy == "ps-sync":
        plan = replace(plan, slices_per_step=3)
    stats, workers = run_all(plan)
    numbers = sorted(t.number for w in workers for t in w.tickets)
    assert numbers == list(range(5 * plan.slices_per_step))
    assert stats["tickets_settled"] == len(numbers)
    n_shards = len(stats["updates"])
    assert sum(stats["staleness_all_shards"]) + sum(stats["dropped"]) == len(numbers) * n_shards
    assert [w["tickets"] for w in stats["workers"]] == [len(w.tickets) for w in workers]
    assert {w.channel.evaluator for w in workers} == {0}


def test_a_bounded_policy_does_not_wait_for_a_worker_that_has_no_batch(tmp_path):
    """Worker 1 may be 0 pushes ahead, and has the last ticket when worker 0 runs out of them."""

    def slowly(worker, ticket, channel):
        time.sleep(0.05 * (worker == 0))

    for steps in (4, 5):
        folder = tmp_path / str(steps)
        plan = config(
            folder,
            policy="ps-ssp",
            policy_options={"staleness_bound": 0},
            workers=2,
            steps_per_epoch=steps,
        )
        stats, _ = run_all(plan, before_push=slowly)
        assert stats["tickets_settled"] == steps


# --- overflowed steps ------------------------------------------------------------------------------


@pytest.mark.parametrize("n_servers", [1, 2])
@pytest.mark.parametrize("transport", TRANSPORTS)
def test_a_skipped_step_settles_its_ticket_and_moves_nothing(tmp_path, transport, n_servers):
    plan = config(tmp_path, steps_per_epoch=6, n_servers=n_servers, hyper={"lr": 0.1})
    stats, (worker,) = run_all(
        plan,
        transport=transport,
        before_push=lambda worker, ticket, channel: 0 if ticket.number > 3 else None,
        scaled=True,
    )
    reference = single_run(replace(plan, steps_per_epoch=4))
    assert equal_parameters(worker.model, reference)
    assert stats["workers"][0]["skips"] == 2
    assert stats["tickets_settled"] == 6
    assert set(stats["updates"]) == {4}


def test_a_skip_counts_in_a_barrier(tmp_path):
    plan = config(tmp_path, policy="ps-sync", workers=2, slices_per_step=2, steps_per_epoch=5)

    def skips(worker, ticket, channel):
        return 0 if worker == 0 and ticket.step in (1, 3) else None

    stats, _ = run_all(plan, before_push=skips, scaled=True)
    assert set(stats["updates"]) == {5}  # the other worker's gradients made those steps
    assert [w["skips"] for w in stats["workers"]] == [2, 0]


@pytest.mark.parametrize(
    ("policy", "told"),
    [
        *[("ps-async", told) for told in ([], [0], [0, 1])],
        *[(policy, [1]) for policy in sorted(POLICIES.keys() - {"ps-sync"})],
    ],
)
def test_a_ticket_counts_once_where_its_worker_died_after_some_verdicts(tmp_path, policy, told):
    """All shards have left; of the two servers, those in `told` have heard that they count."""
    plan = config(
        tmp_path,
        policy=policy,
        workers=3,
        slices_per_step=3,
        steps_per_epoch=6,
        n_servers=2,
        epochs=2,
    )

    def dies(worker, ticket, channel):
        if worker != 1 or ticket.number != 1:
            return 0 if ticket.number % 5 == 4 else None

        def end_push(overflowed):
            channel._wait_for_senders()
            for server in told:
                link = channel._links[server]
                link.connection.send(Frame(Kind.APPLY, ticket=ticket.number))
            time.sleep(0.05)
            channel._close_connections()
            raise RuntimeError("killed")

        channel._send_end_of_push = end_push

    servers = [Served(replace(plan, server=s), SECRET) for s in range(2)]
    transports = ("tcp", "shm", "tcp")
    workers = [
        Worked(plan, SECRET, w, t, before_push=dies, scaled=True) for w, t in enumerate(transports)
    ]
    for worker in (workers[0], workers[2]):
        worker.join()
    with pytest.raises(RuntimeError, match="killed"):
        workers[1].join()
    stats = [server.result() for server in servers]
    assert [s["status"] for s in stats] == ["ok", "ok"]
    assert [x["worker"] for x in stats[0]["lost"]] == [1]
    assert stats[0]["tickets_settled"] == 36
    for s in stats:
        counted = [sum(c) + d for c, d in zip(s["staleness"], s["dropped"], strict=True)]
        assert set(counted) == {36 - 7}  # seven have overflowed


# --- warm-up -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("scaled", [False, True])
@pytest.mark.parametrize("n_servers", [1, 2])
@pytest.mark.parametrize("transport", TRANSPORTS)
def test_a_rehearsal_sends_what_a_step_sends_and_leaves_no_trace(
    tmp_path, transport, n_servers, scaled, monkeypatch
):
    sent, send = [], Connection.send

    def noted(connection, frame, payload=b""):
        if frame.kind in (Kind.PUSH, Kind.SKIP, Kind.APPLY):
            sent.append((frame.kind, frame.shard, frame.count, frame.ticket, len(payload)))
        send(connection, frame, payload)

    monkeypatch.setattr(Connection, "send", noted)
    plan = config(tmp_path, steps_per_epoch=5, n_servers=n_servers, snapshot_dir=str(tmp_path))
    stats, (worker,) = run_all(plan, transport=transport, scaled=scaled, rehearsals=2)
    by_ticket = {n: sorted(s[:3] + s[4:] for s in sent if s[3] == n) for n in range(-1, 5)}
    assert by_ticket.pop(-1) == sorted(by_ticket[0] * 2)
    assert all(frames == by_ticket[0] for frames in by_ticket.values())
    reference = single_run(plan)
    assert equal_parameters(worker.model, reference)
    served = floats(from_snapshot(tmp_path, 0))
    assert all(torch.equal(served[name], t) for name, t in floats(reference).items())
    layout, row = worker.flat.layout, stats["workers"][0]
    if n_servers == 1:
        assert row["bytes_in"] == 5 * (layout.weight_bytes + layout.buffer_bytes)
        assert row["bytes_in"] == sum(worker.channel.sent_and_received_bytes_by_server[::2])
    assert (row["tickets"], row["skips"], set(stats["updates"])) == (5, 0, {5})


@pytest.mark.parametrize("policy", ["ps-sync", "ps-async"])
@pytest.mark.parametrize("transport", TRANSPORTS)
def test_a_worker_that_dies_in_its_warm_up_holds_nobody_up(tmp_path, transport, policy):
    plan = config(tmp_path, policy=policy, workers=2, slices_per_step=2, snapshot_dir=str(tmp_path))
    server = Served(plan, SECRET)
    flat = FlatSpace(small_model())
    dying = Channel.connect(plan.rendezvous, 1, flat, SECRET, transport)
    dying.rehearse_exchange()
    other = Worked(plan, SECRET, 0, transport, rehearsals=200)
    until(lambda: hasattr(other, "channel"))
    dying._push_shards(0, 1)  # it is in the middle of a push
    dying._links[0].connection.close()
    if policy == "ps-sync":
        with pytest.raises(RunEnded, match="worker 1 was lost"):
            other.join()
    else:
        other.join()
    stats = server.result()
    assert [entry["worker"] for entry in stats["lost"]] == [1]
    assert stats["status"] == ("lost" if policy == "ps-sync" else "ok")


def test_who_comes_when_the_run_has_failed_is_told_why(tmp_path):
    run = ServerRun(config(tmp_path, policy="ps-sync", workers=2), SECRET)
    run._fail_run("step 0: worker 1 was lost")
    hello = {"worker": 0, "wire": "native", "scaled": False, "start": ""}
    hello["layout"] = asdict(FlatSpace(small_model()).layout)
    with pytest.raises(ProtocolError, match="worker 1 was lost"):
        run.admit_connection(None, hello, b"", "tcp")


# --- what is measured and kept ---------------------------------------------------------------------


def test_snapshots_are_the_state_at_the_end_of_each_epoch(tmp_path):
    plan = config(tmp_path, epochs=3, steps_per_epoch=5, snapshot_dir=str(tmp_path / "kept"))
    stats, _ = run_all(plan)
    for epoch in range(3):
        reference = floats(single_run(replace(plan, epochs=epoch + 1)))
        served = floats(from_snapshot(tmp_path / "kept", epoch))
        assert all(torch.equal(served[name], tensor) for name, tensor in reference.items())
    ends = [epoch["end_s"] for epoch in stats["epochs"]]
    assert ends == sorted(ends)
    assert load_snapshot(tmp_path / "kept", 1)[0] == ends[1]
    assert stats["train_time_s"] == pytest.approx(ends[-1])
    with pytest.raises(
        FileNotFoundError, match=r"epoch 3 has no complete snapshot: .*epoch3.0.json"
    ):
        load_snapshot(tmp_path / "kept", 3)


@pytest.mark.parametrize("epoch", [0, 2], ids=["while training", "at the end"])
def test_a_snapshot_that_finds_the_disk_full_ends_the_run_with_that_reason(tmp_path, epoch):
    (tmp_path / f"epoch{epoch}.weights.0.part").symlink_to("/dev/full")
    plan = config(tmp_path, epochs=3, steps_per_epoch=20, snapshot_dir=str(tmp_path))
    server = Served(plan, SECRET)

    def stay_at_the_last(worker, ticket, channel):
        if epoch == 0 and ticket.number == 59:
            until(lambda: channel._error)

    worker = Worked(plan, SECRET, before_push=stay_at_the_last)
    with contextlib.suppress(RunEnded) if epoch else pytest.raises(RunEnded):
        worker.join()
    stats = server.result()
    assert stats["status"] == "lost"
    assert f"epoch {epoch + 1} could not be written to {tmp_path}: No space left" in stats["error"]


def test_snapshots_without_room_are_told_before_the_run(tmp_path, monkeypatch):
    monkeypatch.setattr("shutil.disk_usage", lambda folder: SimpleNamespace(free=5000))
    plan = config(tmp_path, epochs=5, snapshot_dir=str(tmp_path))
    server = Served(plan, SECRET)
    reason = "snapshots of 5 epochs need .* GB in .*, where 5e-06 GB are free: make room"
    with pytest.raises(JoinRefused, match=reason):
        Worked(plan, SECRET).join()
    assert re.search(reason, server.result()["error"])


def test_held_pushes_are_in_the_last_snapshot(tmp_path):
    """Three pushes for batches of two: the last one waits for the end of the run."""
    plan = config(
        tmp_path,
        policy="ps-kbatch",
        policy_options={"k": 2},
        steps_per_epoch=3,
        snapshot_dir=str(tmp_path),
    )
    stats, (worker,) = run_all(plan)
    assert set(stats["updates"]) == {2}
    model = small_model()
    optimizer = torch.optim.SGD(model.parameters(), **HYPER)
    for tickets in (worker.tickets[:2], worker.tickets[2:]):
        optimizer.zero_grad()
        for ticket in tickets:
            x, y = batch(ticket)
            (F.cross_entropy(model(x), y) / len(tickets)).backward()
        optimizer.step()
    served = from_snapshot(tmp_path, 0)
    for ours, theirs in zip(served.parameters(), model.parameters(), strict=True):
        assert torch.allclose(ours, theirs, rtol=0, atol=1e-14)


def test_a_last_step_with_fewer_batches_than_workers_is_made(tmp_path):
    plan = config(tmp_path, policy="ps-sync", workers=3, slices_per_step=2, steps_per_epoch=4)
    stats, _ = run_all(plan)
    assert set(stats["updates"]) == {3}  # of 3, 3 and 2 batches


def test_a_quick_worker_cannot_take_two_batches_of_a_synchronous_step(tmp_path, monkeypatch):
    """Worker 1's last shard lets the others go on while the server has not yet noted its ticket."""
    complete = ServerRun._complete_ticket

    def slowly(run, member):
        time.sleep(0.03 * (member.worker == 1))
        complete(run, member)

    monkeypatch.setattr(ServerRun, "_complete_ticket", slowly)
    plan = config(tmp_path, policy="ps-sync", workers=3, slices_per_step=3, steps_per_epoch=8)
    _, workers = run_all(plan)
    for number, worker in enumerate(workers):
        assert [(t.step, t.slice) for t in worker.tickets] == [(step, number) for step in range(8)]


@pytest.mark.parametrize("transport", TRANSPORTS)
def test_statistics_are_plain_and_add_up(tmp_path, transport):
    plan = config(tmp_path, workers=2, steps_per_epoch=6, slices_per_step=2)
    begun = time.perf_counter()
    stats, workers = run_all(plan, transport=transport)
    elapsed_s = time.perf_counter() - begun
    assert json.loads(json.dumps(stats)) == stats
    layout = workers[0].flat.layout
    for row, worker in zip(stats["workers"], workers, strict=True):
        pushed = row["tickets"] * (layout.weight_bytes + layout.buffer_bytes)
        assert (
            row["bytes_in"] == pushed == sum(worker.channel.sent_and_received_bytes_by_server[::2])
        )
        assert row["bytes_out"] >= row["tickets"] * layout.weight_bytes
        assert row["wait_s"] == pytest.approx(worker.channel.wait_s)
        assert 0 < row["wait_s"] < elapsed_s
    assert stats["apply_s"] > 0
    for histogram, dropped in zip(stats["staleness"], stats["dropped"], strict=True):
        assert sum(histogram) + dropped == 12
        assert len(histogram) <= 12


def test_a_worker_that_leaves_while_the_server_still_sends_was_not_lost(tmp_path, monkeypatch):
    """A heartbeat behind DONE meets a closed connection; the worker's BYE is still to be read."""
    tell, send, last = Member.queue_frame, Connection.send, Frame(Kind.HEARTBEAT)

    def tell_more(member, frame, payload=b""):
        tell(member, frame, payload)
        if frame.kind is Kind.DONE:
            tell(member, last)

    def fail_at_the_last(connection, frame, payload=b""):
        if frame is last:
            raise Closed("could not send: Broken pipe")
        send(connection, frame, payload)

    monkeypatch.setattr(Member, "queue_frame", tell_more)
    monkeypatch.setattr(Connection, "send", fail_at_the_last)
    stats, _ = run_all(config(tmp_path, workers=2, slices_per_step=2))
    assert (stats["status"], stats["refused"], stats["lost"]) == ("ok", 0, [])
    assert all(row["wait_s"] is not None for row in stats["workers"])


@pytest.fixture
def now(monkeypatch):
    """The time that servers and connections see: `now.s`."""
    now = SimpleNamespace(s=0.0)
    for module in (run_module, transport_module):
        monkeypatch.setattr(module, "time", SimpleNamespace(monotonic=lambda: now.s))
    return now


def a_member() -> tuple[Member, Connection]:
    """A worker as its server sees it, of which the reader waits, and the worker's own end."""
    ours, theirs = (Connection(sock) for sock in socket.socketpair())
    for connection in (ours, theirs):
        connection.set_frame_keys(b"k" * 32, b"k" * 32, 100)
    ours.waiting_since = 0.0
    layout = FlatSpace(small_model()).layout
    return Member(Hello(0, "native", False, layout, ""), ours, "tcp"), theirs


def test_a_heartbeat_is_a_sign_of_incarnation(now):
    member, theirs = a_member()
    now.s = 50.0
    assert member.compute_silence_s(now.s, 0.0) == 50.0
    theirs.send(Frame(Kind.HEARTBEAT))
    member.connection.receive()
    member.connection.waiting_since = 0.0
    assert member.compute_silence_s(60.0, 0.0) == 10.0


#: Seconds between looks, the deadline being 10: the whole job is suspended for an hour, and goes on.
LOOKS_S = [1] * 9 + [3600] + [1] * 12


def test_a_server_gives_nobody_up_for_a_pause_that_it_shared(tmp_path, now, monkeypatch):
    run = ServerRun(config(tmp_path, heartbeat_deadline_s=10.0), SECRET)
    run._members[0], _ = a_member()
    run._started = True
    given_up, looks_s = [], iter(LOOKS_S)
    monkeypatch.setattr(run, "_lose_member", lambda member, reason: given_up.append(now.s))

    def wait(seconds: float) -> bool:
        step_s = next(looks_s, None)
        now.s += step_s or 0
        return step_s is None

    monkeypatch.setattr(run.over, "wait", wait)
    run.watch_members()
    assert run.error is None
    assert given_up == [9 + 3600 + 11, 9 + 3600 + 12]


def test_a_worker_takes_no_server_for_lost_after_a_pause_that_it_shared(now):
    connection = a_member()[0].connection
    connection.silence_s = 10.0
    lost_at = []
    for step_s in LOOKS_S:
        now.s += step_s
        try:
            connection._check_deadlines()
        except Silent:
            lost_at.append(now.s)
    assert lost_at == [9 + 3600 + 11, 9 + 3600 + 12]


def test_the_clock_starts_with_the_first_ticket_not_with_the_first_worker(tmp_path, monkeypatch):
    passed_s, real = [0.0], time.perf_counter
    clock = SimpleNamespace(perf_counter=lambda: real() + passed_s[0], monotonic=time.monotonic)
    monkeypatch.setattr(run_module, "time", clock)
    plan = config(tmp_path, workers=2, slices_per_step=2, steps_per_epoch=2)
    server = Served(plan, b"s" * 32)
    first = Worked(plan, b"s" * 32, 0)
    assert first.asked.wait(PATIENCE_S)
    time.sleep(0.1)
    assert first.tickets == []  # it waits for the other
    passed_s[0] = 3600.0
    for worker in (first, Worked(plan, b"s" * 32, 1)):
        worker.join()
    assert 0 < server.result()["train_time_s"] < 3600


def test_the_bfloat16_wire_halves_the_push_and_rounds_only_gradients(tmp_path):
    plan = config(tmp_path, steps_per_epoch=5)
    stats, (worker,) = run_all(plan, transport="tcp", wire="bfloat16", dtype=torch.float32)
    model = small_model(torch.float32)
    optimizer = torch.optim.SGD(model.parameters(), **HYPER)
    for ticket in worker.tickets:
        x, y = batch(ticket, torch.float32)
        optimizer.zero_grad()
        F.cross_entropy(model(x), y).backward()
        for parameter in model.parameters():
            parameter.grad = parameter.grad.bfloat16().float()
        optimizer.step()
    assert equal_parameters(worker.model, model)
    layout = worker.flat.layout
    assert stats["workers"][0]["wire"] == "bfloat16"
    assert stats["workers"][0]["bytes_in"] == 5 * (layout.weight_bytes // 2 + layout.buffer_bytes)


@pytest.mark.parametrize("transport", TRANSPORTS)
@pytest.mark.parametrize("method", ["on_push", "view"])
def test_a_policy_that_fails_ends_the_run_with_its_error(tmp_path, monkeypatch, method, transport):
    class Failing(AsyncPolicy):
        """Fails after two updates."""

        def on_push(self, *args):
            return self._call("on_push", args)

        def view(self, *args):
            return self._call("view", args)

        def _call(self, name, args):
            if name == method and self.version == 2:
                raise ArithmeticError("out of numbers")
            return getattr(AsyncPolicy, name)(self, *args)

    monkeypatch.setattr(asynchronous, "AsyncPolicy", Failing)
    plan = config(tmp_path)
    server, worker = Served(plan, b"s" * 32), Worked(plan, b"s" * 32, transport=transport)
    with pytest.raises(RunEnded, match="the server failed: ArithmeticError: out of numbers"):
        worker.join()
    assert "out of numbers" in server.result()["error"]


@pytest.mark.slow
def test_the_reason_of_an_end_is_sent_however_long_that_takes(tmp_path, monkeypatch):
    """Longer than a server once waited for it: a second."""
    send = Connection.send

    def slowly(connection, frame, payload=b""):
        time.sleep(1.5 * (frame.kind is Kind.ERR))
        send(connection, frame, payload)

    def fail(policy, *args):
        raise ArithmeticError("out of numbers")

    monkeypatch.setattr(Connection, "send", slowly)
    monkeypatch.setattr(AsyncPolicy, "on_push", fail)
    plan = config(tmp_path)
    server, worker = Served(plan, SECRET), Worked(plan, SECRET)
    with pytest.raises(RunEnded, match="out of numbers"):
        worker.join()
    assert "out of numbers" in server.result()["error"]


def link_over(connection, server: int = 0) -> Link:
    """A worker's link to a server of one shard."""
    welcome = {"first": server, "stop": server + 1, "shard_numel": 1, "n_servers": 2}
    welcome |= {"buffers": False, "heartbeat_deadline_s": PATIENCE_S, "snapshot_dir": None}
    return Link(connection, server, "tcp", welcome)


@pytest.mark.slow
def test_a_failed_push_waits_until_what_the_server_said_is_read():
    """Longer than a worker once waited for it, and also where it has its next ticket already."""
    failed = threading.Event()

    def send(frame, payload=b""):
        failed.set()
        raise Closed("could not send: Broken pipe")

    def receive():
        failed.wait(PATIENCE_S)
        time.sleep(1.0)
        return Frame(Kind.ERR, length=4)

    connection = SimpleNamespace(
        send=send,
        receive=receive,
        read_payload=lambda n: b"full",
        send_unless_busy=send,
        close=lambda: None,
    )
    channel, link = Channel(None, 0, "native", None), link_over(connection)
    channel._links.append(link)
    channel._next_arrived.set()
    link.receiver = channel._start_thread(channel._receive_frames, link)
    with pytest.raises(RunEnded, match="full"):
        channel._send_frame(link, Frame(Kind.PUSH))


# --- finding each other --------------------------------------------------------------------------


def test_the_server_listens_on_loopback_alone_unless_told_otherwise(tmp_path):
    listeners = Listeners(config(tmp_path).bind_address)
    assert listeners.tcp.getsockname()[0] == "127.0.0.1"
    listeners.publish_addresses(tmp_path / "r", 2)
    endpoint = json.loads((tmp_path / "r.2").read_text())
    assert (endpoint["host"], endpoint["port"]) == listeners.tcp.getsockname()
    assert not [path for path in tmp_path.iterdir() if path.name.endswith(".part")]
    listeners.close()
    with pytest.raises(ValueError, match="needs `advertised_address`"):
        config(tmp_path, bind_address="0.0.0.0")


def test_a_missing_server_is_named(tmp_path):
    flat = FlatSpace(small_model())
    with pytest.raises(ConnectionError, match=r"nowhere\.0 .*is server 0 running"):
        Channel.connect(tmp_path / "nowhere", 0, flat, b"s" * 32, deadline_s=0.1)


def test_a_worker_on_another_host_takes_tcp(tmp_path):
    """As the rendezvous file tells hosts apart: by the running kernel."""
    plan = config(tmp_path)
    server = Served(plan, b"s" * 32)
    while not (tmp_path / "rendezvous.0").exists():
        time.sleep(0.01)
    endpoint = json.loads((tmp_path / "rendezvous.0").read_text())
    (tmp_path / "far.0").write_text(json.dumps(endpoint | {"boot_id": "another"}))
    worker = Worked(replace(plan, rendezvous=str(tmp_path / "far")), b"s" * 32).join()
    assert worker.channel.transports == ["tcp"]
    assert server.result()["status"] == "ok"


def test_what_a_server_hears_of_idling_comes_behind_the_shards_still_to_be_sent():
    """Else the shards would bring an idle worker back, and their weights come when it is at work."""
    said, hold = [], threading.Event()
    channel = Channel(None, 0, "native", None)
    for server in range(2):
        connection = SimpleNamespace(
            send=lambda frame, payload=b"", s=server: said.append((s, frame.kind))
        )
        channel._links.append(link_over(connection, server))
    first, other = channel._links
    other.to_send.put(lambda: (hold.wait(PATIENCE_S), said.append("shards")))
    sender = threading.Thread(target=channel._send_queued_frames, args=(other,))
    sender.start()
    channel._record_that_no_ticket_is_free(first)
    channel._accept_ticket(Ticket(7, 0, 0, 0))
    assert said == []
    hold.set()
    other.to_send.put(None)
    sender.join()
    assert said == ["shards", (1, Kind.WAIT), (1, Kind.PULL)]
