"""Projections: the naive rules, what collectives cost, the replay of a step, the servers' queue."""

from __future__ import annotations

import heapq
import math
from random import Random
from types import SimpleNamespace

import pytest

from stratbench.cell.text.words import format_short_time
from stratbench.extensions.links.collective_cost import CollectiveTime, LinkLayout, LinkModel
from stratbench.extensions.links.measure import write_links
from stratbench.extensions.projection import naive
from stratbench.extensions.projection.evidence import make_link_replay
from stratbench.extensions.projection.limits import MAX_COUNT_RATIO, find_projection_refusal_reason
from stratbench.extensions.projection.links import Links, Unmeasured
from stratbench.extensions.projection.naive import MeasuredStep
from stratbench.extensions.projection.project import (
    BY_COUNTS,
    BY_LINKS,
    compute_leave_one_out_errors,
    describe_projected_step_time,
    fit_computation_s,
    make_replay_rule,
    project_step_times,
)
from stratbench.extensions.projection.replay import (
    CollectiveStart,
    Schedule,
    TracedPhase,
    build_schedule,
    simulate_step_s,
)
from stratbench.extensions.projection.servers import (
    ServerQueue,
    compute_asynchronous_step_s,
    compute_synchronous_step_s,
)
from stratbench.strategies import get_option_defaults
from stratbench.telemetry.collectives import CollectiveCall

MS = 1e-3


def points(**step_s: float) -> list[MeasuredStep]:
    return [MeasuredStep(int(k[1:]), v) for k, v in step_s.items()]


# --- naive rules ---------------------------------------------------------------------------------


@pytest.mark.parametrize("scaling", ["weak", "strong"])
def test_the_naive_rules_continue_what_they_assume(scaling):
    measured = points(n1=1.0, n2=0.6 if scaling == "strong" else 1.2)
    last = 0.6 / 4 if scaling == "strong" else 1.2
    assert naive.project_by_perfect_scaling(measured, scaling, 8) == pytest.approx(last)
    # A fifth is lost with each of the two doublings from 2 to 8.
    assert naive.project_by_constant_loss(measured, scaling, 8) == pytest.approx(last * 1.2**2)
    slope = 2 * (measured[0].step_s - measured[1].step_s)
    a = measured[0].step_s - slope
    assert naive.project_by_a_plus_b_over_n(measured, scaling, 8) == pytest.approx(a + slope / 8)


def test_one_count_alone_is_scaled_perfectly():
    for rule in naive.RULES.values():
        assert rule(points(n4=2.0), "strong", 8) == pytest.approx(1.0)


def test_skill_is_over_the_best_naive_rule_and_none_without_a_third_count():
    measured = points(n1=1.0, n2=1.1, n4=1.15, n8=1.3)
    nothing = naive.compute_skill(naive.project_by_a_plus_b_over_n, measured[:2], "weak")
    assert nothing.relative_error_reduction is None
    best = naive.compute_skill(naive.project_by_perfect_scaling, measured, "weak").best_naive_rule
    assert naive.compute_skill(
        naive.RULES[best], measured, "weak"
    ).relative_error_reduction == pytest.approx(0)

    def right(_points, _detect_scaling, workers):
        return next(p.step_s for p in measured if p.workers == workers)

    assert naive.compute_skill(right, measured, "weak").relative_error_reduction == pytest.approx(1)
    assert naive.compute_skill(lambda *_: 9.0, measured, "weak").relative_error_reduction < 0


# --- what collectives cost -----------------------------------------------------------------------

ALPHA_S, RATE = 10e-6, 10e9
WITHIN = {"within": LinkModel(ALPHA_S, RATE)}
BOTH = WITHIN | {"between": LinkModel(5 * ALPHA_S, RATE / 10)}


def took(kind: str, n_bytes: float, layout: LinkLayout, library: str = "gloo", **of) -> float:
    return Links(library, {kind: of or BOTH}).compute_collective_time(
        CollectiveCall(kind, n_bytes), layout
    )[0]


def test_a_ring_takes_its_steps_and_its_volume():
    n_bytes, n = 1e8, 4
    expected = 2 * (n - 1) * ALPHA_S + 2 * (n - 1) / n * n_bytes / RATE
    assert took("all_reduce", n_bytes, LinkLayout(n)) == pytest.approx(expected)
    half = (n - 1) * ALPHA_S + (n - 1) / n * n_bytes / RATE
    for kind in ("all_gather", "reduce_scatter"):
        assert took(kind, n_bytes, LinkLayout(n)) == pytest.approx(half)
    assert took("all_reduce", n_bytes, LinkLayout(1)) == 0


