"""The simulated queue: cases by hand, known formulas, and copies that meet the same queue."""

from __future__ import annotations

import math
import random
import statistics

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from stratbench.extensions.queue.background import make_poisson_arrivals
from stratbench.extensions.queue.simulator import ALL, Arrival, Cluster, Rules, SimulatedJob
from stratbench.extensions.queue.trainings import (
    ElasticTraining,
    Gang,
    Scaling,
    SimulatedCheckpoints,
)

FIFO, EASY = Rules(num_reservations=None), Rules(num_reservations=1)
NEVER = SimulatedCheckpoints(interval_s=1800.0, blocking_s=0.0)


def run(arrivals, nodes=1, gpus_per_node=4, rules=EASY, seed=0):
    sim = Cluster(nodes, gpus_per_node, arrivals, rules, seed)
    sim.simulate_until()
    return sim


def waits(rules, *requests, wide=5.0):
    """By hand: of 4 GPUs 3 are busy until 10, a job of 4 comes at 1, jobs of 1 at 2 ask for `requests`."""
    jobs = [Arrival(0, 3, 10, 10), Arrival(1, 4, wide, wide)]
    jobs += [Arrival(2, 1, r, r) for r in requests]
    sim = run(jobs, rules=rules)
    return dict(sim.waits)[4], [wait_s for gpus, wait_s in sim.waits if gpus == 1]


def trained(training, sim):
    training.submit_training(sim)
    sim.simulate_until(is_done=lambda: training.is_finished)
    return training


# ---- by hand


def test_easy_lets_pass_what_ends_before_the_reservation_and_nothing_else():
    assert waits(Rules(num_reservations=1), 8) == (
        9,
        [0],
    )  # 2 + 8 = 10, when the wide job can start
    assert waits(Rules(num_reservations=1), 9) == (
        9,
        [13],
    )  # one second too long: behind it, from 15


def test_first_come_first_served_lets_nothing_pass():
    assert waits(FIFO, 8) == (9, [13])


def test_without_reservations_a_wide_job_waits_for_whoever_fits():
    assert waits(Rules(num_reservations=0), 9) == (10, [0])


def test_slurms_default_keeps_the_second_waiting_jobs_start_too():
    # Of 4 GPUs 3 are busy until 10, then 3 until 20, then all 4 until 30. A job of 1 that asks for 20
    # fits beside the first reservation until 23, and moves the second.
    jobs = [
        Arrival(0, 3, 10, 10),
        Arrival(1, 3, 10, 10),
        Arrival(2, 4, 10, 10),
        Arrival(3, 1, 20, 20),
    ]
    assert (
        dict(run(jobs, rules=Rules(num_reservations=1)).waits)[1] == 0
    )  # beside the first reservation
    assert dict(run(jobs, rules=Rules(num_reservations=ALL)).waits)[1] == 27
    assert dict(run(jobs, rules=Rules(num_reservations=ALL)).waits)[4] == 18


def test_a_job_that_fits_on_a_node_waits_for_one_with_room():
    busy = [Arrival(0, 2, 100, 100), Arrival(0, 3, 50, 50)]  # 2 + 1 GPUs are free on 2 nodes
    sim = Cluster(2, 4, busy, FIFO)
    sim.simulate_until(0)
    gang = Gang(30.0, 1e6, 3, Scaling(0.0), NEVER, 0.0)
    assert trained(gang, sim).finish_time_s == 50 + 10


def test_delays_are_added_where_they_were_measured():
    rules = Rules(job_start_delay_s=0.25, job_end_delay_s=0.5)
    sim = run([Arrival(0, 4, 10, 10), Arrival(0, 4, 10, 10)], rules=rules)
    assert [wait_s for _, wait_s in sim.waits] == [0.25, 0.25 + 10 + 0.5 + 0.25]


def test_backfill_at_intervals_starts_jobs_later_than_after_every_event():
    jobs = [Arrival(0, 3, 100, 100), Arrival(1, 4, 5, 5), Arrival(2, 1, 5, 5)]
    assert dict(run(jobs, rules=Rules(backfill_interval_s=0)).waits)[1] == 0
    assert dict(run(jobs, rules=Rules(backfill_interval_s=30)).waits)[1] == 29  # at 1 + 30


def test_a_job_that_asked_too_little_ends_at_its_wall_time():
    sim = Cluster(1, 4, [], FIFO)
    gang = Gang(4 * 100.0, 60.0, 4, Scaling(0.0), NEVER, startup_s=10.0)
    assert trained(gang, sim).finish_time_s == 2 * 60  # 50 s of work in each of two jobs


def test_a_preemptible_job_counts_as_free_and_goes_first():
    sim = Cluster(1, 4, [Arrival(5, 4, 10, 10), Arrival(7, 1, 3, 3)], Rules())
    split = ElasticTraining(40.0, 1e6, 4, Scaling(0.0), startup_s=0.0, is_preemptible=True)
    trained(split, sim)
    assert [wait_s for _, wait_s in sim.waits] == [0, 8]  # as if the training were not there


