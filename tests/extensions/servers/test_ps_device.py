"""The path of a CUDA worker, played through on a CPU: mirrors apart from the model, streams of ours.

What a real device adds, that copies are asynchronous, the stand-ins cannot show.
"""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from contextlib import nullcontext
from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F
from ps_harness import DEADLINE_S, Served, batch, config, single_run, small_model

from launching import until
from stratbench.extensions.servers.policies.averaging import SyncPolicy
from stratbench.extensions.servers.ps import device
from stratbench.extensions.servers.ps.client import Channel, ServerLost
from stratbench.extensions.servers.ps.device import Staging
from stratbench.extensions.servers.ps.flat import FlatSpace
from stratbench.extensions.servers.ps.scale import LossScale, Unscaler
from stratbench.extensions.servers.ps.snapshots import load_snapshot
from stratbench.extensions.servers.ps.store import Store
from stratbench.extensions.servers.ps.tickets import Ticket
from stratbench.extensions.servers.wire.transport import Closed

pytestmark = pytest.mark.timeout(300)
SECRET = b"s" * 32


class Stream:
    """What is given to it is done at once; it notes what it would wait for."""

    def __init__(self, device=None):
        self.waited_for = []

    def wait_stream(self, other):
        self.waited_for.append(other)


class Event:
    def __init__(self, blocking):
        assert blocking

    def record(self):
        pass

    def synchronize(self):
        pass


def place_apart(flat):
    """What FlatSpace does for a CUDA model, without the pinning."""
    host = flat.host
    flat.weights, flat.grads = torch.zeros_like(host.weights), torch.zeros_like(host.grads)
    flat.buffers = torch.zeros_like(host.buffers)


@pytest.fixture(autouse=True)
def pretend_cuda(monkeypatch):
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    current = Stream()
    monkeypatch.setattr(torch.cuda, "Stream", Stream)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: current)
    monkeypatch.setattr(torch.cuda, "stream", lambda stream: nullcontext())
    monkeypatch.setattr(torch.cuda, "Event", Event)
    monkeypatch.setattr(torch.cuda, "set_device", lambda device: None)
    monkeypatch.setattr(FlatSpace, "_allocate_device_tensors", place_apart)
    monkeypatch.setattr(device, "BUCKET_BYTES", 600)
    yield
    torch.set_num_threads(before)


def train(plan, transport, armed, worker=0, scale=None, overflow=lambda ticket: None, weight=None):
    """One worker; returns how many buckets left before their backward was over.

    `overflow(ticket)`: the number of the parameter whose gradient overflows in that step. `weight(ticket)`:
    what its push weighs.
    """
    model, early, hit = small_model(), 0, None
    flat = FlatSpace(model)
    for number, parameter in enumerate(flat.parameters):
        parameter.register_hook(lambda g, number=number: g / 0 if number == hit else g)
    channel = Channel.connect(
        plan.rendezvous,
        worker,
        flat,
        SECRET,
        transport,
        "native",
        DEADLINE_S,
        scale,
        plan.n_servers,
    )
    before = flat.weights.clone()
    if armed:
        channel.send_gradients_during_backward()
    channel.rehearse_exchange()
    assert torch.equal(flat.weights, before)
    ticket = channel.wait_for_first_ticket()
    while ticket is not None:
        hit = overflow(ticket)
        x, y = batch(ticket)
        flat.zero_grads()
        loss = F.cross_entropy(model(x), y) * (scale.value if scale else 1)
        if weight:
            channel.set_push_weight(torch.tensor(weight(ticket), dtype=torch.float64))
        if armed:
            channel.send_gradients_during_backward()
        loss.backward()
        if armed:
            staging = channel._staging
            early += len(staging._buckets) - len(staging._waiting)
        ticket = channel.push_pull()
    channel.close()
    return early


def served(folder):
    """A model in the state of the server's last snapshot."""
    _, weights, buffers = load_snapshot(folder, 0, wait_s=300)
    model = small_model()
    FlatSpace(model).load_tensors(weights, buffers)
    return {n: t for n, t in model.state_dict().items() if t.is_floating_point()}


@pytest.mark.parametrize("transport", ["tcp", "shm"])
@pytest.mark.parametrize("armed", [False, True])
@pytest.mark.parametrize("scale", [None, LossScale()], ids=["unscaled", "scaled"])
def test_a_pushs_weight_is_at_each_shard_with_it(tmp_path, monkeypatch, transport, armed, scale):
    """Also where shards leave while backward still runs: the weight goes ahead of them."""
    weighed = []
    push = SyncPolicy.on_push
    monkeypatch.setattr(
        SyncPolicy,
        "on_push",
        lambda self, *a: (weighed.append(self.push_weight), push(self, *a))[1],
    )
    plan = config(tmp_path, steps_per_epoch=3, policy="ps-sync", n_servers=2)
    servers = [Served(replace(plan, server=s), SECRET) for s in range(2)]
    train(plan, transport, armed, scale=scale, weight=lambda ticket: 1 / 3 + ticket.number)
    for server in servers:
        assert server.result()["status"] == "ok"
    shards = len(weighed) // 3
    assert sorted(weighed) == [w for step in range(3) for w in [1 / 3 + step] * shards]