def test_across_nodes_the_network_sets_the_pace():
    n_bytes = 1e9
    assert took("all_reduce", n_bytes, LinkLayout(8, 2)) > 5 * took(
        "all_reduce", n_bytes, LinkLayout(8)
    )


def test_nccl_takes_the_fastest_algorithm():
    small, large = CollectiveCall("all_reduce", 1024), CollectiveCall("all_reduce", 1e9)
    links = Links("nccl", {"all_reduce": BOTH})
    assert links.compute_collective_time(small, LinkLayout(64, 8))[1] == "tree"
    assert links.compute_collective_time(large, LinkLayout(64, 8))[1] in ("ring", "hierarchical")
    chosen = links.compute_collective_time(large, LinkLayout(64, 8))[0]
    assert chosen <= took("all_reduce", 1e9, LinkLayout(64, 8))  # gloo's ring


def test_a_link_that_was_not_measured_is_named():
    with pytest.raises(Unmeasured, match="all_reduce was not measured between nodes"):
        Links("nccl", {"all_reduce": WITHIN}).compute_collective_time(
            CollectiveCall("all_reduce", 8), LinkLayout(8, 2)
        )
    with pytest.raises(Unmeasured, match="send was not measured within"):
        Links("gloo", {}).compute_collective_time(CollectiveCall("send", 8), LinkLayout(2))


def test_a_group_of_neighbours_stays_on_its_node():
    pairs = CollectiveCall("all_reduce", 1e8, group_size=2)
    links = Links("gloo", {"all_reduce": WITHIN})
    assert (
        links.compute_collective_time(pairs, LinkLayout(8, 2))[0]
        == links.compute_collective_time(CollectiveCall("all_reduce", 1e8), LinkLayout(2))[0]
    )


def test_groups_that_lie_between_one_another_cross_nodes_and_share_their_connection():
    """Eight tensor workers fill each of two nodes: what the replicas average goes between the nodes."""
    between = {"between": LinkModel(0.0, 1e9)}
    links = Links("gloo", {"all_reduce": {"within": LinkModel(0.0, 1e15)} | between})
    seconds = {
        stride: links.compute_collective_time(
            CollectiveCall("all_reduce", 1e9, 2, rank_stride=stride), LinkLayout(16, 2)
        )[0]
        for stride in (1, 8)
    }
    assert seconds[1] == pytest.approx(0, abs=1e-5)
    # A ring of two takes 1 GB over 1 GB/s; eight of them share it.
    assert seconds[8] == pytest.approx(8.0)


def test_groups_that_do_not_divide_a_node_lie_on_two():
    links = Links(
        "gloo", {"all_reduce": {"within": LinkModel(0.0, 1e15), "between": LinkModel(0.0, 1e9)}}
    )
    assert (
        links.compute_collective_time(CollectiveCall("all_reduce", 1e9, 3), LinkLayout(24, 3))[0]
        > 1
    )
    assert (
        links.compute_collective_time(CollectiveCall("all_reduce", 1e9, 4), LinkLayout(24, 3))[0]
        < 1e-3
    )
    assert (
        links.compute_collective_time(CollectiveCall("all_reduce", 1e9, 3), LinkLayout(6))[0] < 1e-3
    )


@pytest.mark.parametrize(("largest", "known"), [(1 << 20, False), (64 << 20, True)])
def test_what_is_much_larger_than_was_measured_is_not_known(largest, known):
    links = Links("gloo", {"all_reduce": WITHIN}, largest_bytes_by_kind={"all_reduce": largest})
    assert (
        links.compute_collective_time(CollectiveCall("all_reduce", 8 << 20), LinkLayout(4))[0] > 0
    )
    call = CollectiveCall("all_reduce", 1 << 30)
    if known:
        assert links.compute_collective_time(call, LinkLayout(4))[0] > 0
        return
    with pytest.raises(Unmeasured, match=r"up to 1 MiB with gloo, but a step sends 1\.00 GiB"):
        links.compute_collective_time(call, LinkLayout(4))


# --- the replay ----------------------------------------------------------------------------------