# ---- trainings


def test_alone_a_training_takes_its_startup_and_its_work():
    scaling = Scaling(0.02)
    exact = 60 + 3600 / scaling.compute_speed_per_worker(8)
    for training in (
        Gang(8 * 3600.0, 1e9, 8, scaling, NEVER),
        ElasticTraining(8 * 3600.0, 1e9, 8, scaling),
        ElasticTraining(8 * 3600.0, 1e9, 8, scaling, NEVER, is_synchronous=True),
    ):
        assert trained(training, Cluster(1, 8, [], Rules())).finish_time_s == pytest.approx(exact)


def test_synchronous_workers_pause_when_one_joins_and_asynchronous_ones_do_not():
    # One GPU is free until 100, then two: 100 s of one worker's work, then two at once.
    for synchronous, done_s in ((False, 200), (True, 230)):
        sim = Cluster(1, 2, [Arrival(0, 1, 100, 100)], FIFO)
        sim.simulate_until(0)
        split = ElasticTraining(
            300.0,
            1e6,
            2,
            Scaling(0.0),
            NEVER,
            0.0,
            is_synchronous=synchronous,
            pause_per_worker_change_s=30,
        )
        assert trained(split, sim).finish_time_s == done_s


def test_a_slow_node_slows_all_synchronous_workers_and_of_the_others_itself():
    rules = Rules(slow_node_share=1.0, slow_node_factor=2.0)
    sims = [Cluster(2, 1, [], rules) for _ in range(2)]
    for sim in sims:
        sim.speed[0] = 1.0
    both = ElasticTraining(300.0, 1e6, 2, Scaling(0.0), NEVER, 0.0, is_synchronous=True)
    assert trained(both, sims[0]).finish_time_s == 300
    assert (
        trained(ElasticTraining(300.0, 1e6, 2, Scaling(0.0), startup_s=0.0), sims[1]).finish_time_s
        == 200
    )


def test_a_lost_synchronous_worker_costs_the_time_since_the_checkpoint():
    def done_s(synchronous: bool, from_peers: bool = False) -> float:
        sim = Cluster(1, 2, [Arrival(150, 1, 1000, 1000)], Rules())
        how = SimulatedCheckpoints(interval_s=100.0, blocking_s=0.0)
        split = ElasticTraining(
            400.0, 1e6, 2, Scaling(0.0), how, 0.0, is_synchronous=synchronous, is_preemptible=True
        )
        split.pause_per_worker_change_s, split.resumes_from_peers = 10.0, from_peers
        return trained(split, sim).finish_time_s

    assert done_s(synchronous=False) == 150 + 100  # 300 of 400 are done at 150, then one goes on
    assert done_s(synchronous=True) == 160 + 200  # 200 of 400 are kept
    assert done_s(synchronous=True, from_peers=True) == 160 + 100  # it has left after a step


def test_a_lost_node_takes_what_was_done_since_the_last_checkpoint_though_peers_are_there():
    sim = Cluster(2, 1, [], Rules())
    how = SimulatedCheckpoints(interval_s=20.0, blocking_s=0.0)
    split = ElasticTraining(
        200.0, 1e6, 2, Scaling(0.0), how, 0.0, is_synchronous=True, resumes_from_peers=True
    )
    split.submit_training(sim)
    sim.simulate_until(30)
    sim._handle_node_failure(0)
    assert split.remaining_work_gpu_s == 200 - 2 * 20


def test_a_worth_below_one_takes_that_many_more_samples():
    times = [
        trained(
            ElasticTraining(800.0, 1e6, 4, Scaling(0.0, worth), startup_s=0.0),
            Cluster(1, 4, [], FIFO),
        )
        for worth in (1.0, 0.8)
    ]
    assert times[1].finish_time_s == pytest.approx(times[0].finish_time_s / 0.8)


# ---- formulas


def kiefer_wolfowitz(arrivals, servers):
    """The waits of FIFO with so many servers, by the recursion of Kiefer and Wolfowitz (1955)."""
    free_at, found = [0.0] * servers, []
    for job in arrivals:
        free_at.sort()
        found.append(max(0.0, free_at[0] - job.submit_s))
        free_at[0] = max(free_at[0], job.submit_s) + job.duration_s
    return found


def poisson_stream(jobs, servers, load, seed):
    rng, now, found = random.Random(seed), 0.0, []
    for _ in range(jobs):
        now += rng.expovariate(servers * load)
        service = rng.expovariate(1.0)
        found.append(Arrival(now, 1, service, service))
    return found


@settings(deadline=None, max_examples=30)
@given(st.integers(1, 16), st.sampled_from([0.5, 0.85, 1.2]), st.integers(0, 1000))
def test_single_gpus_wait_as_the_exact_recursion_says(servers, load, seed):
    arrivals = poisson_stream(150, servers, load, seed)
    sim = run(arrivals, gpus_per_node=servers, rules=FIFO)
    assert [w for _, w in sim.waits] == pytest.approx(kiefer_wolfowitz(arrivals, servers))