@pytest.mark.parametrize("n_servers", [1, 2])
@pytest.mark.parametrize("transport", ["tcp", "shm"])
@pytest.mark.parametrize("armed", [False, True])
@pytest.mark.parametrize("scale", [None, LossScale()], ids=["unscaled", "scaled"])
def test_a_worker_with_mirrors_trains_bit_for_bit(tmp_path, transport, armed, n_servers, scale):
    """A loss scale is a power of two: undone in fp64, it leaves no trace."""
    plan = config(tmp_path, steps_per_epoch=6, n_servers=n_servers, snapshot_dir=str(tmp_path))
    servers = [Served(replace(plan, server=s), SECRET) for s in range(n_servers)]
    early = train(plan, transport, armed, scale=scale)
    for server in servers:
        assert set(server.result()["updates"]) == {6}
    ours = served(tmp_path)
    for name, tensor in single_run(plan).state_dict().items():
        assert name not in ours or torch.equal(ours[name], tensor), name
    assert (early > 6) is armed  # more than one bucket a step was on its way during backward


@pytest.mark.parametrize("transport", ["tcp", "shm"])
def test_weights_are_on_the_device_before_another_server_has_sent_its(
    tmp_path, monkeypatch, transport
):
    plan = config(tmp_path, steps_per_epoch=6, n_servers=2)
    servers = [Served(replace(plan, server=s), SECRET) for s in range(2)]
    take, arrived = Channel._receive_weights, []

    def take_later(channel, link, frame):
        """Of server 1, only once all that server 0 sends is here and the backward is over."""
        first, flat, staging = channel._links[0], channel.flat, channel._staging
        if link is not first and channel._ticket in range(5):  # to the last push nothing comes back
            until(lambda: first.all_weights_arrived.is_set() and staging._accepting)
            part = slice(0, channel._bounds[first.shards.stop - 1][1])
            with staging._arrivals:  # what came before the backward was over is copied under it
                arrived.append(torch.equal(flat.weights[part], flat.host.weights[part]))
        take(channel, link, frame)

    monkeypatch.setattr(Channel, "_receive_weights", take_later)
    train(plan, transport, armed=True)
    for server in servers:
        server.result()
    assert len(arrived) >= 5
    assert all(arrived)


def test_weights_wait_for_the_end_of_the_backward_and_the_stream_for_the_weights():
    flat = FlatSpace(small_model())
    numel, host = flat.layout.numel, flat.host.weights
    staging = Staging(flat, [(0, numel)], lambda: None, lambda *a: None, lambda _: None, None)
    back, current = staging._back, torch.cuda.current_stream(flat.device)
    old, half = flat.weights.clone(), numel // 2
    host.fill_(7)
    staging.copy_weights_to_device(0, half)
    assert torch.equal(flat.weights, old), "a backward may read them"
    assert back.waited_for == []
    staging.start_accepting_weights()
    assert back.waited_for == [current]
    assert torch.equal(flat.weights[:half], host[:half])
    assert torch.equal(flat.weights[half:], old[half:])
    staging.copy_weights_to_device(half, numel)
    assert torch.equal(flat.weights, host)
    assert back not in current.waited_for
    staging.make_stream_wait_for_weights()
    assert current.waited_for[-1] is back
    host.fill_(8)
    staging.copy_weights_to_device(0, numel)  # of a run that is over: snapshots are loaded now
    assert not (flat.weights == 8).any()


def test_a_device_that_refuses_a_copy_ends_the_run(tmp_path, monkeypatch):
    """The copies are enqueued by a receiving thread; its error must not be lost."""

    def refuse(staging, start, stop):
        raise RuntimeError("CUDA error: out of order")

    monkeypatch.setattr(Staging, "copy_weights_to_device", refuse)
    plan = config(tmp_path)
    server = Served(plan, SECRET)
    channel = Channel.connect(plan.rendezvous, 0, FlatSpace(small_model()), SECRET, "tcp")
    with pytest.raises(RuntimeError, match="out of order"):
        channel.wait_for_first_ticket()
    channel.close()
    assert server.result()["status"] == "lost"