BUCKET = CollectiveCall("all_reduce", 1.0)
GATHER = CollectiveCall("all_gather", 1.0)


def buckets(*shares: float, ends: float = 0.9) -> Schedule:
    return Schedule(tuple(CollectiveStart(BUCKET, s, False) for s in shares), ends)


def test_buckets_hide_behind_backward_and_the_last_does_not():
    # c_k = max(ready_k, c_(k-1)) + AR; step = max(forward + backward, c_K) + optimizer
    done = simulate_step_s(buckets(0.5, 0.7, 0.9), 1.0, lambda _: 0.1)
    assert done == pytest.approx(0.9 + 0.1 + 0.1)


def test_a_slow_channel_is_what_the_step_waits_for():
    done = simulate_step_s(buckets(0.5, 0.7, 0.9), 1.0, lambda _: 1.0)
    assert done == pytest.approx(0.5 + 3 + 0.1)


def test_computing_is_slower_beside_a_collective():
    done = simulate_step_s(buckets(0.5), 1.0, lambda _: 0.2, computation_slowdown_factor=2.0)
    # 0.2 s of the channel's time take 0.1 s of the work.
    assert done == pytest.approx(1.1)
    assert simulate_step_s(
        buckets(), 1.0, lambda _: 0.2, computation_slowdown_factor=2.0
    ) == pytest.approx(1.0)


def test_gathers_are_waited_for_unless_they_run_ahead():
    gathers = tuple(CollectiveStart(GATHER, s, True) for s in (0.0, 0.5))
    assert simulate_step_s(Schedule(gathers), 1.0, lambda _: 0.3) == pytest.approx(1.6)
    ahead = tuple(CollectiveStart(GATHER, s, True, is_prefetched=True) for s in (0.0, 0.5))
    assert simulate_step_s(Schedule(ahead), 1.0, lambda _: 0.3) == pytest.approx(1.3)


def test_groups_have_a_channel_each_and_what_is_reduced_keeps_its_order():
    """Activations within pairs are waited for; beside them gradients are averaged over the pairs."""
    activation = CollectiveCall("all_reduce", 1.0, 2, rank_stride=1)
    gradient = CollectiveCall("all_reduce", 1.0, 2, rank_stride=2)
    took_s = {1: 0.1, 2: 0.3}
    shares = ((activation, 0.3), (gradient, 0.5), (activation, 0.5), (gradient, 0.9))
    schedule = Schedule(tuple(CollectiveStart(c, s, c is activation) for c, s in shares), 0.9)
    done = simulate_step_s(schedule, 1.0, lambda call: took_s[call.rank_stride])
    # Two activations in the way, the first gradient hidden, of the second all; then the optimizer.
    assert done == pytest.approx(0.9 + 2 * 0.1 + 0.3 + 0.1)
    scatter = CollectiveCall("reduce_scatter", 1.0, 2)
    both = Schedule(
        (CollectiveStart(scatter, 0.9, False), CollectiveStart(gradient, 0.9, False)), 0.9
    )
    assert simulate_step_s(both, 1.0, lambda call: 0.2) == pytest.approx(0.9 + 0.4 + 0.1)


def test_without_collectives_a_step_is_its_computing():
    assert simulate_step_s(Schedule(()), 2.0, lambda _: 9.0) == 2.0


def test_a_schedule_follows_the_traced_phases():
    phases = [
        TracedPhase("forward", 1.0, (), (), 3),
        TracedPhase("backward", 2.0, (BUCKET, BUCKET), (1.0, 2.0), 5),
        TracedPhase("optimizer", 1.0, (CollectiveCall("broadcast", 8),), (0.5,), 1),
    ]
    made = build_schedule(phases, on_cuda=False)
    assert [s.computed_share_at_start for s in made.collectives] == [0.5, 0.75, 0.875]
    assert [s.blocks_computation for s in made.collectives] == [False, False, True]
    assert made.computed_share_at_backward_end == 0.75
    assert made.num_operations == 9


