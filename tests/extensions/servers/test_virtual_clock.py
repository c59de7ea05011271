"""The virtual clock: exact times, bounds kept, nobody stuck, every ticket settled once."""

from __future__ import annotations

from dataclasses import fields

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from policy_reference import hyper_of

from stratbench.extensions.servers.policies import asynchronous, averaging
from stratbench.extensions.servers.policies.policies import (
    POLICIES,
    get_policy_class,
    make_policy,
    parse_policy_options,
)
from stratbench.extensions.servers.policies.policy import Hyper, Policy
from stratbench.extensions.servers.ps.tickets import TicketPlan
from virtual_clock import Deadlock, Timing, WorkerLost, simulate

pytestmark = pytest.mark.timeout(300)


def ones(ticket, part, weights):
    return torch.ones_like(weights)


def policies_of(name, workers, shards=1, options=None, hyper=None):
    hyper = hyper or hyper_of(name, lr=0.01, workers=workers)
    return [make_policy(name, torch.zeros(2), hyper, options) for _ in range(shards)]


def run(name, workers, plan, timing, options=None, **how):
    policies = policies_of(name, workers, how.pop("shards", 1), options)
    return simulate(policies, plan, ones, timing, **how)


# ---- time


def test_sync_takes_the_slowest_worker_and_the_server_in_turn():
    timing = Timing(1.0, push_s=0.25, pull_s=0.125, apply_s=0.0625, slowdown=(1.0, 2.0))
    trace = run("ps-sync", 2, TicketPlan(1, 3, 2), timing)
    assert trace.time_s == pytest.approx(3 * (0.125 + 2.0 + 0.25 + 0.0625))
    assert trace.pushes == [3, 3]
    assert trace.waits_s == pytest.approx([3 * 1.0, 0.0])
    assert trace.staleness[0] == {0: 6}


def test_the_server_applies_one_push_at_a_time():
    trace = run("ps-async", 3, TicketPlan(1, 1, 3), Timing(1.0, apply_s=0.5))
    assert trace.time_s == pytest.approx(1.0 + 3 * 0.5)
    assert trace.staleness[0] == {0: 1, 1: 1, 2: 1}


def test_fast_workers_take_more_tickets_and_nobody_waits_in_async():
    trace = run("ps-async", 2, TicketPlan(1, 8, 1), Timing(1.0, slowdown=(1.0, 3.0)))
    assert trace.pushes == [6, 2]
    assert trace.time_s == pytest.approx(6.0)
    assert trace.waits_s == [0.0, 0.0]


def test_ssp_waits_for_a_persistent_straggler():
    timing = Timing(1.0, slowdown=(1.0, 3.0))
    trace = run("ps-ssp", 2, TicketPlan(1, 40, 1), timing, {"staleness_bound": 2})
    assert trace.pushes[0] - trace.pushes[1] <= 3
    assert trace.waits_s[0] > 30


def test_sub_batches_cost_transfers_and_not_compute():
    timing = Timing(1.0, push_s=0.25, pull_s=0.25)
    for parts in (1, 4):
        trace = run(
            "ps-async-modified", 1, TicketPlan(1, 5, 1), timing, {"pushes_per_batch": parts}
        )
        assert trace.time_s == pytest.approx(5 * (1.0 + parts * 0.5))
        assert trace.pushes == [5 * parts]
        assert trace.settled == list(range(5))


def test_the_same_seed_is_the_same_run_and_another_is_not():
    times = [
        run("ps-async", 3, TicketPlan(1, 20, 3), Timing(1.0, compute_spread=0.3, seed=s)).time_s
        for s in (1, 1, 2)
    ]
    assert times[0] == times[1] != times[2]


def test_shards_do_not_change_an_equal_run():
    whole = policies_of("ps-dana", 3)
    split = [make_policy("ps-dana", torch.zeros(1), whole[0].hyper) for _ in range(2)]
    for policies in (whole, split):
        simulate(
            policies, TicketPlan(1, 9, 3), lambda t, p, w: w + t.number, Timing(1.0, apply_s=0.1)
        )
    assert torch.equal(whole[0].weights, torch.cat([p.weights for p in split]))


# ---- losses


def test_a_lost_worker_ends_a_synchronous_run():
    with pytest.raises(WorkerLost, match=r"^step 2: worker 1 was lost$"):
        run("ps-sync", 2, TicketPlan(1, 5, 2), Timing(1.0), changes=[(2.5, 1, "leave")])


def test_the_last_worker_lost_ends_any_run():
    with pytest.raises(WorkerLost, match="all workers were lost with 3 tickets left"):
        run("ps-async", 1, TicketPlan(1, 5, 1), Timing(1.0), changes=[(2.5, 0, "leave")])


def test_a_lost_workers_ticket_is_handed_on_even_to_an_idle_one():
    timing = Timing(1.0, slowdown=(1.0, 10.0))
    trace = run("ps-async", 2, TicketPlan(1, 4, 1), timing, changes=[(5.0, 1, "leave")])
    assert sorted(trace.settled) == [0, 1, 2, 3]
    assert (trace.pushes, trace.reassigned) == ([4, 0], 1)
    assert trace.time_s == pytest.approx(6.0)


class ForgetsLeavers(averaging.BackupPolicy):
    """Wrong: goes on waiting for a worker that has left."""

    def on_leave(self, worker):
        pass


class NeverReady(asynchronous.AsyncPolicy):
    def ready(self, worker):
        return False


