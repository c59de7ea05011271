"""Servers whose workers come, leave and return: who has which place, and every ticket once."""

from __future__ import annotations

import json
import os
import random
import signal
import threading
import time
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from process_groups import forking
from ps_harness import PATIENCE_S, Served, Worked, config

from launching import until
from stratbench.ps.client import Channel
from stratbench.ps.elastic.channel import ReturningChannel, RunOver
from stratbench.ps.elastic.journal import read_end, read_journal
from stratbench.ps.elastic.saved_state import has_state
from stratbench.ps.server import serve
from stratbench.ps.server_config import ElasticConfig

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
    facts = {"workers": PLACES, "slices": PLACES, "epochs": 2, "steps_per_epoch": 10}
    facts |= {"snapshot_dir": str(folder / "snapshots")}
    return config(folder, elastic=ElasticConfig(str(folder / "elastic"), **own), **facts | changed)


def serve_all(plan):
    return [Served(replace(plan, server=k), SECRET) for k in range(plan.n_servers)]


def events(plan, kind):
    return [e for e in read_journal(plan.elastic.folder) if e["event"] == kind]


def slowly(worker, ticket, channel):
    time.sleep(0.003 * (1 + worker % 3))


def history(folder, policy, n_servers, seed, numbers=12):
    """A run whose workers join, leave and are lost at random moments; checks it, returns its servers' reports."""
    rng = random.Random(seed)
    plan = elastic(folder, policy=policy, n_servers=n_servers)
    servers, here, come = serve_all(plan), [], 0
    deadline = time.monotonic() + PATIENCE_S
    while not all(s.done for s in servers):
        assert time.monotonic() < deadline, "the run hangs"
        if come < numbers and rng.random() < 0.6:
            here.append(Worked(plan, SECRET, come, before_push=slowly, life=1))
            come += 1
        elif here and come < numbers and rng.random() < 0.5:
            worker = here.pop(rng.randrange(len(here)))
            if hasattr(worker, "channel"):
                rng.choice([worker.channel.leave, worker.channel._close_connections])()
        time.sleep(rng.uniform(0.0, 0.05))
        if come == numbers and not any(w.running for w in here):
            here.append(
                Worked(plan, SECRET, come, before_push=slowly, life=1)
            )  # or nobody finished it
            come, numbers = come + 1, numbers + 1
    found = [s.result() for s in servers]
    check_run(plan, found)
    return plan, found


def check_run(plan, found):
    n = plan.epochs * plan.steps_per_epoch * plan.slices
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


@pytest.mark.parametrize("n_servers", [1, 2])
@pytest.mark.parametrize("policy", POLICIES)
def test_every_ticket_is_settled_once_whoever_comes_and_goes(tmp_path, policy, n_servers):
    for seed in range(2):
        history(tmp_path / str(seed), policy, n_servers, seed)


class Returning(Worked):
    """A worker that knocks, and goes on with whatever life of the servers there is."""

    def __init__(self, plan, number, silence_s=PATIENCE_S, **habits):
        self.leaving = threading.Event()
        self._silence_s = silence_s
        super().__init__(plan, SECRET, number, **habits)

    def connect(self, config, secret, worker, transport, wire):
        def join(life):
            rest = (transport, wire, 1.0, None, config.n_servers, life)
            return Channel.connect(config.rendezvous, worker, self.flat, secret, *rest)

        channel = ReturningChannel(
            join, config.rendezvous, config.elastic.folder, self.leaving, self._silence_s
        )
        channel._send_initial = channel._channel._send_initial
        return channel


class ServerProcesses:
    """The servers of a run as processes; a life begins with `start` and ends with `kill`."""

    def __init__(self, plan):
        self.plan, self.processes = replace(plan, stats_path=str(plan.rendezvous) + ".stats"), []

    def start(self, life=1, resumes=False):
        own = replace(self.plan.elastic, life=life, resumes=resumes)
        plans = [replace(self.plan, server=k, elastic=own) for k in range(self.plan.n_servers)]
        plans = [replace(p, stats_path=f"{p.stats_path}{p.server}") for p in plans]
        self.processes = [forking().Process(target=serve, args=(p, SECRET)) for p in plans]
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
@pytest.mark.parametrize("n_servers", [1, 2])
@pytest.mark.parametrize("policy", POLICIES)
def test_another_life_of_the_servers_goes_on(tmp_path, processes, policy, n_servers, signum):
    plan = elastic(
        tmp_path, policy=policy, n_servers=n_servers, save_every_s=0.1, steps_per_epoch=60
    )
    servers = processes(plan)
    servers.start()
    workers = [Returning(plan, number, before_push=slowly) for number in range(2)]
    until(lambda: has_state(Path(plan.elastic.folder), n_servers), PATIENCE_S)
    until(lambda: sum(len(w.tickets) for w in workers) > 100, PATIENCE_S)
    servers.end(signum)
    assert read_end(plan.elastic.folder) is None
    servers.start(life=2, resumes=True)
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
    assert read_end(plan.elastic.folder) == {"error": None}
    with pytest.raises(RunOver):
        Returning(plan, 9).join()