@pytest.mark.parametrize(
    ("kind", "waiter", "phase", "on_cpu", "on_cuda"),
    [
        ("all_reduce", "none", "backward", "beside", "beside"),  # DDP's buckets
        ("all_reduce", "user", "backward", "waited for", "waited for"),  # DTensor's activations
        ("all_gather", "user", "forward", "waited for", "waited for"),
        ("all_gather", "stream", "backward", "waited for", "ahead"),  # FSDP2's parameters
        ("reduce_scatter", "stream", "backward", "waited for", "beside"),  # and gradients
        ("all_gather", "stream", "optimizer", "waited for", "waited for"),  # of updated parameters
        ("all_reduce", "stream", "optimizer", "waited for", "waited for"),  # the gradients' norm
        ("all_reduce", "none", "optimizer", "waited for", "waited for"),
        ("send", "none", "forward", "waited for", "waited for"),
    ],
)
def test_who_waits_for_a_collective_follows_from_its_call(kind, waiter, phase, on_cpu, on_cuda):
    call = CollectiveCall(kind, 1.0, 2, waiter=waiter)
    for device, said in ((False, on_cpu), (True, on_cuda)):
        phases = [TracedPhase(phase, 1.0, (call,), (0.5,)), TracedPhase("optimizer", 1.0, (), ())]
        (started,) = build_schedule(phases, on_cuda=device).collectives
        word = (
            "ahead"
            if started.is_prefetched
            else "waited for"
            if started.blocks_computation
            else "beside"
        )
        assert word == said


# --- servers -------------------------------------------------------------------------------------


def simulated(queue: ServerQueue, workers: int, updates: int) -> float:
    """Updates a second on a virtual clock: exponential times, first come first served."""
    random = Random(0)

    def drawn(mean_s: float) -> float:
        return random.expovariate(1 / mean_s)

    arrivals = [drawn(queue.think_s) for _ in range(workers)]
    heapq.heapify(arrivals)
    free = began = 0.0
    skipped = updates // 5
    for done in range(updates + skipped):
        if done == skipped:
            began = free  # the queue has filled
        free = max(heapq.heappop(arrivals), free) + drawn(queue.service_s)
        heapq.heappush(arrivals, free + drawn(queue.think_s))
    return updates / (free - began)


@pytest.mark.parametrize("workers", [1, 4, 16])
def test_the_queue_agrees_with_a_virtual_clock(workers):
    queue = ServerQueue(think_s=1.0, service_s=0.1)
    updates_per_s = workers / compute_asynchronous_step_s(queue, workers)
    assert updates_per_s == pytest.approx(simulated(queue, workers, 6000), rel=0.05)
    assert updates_per_s <= 1 / queue.service_s


def test_past_the_knee_workers_bring_nothing():
    queue = ServerQueue(think_s=0.9, service_s=0.1)
    assert queue.num_workers_at_saturation == pytest.approx(10)
    before, after = (n / compute_asynchronous_step_s(queue, n) for n in (20, 40))
    assert after / before < 1.01
    assert compute_synchronous_step_s(queue, 4) == pytest.approx(0.9 + 0.4)


def test_log_error_of_a_time_that_is_none():
    assert naive.compute_ln_error(-1.0, 1.0) == pytest.approx(math.log(1e-3))


# --- a study's projection ------------------------------------------------------------------------


def replayed_ddp(workers: int, compute_s: float) -> float:
    """A step of one bucket of 100 MB, ready with the last of backward."""
    links = Links("gloo", {"all_reduce": WITHIN})
    call = CollectiveCall("all_reduce", 1e8)
    schedule = Schedule((CollectiveStart(call, 0.9, False),), 0.9)
    return simulate_step_s(
        schedule, compute_s, lambda c: links.compute_collective_time(c, LinkLayout(workers))[0]
    )


@pytest.mark.parametrize("scaling", ["weak", "strong"])
def test_measured_links_recover_times_that_follow_them(scaling):
    def true_s(n: int) -> float:
        return replayed_ddp(n, 0.1 if scaling == "weak" else 0.02 + 0.08 / n)

    measured = [MeasuredStep(n, true_s(n), 1) for n in (1, 2, 4)]
    (found,) = project_step_times(measured, scaling, [(16, 1)], replayed_ddp)
    assert found.rule == BY_LINKS
    assert found.skill.relative_error_reduction > 0.9
    assert found.interval.middle_s == pytest.approx(true_s(16), rel=1e-4)
    assert found.interval.low_s < true_s(16) < found.interval.high_s
    assert "times that of" in describe_projected_step_time(found)


def test_a_replay_without_skill_gives_way_to_the_counts():
    measured = points(n1=1.0, n2=1.05, n4=1.1)
    (found,) = project_step_times(measured, "weak", [(8, None)], lambda n, c: c * n)
    assert found.rule == BY_COUNTS
    assert found == project_step_times(measured, "weak", [(8, None)])[0]