@pytest.mark.parametrize("policy_class", [ForgetsLeavers, NeverReady])
def test_a_policy_that_blocks_for_ever_is_found_out(policy_class):
    options = parse_policy_options("ps-backup", {"backups": 0})
    timing = Timing(1.0, slowdown=(1.0, 3.0))
    changes = [(2.0, 1, "leave")]
    good = averaging.BackupPolicy(torch.zeros(2), Hyper(lr=0.1, workers=2), options)
    simulate([good], TicketPlan(1, 3, 2), ones, timing, changes)
    bad = policy_class(torch.zeros(2), Hyper(lr=0.1, workers=2), options)
    with pytest.raises(Deadlock, match=r"tickets are left; workers that wait forever: \[0"):
        simulate([bad], TicketPlan(1, 3, 2), ones, timing, changes)


# ---- properties over random schedules


@st.composite
def schedules(draw):
    """(workers, shards, plan, timing, changes): anything may be slow, worker 0 always stays."""
    n = draw(st.integers(2, 5))
    move = st.tuples(
        st.floats(0.0, 15.0), st.integers(1, n - 1), st.sampled_from(["leave", "join"])
    )
    timing = Timing(
        1.0,
        push_s=draw(st.sampled_from([0.0, 0.2, 2.0])),
        pull_s=draw(st.sampled_from([0.0, 0.1])),
        apply_s=draw(st.sampled_from([0.0, 0.05])),
        compute_spread=draw(st.sampled_from([0.0, 0.3, 1.0])),
        transfer_spread=draw(st.sampled_from([0.0, 1.0])),
        slowdown=draw(st.lists(st.sampled_from([1.0, 3.0]), max_size=n)),
        seed=draw(st.integers(0, 9999)),
    )
    plan = TicketPlan(1, draw(st.integers(1, 8)), draw(st.integers(1, 5)))
    return n, draw(st.integers(1, 3)), plan, timing, draw(st.lists(move, max_size=8))


OPTION_VALUES = {
    "staleness_bound": st.integers(0, 3),
    "pushes_per_batch": st.integers(1, 3),
    "backups": st.integers(0, 3),
    "k": st.integers(0, 6),
}


#: The policies under which workers may wait for others, so that a run could stand still.
WAITING = [name for name in POLICIES if get_policy_class(name).ready is not Policy.ready]


@pytest.mark.slow
@pytest.mark.parametrize("name", WAITING)
@settings(max_examples=60, deadline=None, derandomize=True)
@given(schedule=schedules(), data=st.data())
def test_every_run_ends_with_every_ticket_settled_once(name, schedule, data):
    workers, shards, plan, timing, changes = schedule
    names = [f.name for f in fields(get_policy_class(name).Options) if f.name in OPTION_VALUES]
    options = data.draw(st.fixed_dictionaries({key: OPTION_VALUES[key] for key in names}))
    policies = policies_of(name, workers, shards, options)
    if not policies[0].options.survives_worker_loss:
        changes = []
    skip_every = data.draw(st.sampled_from([1, 4, 1000]))

    def gradient(ticket, part, weights):
        return None if ticket.number % skip_every == skip_every - 1 else torch.ones_like(weights)

    trace = simulate(policies, plan, gradient, timing, changes)
    assert sorted(trace.settled) == list(range(len(plan)))


def test_shards_agree_on_who_is_late_in_a_step_that_overflowed():
    """Worker 1 is lost between its push to one shard and to the other, and every gradient overflows."""
    policies = policies_of("ps-backup", 4, 2, {"backups": 1})
    timing = Timing(1.0, push_s=2.0, compute_spread=0.3, transfer_spread=1.0, seed=1)
    plan = TicketPlan(1, 2, 3)
    trace = simulate(policies, plan, lambda *_: None, timing, [(2.0, 1, "leave")])
    assert sorted(trace.settled) == list(range(len(plan)))


@pytest.mark.slow
@pytest.mark.parametrize("name", ["ps-ssp", "ps-async-modified"])
@settings(max_examples=100, deadline=None, derandomize=True)
@given(schedule=schedules(), bound=st.integers(0, 4))
def test_nobody_starts_further_ahead_than_the_bound(name, schedule, bound):
    workers, shards, plan, timing, changes = schedule
    policies = policies_of(name, workers, shards, {"staleness_bound": bound})
    clocks = [dict.fromkeys(range(workers), 0) for _ in policies]  # of those at work, by shard

    def watch(policy, counts):
        real = {
            name: getattr(policy, name)
            for name in ("on_push", "on_skip", "on_leave", "on_join", "view")
        }

        def on_push(worker, *args):
            counts[worker] += 1
            return real["on_push"](worker, *args)

        def on_skip(worker, *args):
            counts[worker] += 1
            real["on_skip"](worker, *args)

        def on_leave(worker):
            counts.pop(worker, None)
            real["on_leave"](worker)

        def on_join(worker):
            counts[worker] = min(counts.values(), default=0)
            real["on_join"](worker)

        def view(worker, out):
            assert counts[worker] - min(counts.values()) <= bound
            return real["view"](worker, out)

        vars(policy).update(
            on_push=on_push, on_skip=on_skip, on_leave=on_leave, on_join=on_join, view=view
        )

    for policy, counts in zip(policies, clocks, strict=True):
        watch(policy, counts)
    simulate(policies, plan, ones, timing, changes)


@settings(max_examples=60, deadline=None, derandomize=True)
@given(schedule=schedules(), backups=st.integers(0, 3))
def test_backup_drops_the_late_ones_and_no_others(schedule, backups):
    workers, shards, plan, timing, changes = schedule
    policies = policies_of("ps-backup", workers, shards, {"backups": backups})
    trace = simulate(policies, plan, ones, timing, changes)
    late = sum(n for shard in trace.staleness for tau, n in shard.items() if tau > 0)
    assert sum(trace.dropped) == late
    if backups == 0 and not any(what == "join" for _, _, what in changes):
        assert late == 0  # one who comes back within a step has pushed twice: the second is late
