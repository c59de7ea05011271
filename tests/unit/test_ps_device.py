"""The path of a CUDA worker, played through on a CPU: mirrors apart from the model, streams of ours.

What a real device adds, that copies are asynchronous, the stand-ins cannot show.
"""

from __future__ import annotations

from contextlib import nullcontext
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch
import torch.nn.functional as F
from ps_harness import Served, Worked, batch, config, single_run, small_model

from stratbench.ps import device
from stratbench.ps.client import Channel, ServerLost
from stratbench.ps.device import Staging
from stratbench.ps.flat import FlatSpace
from stratbench.ps.snapshots import load_snapshot
from stratbench.ps.transport import Closed

pytestmark = pytest.mark.timeout(60)
SECRET = b"s" * 32


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
    stream = SimpleNamespace(wait_stream=lambda other: None, synchronize=lambda: None)
    monkeypatch.setattr(torch.cuda, "Stream", lambda device: stream)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: stream)
    monkeypatch.setattr(torch.cuda, "stream", lambda stream: nullcontext())
    monkeypatch.setattr(torch.cuda, "Event", Event)
    monkeypatch.setattr(torch.cuda, "set_device", lambda device: None)
    monkeypatch.setattr(FlatSpace, "_place_on_device", place_apart)
    monkeypatch.setattr(Staging, "make", classmethod(lambda cls, *args: cls(*args)))
    monkeypatch.setattr(device, "BUCKET_BYTES", 600)
    yield
    torch.set_num_threads(before)


def train(plan, transport, armed):
    """One worker; returns how many buckets left before their backward was over."""
    model, early = small_model(), 0
    flat = FlatSpace(model)
    channel = Channel.connect(plan.rendezvous, 0, flat, SECRET, transport, deadline_s=10)
    ticket = channel.first()
    while ticket is not None:
        x, y = batch(ticket)
        flat.zero_grads()
        loss = F.cross_entropy(model(x), y)
        if armed:
            channel.arm()
        loss.backward()
        if armed:
            staging = channel._staging
            early += len(staging._buckets) - len(staging._waiting)
        ticket = channel.push_pull()
    channel.close()
    return early


def served(folder):
    """A model in the state of the server's last snapshot."""
    _, weights, buffers = load_snapshot(folder, 0, wait_s=5)
    model = small_model()
    FlatSpace(model).load(weights, buffers)
    return {n: t for n, t in model.state_dict().items() if t.is_floating_point()}


@pytest.mark.parametrize("n_servers", [1, 2])
@pytest.mark.parametrize("transport", ["tcp", "shm"])
@pytest.mark.parametrize("armed", [False, True])
def test_a_worker_with_mirrors_trains_bit_for_bit(tmp_path, transport, armed, n_servers):
    plan = config(tmp_path, steps_per_epoch=6, n_servers=n_servers, snapshot_dir=str(tmp_path))
    servers = [Served(replace(plan, server=s), SECRET) for s in range(n_servers)]
    early = train(plan, transport, armed)
    for server in servers:
        assert set(server.result()["updates"]) == {6}
    ours = served(tmp_path)
    for name, tensor in single_run(plan).state_dict().items():
        assert name not in ours or torch.equal(ours[name], tensor), name
    assert (early > 6) is armed  # more than one bucket a step was on its way during backward


def test_skipped_steps_go_through_the_mirrors(tmp_path):
    plan = config(tmp_path, steps_per_epoch=5, hyper={"lr": 0.1}, snapshot_dir=str(tmp_path))
    server = Served(plan, SECRET)
    Worked(plan, SECRET, before_push=lambda worker, ticket, channel: ticket.number == 4).join()
    assert server.result()["workers"][0]["skips"] == 1
    ours = served(tmp_path)
    for name, tensor in single_run(replace(plan, steps_per_epoch=4)).state_dict().items():
        assert name not in ours or torch.equal(ours[name], tensor), name


def test_a_failure_while_sending_is_raised_by_the_push():
    """The sender is a thread; its error must not be lost, nor poison the next push."""
    flat = FlatSpace(small_model())
    fails = [True]

    def push(first, stop):
        if fails:
            fails.clear()
            raise Closed("gone")

    staging = Staging(flat, [(0, flat.layout.numel)], lambda: None, push)
    with pytest.raises(Closed, match="gone"):
        staging.finish_push()
    staging.finish_push()


def test_a_server_lost_during_backward_is_raised_by_the_push(tmp_path):
    plan = config(tmp_path)
    server = Served(plan, SECRET)
    flat = FlatSpace(small_model())
    channel = Channel.connect(plan.rendezvous, 0, flat, SECRET, "tcp", deadline_s=10)
    channel.first()
    channel.arm()
    channel._links[0].connection.close()
    with pytest.raises(ServerLost):
        channel.push_pull()
    assert server.result()["status"] == "lost"