def test_one_count_alone_is_too_few_to_give_way_to_a_naive_rule():
    """At four counts the same replay, as little off, has been worse twice."""
    off = {1: 1.0, 2: 1.02, 4: 1.0, 8: 1.04}
    measured = [MeasuredStep(n, 0.1 * f, 1) for n, f in off.items()]
    rules = {}
    for counts in (3, 4):
        (found,) = project_step_times(
            measured[:counts], "weak", [(16, 1)], lambda n, c: c * n**0.06
        )
        assert not naive.compute_skill(
            make_replay_rule(lambda n, c: c * n**0.06), measured[:counts], "weak"
        ).matches_best_naive_rule
        rules[counts] = found.rule
    assert rules == {3: BY_LINKS, 4: BY_COUNTS}


def test_a_replay_whose_interval_says_nothing_gives_way_although_it_has_skill():
    off = {1: 1.0, 2: 2.0, 4: 1.0}  # a disturbed count throws the naive rules off further
    measured = [MeasuredStep(n, replayed_ddp(n, 0.1) * f, 1) for n, f in off.items()]
    (found,) = project_step_times(measured, "weak", [(16, 1)], replayed_ddp)
    assert naive.compute_skill(
        make_replay_rule(replayed_ddp), measured, "weak"
    ).matches_best_naive_rule
    assert found.rule == BY_COUNTS


def test_counts_alone_do_not_cross_a_boundary_that_only_links_have_crossed():
    measured = [MeasuredStep(n, s, 1) for n, s in ((1, 1.0), (2, 1.05), (4, 1.1))]
    levels = ("within", "between")
    (by_links,) = project_step_times(
        [MeasuredStep(n, replayed_ddp(n, 0.1), 1) for n in (1, 2, 4)], "weak", [(16, 2)], replayed_ddp,
        measured_levels=levels,
    )  # fmt: skip
    assert by_links.interval is not None
    (by_counts,) = project_step_times(
        measured, "weak", [(16, 2)], lambda n, c: c * n, measured_levels=levels
    )
    assert by_counts.rule == BY_COUNTS
    assert "measure steps on two nodes" in by_counts.refusal_reason


def test_servers_fill_sooner_where_a_workers_share_shrinks():
    """A push takes 0.1 s; computing takes 1.2 s alone, and in strong scaling a fourth of it on four."""

    def replayed(workers: int, compute_s: float) -> float:
        return compute_asynchronous_step_s(ServerQueue(compute_s, 0.1), workers)

    refused = {}
    for scaling in ("weak", "strong"):
        computing = {n: 1.2 / n if scaling == "strong" else 1.2 for n in (1, 2, 6)}
        measured = [MeasuredStep(n, replayed(n, computing[n]), 1) for n in (1, 2)]
        compute_s = fit_computation_s(replayed, measured, scaling)
        assert compute_s(6) == pytest.approx(computing[6], rel=1e-3)
        (found,) = project_step_times(
            measured, scaling, [(6, 1)], replayed, has_servers=True,
            make_queue=lambda n, compute_s=compute_s: ServerQueue(compute_s(n), 0.1),
        )  # fmt: skip
        refused[scaling] = found.refusal_reason
    assert refused["weak"] is None  # full at 13
    assert (
        "saturated from about 5 workers on" in refused["strong"]
    )  # 1.2 / 5 + 0.1 is 3.4 pushes, 1.2 / 4 four


def test_servers_beside_each_worker_grow_in_number_with_them(tmp_path):
    """A push at one of eight servers takes an eighth of what it takes at one."""
    times = [
        CollectiveTime("servers-shm", "push_pull", n, 1, 1 << 24, 0, n * 0.1) for n in (1, 2, 4)
    ]
    write_links(tmp_path, times, math.nan)
    found = {}
    for server_placement in ("central", "colocated"):

        def at(workers: int, server_placement: str = server_placement) -> SimpleNamespace:
            options = get_option_defaults("ps-async") | {
                "server_placement": server_placement,
                "transport": "shm",
            }
            options["servers"] = workers if server_placement == "colocated" else 1
            settings = SimpleNamespace(strategy="ps-async", options=options)
            return SimpleNamespace(served=True, settings=settings, steps_per_batch=1)

        evidence = SimpleNamespace(
            num_parameters=(1 << 24) / 4, measured_steps=points(n4=1.0), stragglers=None
        )
        on = make_link_replay(at, evidence, None, tmp_path / "links.csv", lambda workers: 1)
        found[server_placement] = [on.make_server_queue(n, 1.0).service_s for n in (1, 8)]
    assert found["central"] == pytest.approx([0.1, 0.1], rel=0.01)
    assert found["colocated"] == pytest.approx([0.1, 0.1 / 8], rel=0.2)


