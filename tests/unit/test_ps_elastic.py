"""Servers whose workers come, leave and return: who has which place, and every ticket once."""

from __future__ import annotations

import random
import threading
import time
from dataclasses import replace

import pytest
import torch
from ps_harness import PATIENCE_S, Served, Worked, config, run_all

from launching import until
from stratbench.ps.client import Channel
from stratbench.ps.elastic.journal import read_end, read_journal
from stratbench.ps.server_config import ElasticConfig
from stratbench.ps.snapshots import load_snapshot
from stratbench.ps.wire.handshake import JoinLater
from stratbench.ps.wire.link import Left

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
            here.append(Worked(plan, SECRET, come, before_push=slowly, life=1))  # or nobody finished it
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