def test_the_mean_wait_of_one_server_is_pollaczeks():
    """M/M/1 at 0.7: 2.333 services; benchmarks/results/elastic/theory.md has more servers."""
    means = []
    for seed in range(10):
        waited = [w for _, w in run(poisson_stream(1500, 1, 0.7, seed), 1, 1, FIFO).waits]
        means.append(statistics.fmean(waited[150:]))
    half = 3.25 * statistics.stdev(means) / math.sqrt(10)  # t, 9 degrees of freedom, 99 %
    assert abs(statistics.fmean(means) - 0.7 / 0.3) < half


def test_a_gang_under_failures_takes_what_the_checkpoint_formula_says():
    """Periods of T that are each begun again when they fail: n M (exp(T / M) - 1)."""
    period_s, mtbf_s, times = 1800.0, 4 * 3600.0, []
    for seed in range(250):
        sim = Cluster(1, 1, [], Rules(node_mtbf_s=mtbf_s, node_repair_s=0.0), seed)
        gang = Gang(
            8 * period_s, 1e9, 1, Scaling(0.0), SimulatedCheckpoints(period_s, 0.0), startup_s=0.0
        )
        times.append(trained(gang, sim).finish_time_s)
    exact = 8 * mtbf_s * math.expm1(period_s / mtbf_s)
    error = statistics.stdev(times) / math.sqrt(len(times))
    assert abs(statistics.fmean(times) - exact) < 3.3 * error < 0.03 * exact


# ---- branches


def test_branches_meet_the_same_queue_and_leave_their_origin_as_it_was():
    arrivals = make_poisson_arrivals(120, 0.8, 16, seed=3)
    rules = Rules(node_mtbf_s=200_000.0)
    base, alone = (Cluster(4, 4, arrivals, rules, 1) for _ in range(2))
    for sim in (base, alone):
        sim.simulate_until(arrivals[60].submit_s)
    twins = [base.copy_cluster(), base.copy_cluster()]
    one, other = (
        trained(Gang(8 * 3600.0, 1e5, 8), twins[0]),
        trained(Gang(8 * 3600.0, 1e5, 8), twins[1]),
    )
    assert one.finish_time_s == other.finish_time_s
    for sim in (base, alone):
        sim.simulate_until(arrivals[-1].submit_s)
    assert base.waits == alone.waits
    assert base.busy_gpu_s == alone.busy_gpu_s
    holding = base.copy_cluster()
    Gang(8 * 3600.0, 1e5, 8).submit_training(holding)
    with pytest.raises(ValueError, match="has a job of a training"):
        holding.copy_cluster()


@settings(deadline=None, max_examples=25)
@given(
    seed=st.integers(0, 10**6),
    reserve=st.sampled_from([None, 0, 1, ALL]),
    load=st.sampled_from([0.5, 0.9, 1.5]),
    preemptible=st.booleans(),
)
def test_no_gpu_is_given_twice_and_every_job_ends(seed, reserve, load, preemptible):
    arrivals = make_poisson_arrivals(60, load, 16, seed)
    sim = Cluster(4, 4, arrivals, Rules(num_reservations=reserve, node_mtbf_s=500_000.0), seed)
    sim.simulate_until(arrivals[20].submit_s)
    split = ElasticTraining(
        10 * 3600.0, 7200.0, 10, is_preemptible=preemptible, is_synchronous=seed % 2 == 0
    )
    split.submit_training(sim)
    while not (split.is_finished and len(sim.waits) >= 60):
        sim.simulate_until(sim.now_s + 3600.0)
        used = dict.fromkeys(range(4), 0)
        for job in sim.running:
            for node, gpus in job.gpus_by_node.items():
                used[node] += gpus
        assert all(0 <= n <= 4 for n in used.values())
        assert [4 - used[node] for node in range(4)] == list(sim._free)
    assert split.remaining_work_gpu_s < 1e-3
    assert not [job for job in (*sim.queue, *sim.running) if job.owner]


def test_a_job_wider_than_the_cluster_is_refused():
    with pytest.raises(ValueError, match="requests 9 GPUs, but the cluster has 8"):
        Cluster(2, 4, [Arrival(0, 9, 1, 1)], Rules())


def test_others_ask_for_exactly_the_load():
    arrivals = make_poisson_arrivals(300, 0.7, 64, seed=5)
    asked = sum(a.gpus * a.duration_s for a in arrivals)
    assert asked / (64 * arrivals[-1].submit_s) == pytest.approx(0.7)
    assert all(
        a.requested_wall_time_s >= a.duration_s and a.requested_wall_time_s % 60 == 0
        for a in arrivals
    )
    assert SimulatedJob(1, 1, 1) != SimulatedJob(1, 1, 1)  # two alike are two