def test_servers_without_computing_take_what_was_measured(tmp_path):
    """The latency passes once for all workers, and the bytes one after the other: as the fit has it."""

    def at(workers: int) -> SimpleNamespace:
        options = get_option_defaults("ps-sync") | {"transport": "shm", "servers": 1}
        settings = SimpleNamespace(strategy="ps-sync", options=options)
        return SimpleNamespace(served=True, settings=settings, steps_per_batch=1)

    def true_s(workers: int, size: int) -> float:
        return 1e-3 + workers * size / 1e9

    sizes = (1 << 16, 1 << 20, 1 << 24)
    times = [
        CollectiveTime("servers-shm", "push_pull", n, 1, s, 0, true_s(n, s))
        for n in (1, 2, 4)
        for s in sizes
    ]
    write_links(tmp_path, times, math.nan)
    for size in sizes:
        evidence = SimpleNamespace(
            num_parameters=size / 4, measured_steps=points(n4=1.0), stragglers=None
        )
        on = make_link_replay(at, evidence, None, tmp_path / "links.csv", lambda workers: 1)
        for n in (1, 4, 32):
            assert on.replay_step_s(n, 0.0) == pytest.approx(true_s(n, size), rel=0.01)


def test_servers_that_nobody_has_measured_are_not_followed_to_where_they_may_be_full():
    measured = points(n1=1.0, n2=0.52, n4=0.27, n8=0.14)
    for servers in (True, False):
        found = project_step_times(
            measured, "strong", [(16, None), (32, None)], has_servers=servers
        )
        assert found[0].refusal_reason is None
        assert bool(found[1].refusal_reason) == servers
    assert (
        "the time of a push and pull was not measured"
        in project_step_times(measured, "strong", [(32, None)], has_servers=True)[0].refusal_reason
    )
    # Counts beyond were measured: what is known is known.
    far = [*measured, *points(n32=0.05)]
    assert (
        project_step_times(far, "strong", [(32, None)], has_servers=True)[0].refusal_reason is None
    )


def test_repeats_that_lie_apart_widen_the_interval_about_its_middle():
    measured = points(n1=1.0, n2=1.05, n4=1.1)
    alike, apart = (
        project_step_times(measured, "weak", [(8, None)], repeat_half_width_ln=reach)[0].interval
        for reach in (0.0, 0.3)
    )
    assert apart.middle_s == alike.middle_s
    for end in ("low_s", "high_s"):
        was, now = (abs(math.log(getattr(i, end) / i.middle_s)) for i in (alike, apart))
        assert now == pytest.approx(math.hypot(was, 0.3))


def test_without_skill_the_better_naive_rule_is_named_and_within_the_interval():
    measured = points(n1=1.0, n2=0.6, n4=0.36)  # the same loss with each doubling
    (found,) = project_step_times(measured, "strong", [(32, None)])
    assert not found.skill.matches_best_naive_rule
    assert found.rule == BY_COUNTS
    naive_s = found.step_s_by_naive_rule[found.skill.best_naive_rule]
    assert (
        found.interval.low_s
        == naive_s
        < found.interval.middle_s
        == found.step_s_by_naive_rule["a + b/N"]
    )
    told = describe_projected_step_time(found)
    assert "On the measured counts" in told
    assert (
        f"{found.skill.best_naive_rule} had smaller errors; it projects {format_short_time(naive_s)}"
        in told
    )