def overflowed_run(folder, transport, n_servers, parameter):
    """Steps 3 to 5 of six overflow in one parameter alone; whether only the others were applied."""
    plan = config(
        folder, steps_per_epoch=6, n_servers=n_servers, hyper={"lr": 0.1}, snapshot_dir=str(folder)
    )
    servers = [Served(replace(plan, server=s), SECRET) for s in range(n_servers)]
    scale = LossScale()
    train(
        plan, transport, True, scale=scale, overflow=lambda t: parameter if t.number > 2 else None
    )
    stats = [server.result() for server in servers]
    found = served(folder)
    first = single_run(replace(plan, steps_per_epoch=3)).state_dict()
    weights = [n for n, _ in small_model().named_parameters()]
    return (
        all(set(s["updates"]) == {3} for s in stats)
        and all(s["workers"][0]["skips"] == 3 for s in stats)
        and scale.skipped == 3
        and scale.value == LossScale.START / 8
        and all(torch.equal(found[n], first[n]) for n in weights)
    )


@pytest.mark.parametrize("n_servers", [1, 2])
@pytest.mark.parametrize("transport", ["tcp", "shm"])
@pytest.mark.parametrize("parameter", [0, 5], ids=["first", "last"])
def test_an_overflow_in_one_bucket_changes_no_shard(tmp_path, transport, n_servers, parameter):
    """The last parameter's bucket is the first on its way, the first one's the last."""
    assert overflowed_run(tmp_path, transport, n_servers, parameter)


@pytest.mark.parametrize("transport", ["tcp", "shm"])
def test_only_the_worker_that_overflowed_is_left_out(tmp_path, transport):
    """Two workers under ps-sync: a step is made of the other one's gradient."""
    plan = config(
        tmp_path, policy="ps-sync", workers=2, slices_per_step=2, steps_per_epoch=4,
        hyper={"lr": 0.1}, snapshot_dir=str(tmp_path),
    )  # fmt: skip
    server = Served(plan, SECRET)

    def overflow(ticket):
        return 3 if ticket.step == 1 and ticket.slice == 1 else None

    with ThreadPoolExecutor(2) as pool:
        done = [
            pool.submit(train, plan, transport, True, w, LossScale(), overflow) for w in range(2)
        ]
    assert [future.result() > 4 for future in done] == [True, True]
    stats = server.result()
    assert [w["skips"] for w in stats["workers"]] == [0, 1]
    assert set(stats["updates"]) == {4}
    model = small_model()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for step in range(4):
        slices = [0] if step == 1 else [0, 1]
        optimizer.zero_grad()
        for number in slices:
            x, y = batch(Ticket(2 * step + number, 0, step, number))
            (F.cross_entropy(model(x), y) / len(slices)).backward()
        optimizer.step()
    found = served(tmp_path)
    for name, parameter in model.named_parameters():
        assert torch.allclose(found[name], parameter, rtol=0, atol=1e-12), name


def applies_at_once(store, member, frame):
    """Mutant: what may have overflowed is applied as it comes."""
    member.scaled = False
    push(store, member, frame)
    member.scaled = True


def ignores_the_verdict(staging):
    staging.overflowed = False
    staging._end_push(False)


def checks_nothing(unscaler, grads):
    grads.mul_(unscaler._inverse)


push = Store.receive_push


@pytest.mark.parametrize(
    ("where", "name", "mutant"),
    [
        (Store, "receive_push", applies_at_once),
        (Staging, "_report_overflow", ignores_the_verdict),
        (Unscaler, "unscale", checks_nothing),
    ],
    ids=lambda x: getattr(x, "__name__", x),
)
def test_a_mutant_lets_an_overflow_in(tmp_path, monkeypatch, where, name, mutant):
    monkeypatch.setattr(where, name, mutant)
    assert not overflowed_run(tmp_path, "tcp", 1, parameter=0)


def test_a_failure_while_sending_is_raised_by_the_push():
    """The sender is a thread; its error must not be lost, nor poison the next push."""
    flat = FlatSpace(small_model())
    fails = [True]

    def push(first, stop):
        if fails:
            fails.clear()
            raise Closed("gone")

    staging = Staging(flat, [(0, flat.layout.numel)], lambda: None, push, lambda _: None, None)
    with pytest.raises(Closed, match="gone"):
        staging.finish_push()
    staging.finish_push()


def test_a_server_lost_during_backward_is_raised_by_the_push(tmp_path):
    plan = config(tmp_path)
    server = Served(plan, SECRET)
    flat = FlatSpace(small_model())
    channel = Channel.connect(plan.rendezvous, 0, flat, SECRET, "tcp")
    channel.wait_for_first_ticket()
    channel.send_gradients_during_backward()
    channel._links[0].connection.close()
    with pytest.raises(ServerLost):
        channel.push_pull()
    assert server.result()["status"] == "lost"