def test_counts_alone_are_projected_by_a_plus_b_over_n_with_the_studys_own_errors():
    measured = points(n1=1.0, n2=1.09, n4=1.17, n8=1.18)
    near, far = project_step_times(measured, "weak", [(16, None), (64, None)])
    assert near.rule == BY_COUNTS
    for found in (near, far):
        assert found.interval.middle_s == found.step_s_by_naive_rule["a + b/N"]
        assert found.interval.low_s < found.interval.middle_s < found.interval.high_s
    assert far.interval.high_s / far.interval.low_s > near.interval.high_s / near.interval.low_s
    assert (
        "by a + b/N; no naive rule had smaller errors on the measured counts."
        in describe_projected_step_time(near)
    )
    exact = [MeasuredStep(n, 1 + 0.2 * (n - 1) / n, 1) for n in (1, 2, 4, 8)]
    (few,), (many,) = (project_step_times(exact[:k], "weak", [(16, 1)]) for k in (2, 4))
    assert math.log(many.interval.high_s / many.interval.low_s) < math.log(
        few.interval.high_s / few.interval.low_s
    )


@pytest.mark.parametrize(
    ("scaling", "measured", "workers", "said"),
    [
        ("strong", {"n1": 1.0, "n2": 0.6}, 4, None),
        ("strong", {"n1": 1.0, "n2": 0.6}, 8, "through two counts of strong scaling is unreliable beyond 4"),
        ("strong", {"n1": 1.0, "n2": 0.6, "n4": 0.4}, 32, None),
        ("weak", {"n1": 1.0, "n2": 1.2}, 16, None),
        ("weak", {"n1": 1.0, "n2": 3.0}, 4, "spans more than a factor of 4: measure links"),
        ("strong", {"n1": 1.0, "n2": 0.47, "n4": 0.215}, 32, "is below zero at 32 workers"),
    ],
)  # fmt: skip
def test_counts_that_do_not_show_it_are_not_stretched(scaling, measured, workers, said):
    """Without links; with links that hold, the replay answers."""
    (found,) = project_step_times(points(**measured), scaling, [(workers, None)])
    assert (found.interval is None) == (said is not None)
    assert said is None or said in found.refusal_reason


def test_a_study_of_two_counts_says_that_its_skill_is_not_known():
    found, far = project_step_times(points(n1=1.0, n2=1.1), "weak", [(8, None), (1024, None)])
    assert found.rule == BY_COUNTS
    assert found.step_s_by_naive_rule["perfect"] == pytest.approx(1.1)
    assert "cannot test this rule" in describe_projected_step_time(found)
    assert far.interval is None
    assert "not projected" in describe_projected_step_time(far)


def test_intervals_come_from_counts_that_were_left_out():
    rule = naive.project_by_perfect_scaling
    errors = compute_leave_one_out_errors(rule, points(n1=1.0, n2=1.0, n4=2.0), "weak")
    assert [round(e, 3) for e, _ in errors] == [round(math.log(2), 3)] * 2 + [
        round(math.log(0.5), 3)
    ]
    assert [d for _, d in errors] == [1, 1, 1]


def test_links_that_were_off_their_fit_make_the_interval_wider():
    measured = [MeasuredStep(n, replayed_ddp(n, 0.1), 1) for n in (1, 2, 4)]

    def slowed(workers: int, compute_s: float) -> float:
        return compute_s + 2 * (replayed_ddp(workers, compute_s) - compute_s)

    made = [
        project_step_times(measured, "weak", [(16, 1)], replayed_ddp, s)[0].interval
        for s in (None, slowed)
    ]
    assert made[1].middle_s == made[0].middle_s
    assert made[1].high_s / made[1].low_s > 1.1 * made[0].high_s / made[0].low_s


def test_what_cannot_be_known_is_refused_with_the_remedy():
    measured = [MeasuredStep(1, 1.0, 1), MeasuredStep(2, 1.1, 1)]
    assert find_projection_refusal_reason(measured, 2 * MAX_COUNT_RATIO, 1) is None
    assert "measure 3 or more" in find_projection_refusal_reason(
        measured, 2 * MAX_COUNT_RATIO + 1, 1
    )
    assert "between nodes" in find_projection_refusal_reason(measured, 16, 2)
    assert (
        find_projection_refusal_reason(measured, 16, 2, measured_levels={"within", "between"})
        is None
    )
    assert find_projection_refusal_reason([MeasuredStep(8, 1.0, 2)], 16, 4) is None
    full = ServerQueue(think_s=0.9, service_s=0.1)
    assert "servers are saturated from about 11" in find_projection_refusal_reason(
        measured, 12, 1, make_queue=lambda workers: full
    )
    assert find_projection_refusal_reason(measured, 8, 1, make_queue=lambda workers: full) is None
