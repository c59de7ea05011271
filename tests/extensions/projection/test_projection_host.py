"""A host that issues operations to a device may be what limits a step: held to simulated steps."""

from __future__ import annotations

import pytest

from stratbench.extensions.projection.evidence import ProjectionInputs
from stratbench.extensions.projection.naive import MeasuredStep
from stratbench.extensions.projection.project import (
    BY_LINKS,
    Projection,
    describe_projected_step_time,
    describe_projection_basis,
    fit_computation_s,
    project_step_times,
)
from stratbench.extensions.projection.replay import (
    CollectiveStart,
    Schedule,
    is_host_unblocked,
    simulate_step_s,
)
from stratbench.telemetry.collectives import CollectiveCall

LAYERS, OPERATIONS = 8, 400
GATHER, SCATTER = CollectiveCall("all_gather", 1.0), CollectiveCall("reduce_scatter", 1.0)
#: A layer's parameters are gathered before its forward and its backward, its gradients scattered after that.
FSDP = Schedule(
    tuple(
        sorted(
            [
                *(
                    CollectiveStart(GATHER, i / LAYERS * 0.3, True, is_prefetched=True)
                    for i in range(LAYERS)
                ),
                *(
                    CollectiveStart(GATHER, 0.3 + i / LAYERS * 0.6, True, is_prefetched=True)
                    for i in range(LAYERS)
                ),
                *(
                    CollectiveStart(SCATTER, 0.3 + (i + 1) / LAYERS * 0.6, False)
                    for i in range(LAYERS)
                ),
            ],
            key=lambda s: s.computed_share_at_start,
        )
    ),
    0.9,
    OPERATIONS,
)


def simulated_s(compute_s: float, collective_s: float, host_s: float, steps: int = 30) -> float:
    """Seconds of a step, once they are even: a host, a device's stream and a channel, operation by operation.

    The host issues operations one after the other and waits for nothing. The device takes them in order, each
    after its issue; a gather is issued where the one before it is needed.
    """
    host = stream = channel = 0.0
    ends = []
    for _ in range(steps):
        started = list(FSDP.collectives)
        gathers = [s.computed_share_at_start for s in started if s.is_prefetched]
        issued = {0: 0.0}  # when each gather's issue, and what must have come before it, is through
        number = 0
        for i in range(OPERATIONS + 1):
            while started and started[0].computed_share_at_start <= i / OPERATIONS + 1e-9:
                one = started.pop(0)
                if one.is_prefetched:
                    begins = max(channel, issued[number] if number else max(host, stream))
                    channel = begins + collective_s
                    stream = max(stream, channel)
                    number += 1
                    if number < len(gathers):
                        issued[number] = max(host, stream)
                else:
                    channel = max(channel, host, stream) + collective_s
            if i == round(OPERATIONS * FSDP.computed_share_at_backward_end):
                stream = max(stream, channel)
            if i < OPERATIONS:
                host += host_s / OPERATIONS
                stream = max(stream, host) + compute_s / OPERATIONS
        ends.append(stream)
    return (ends[-1] - ends[steps // 2]) / (steps - 1 - steps // 2)


def collective_s(workers: int) -> float:
    """Of a ring."""
    return 1e-4 + 5e-4 * (workers - 1) / workers if workers > 1 else 0.0


def replayed(workers: int, compute_s: float) -> float:
    return simulate_step_s(FSDP, compute_s, lambda _: collective_s(workers))


def true_s(workers: int, compute_s: float, host_s: float) -> float:
    return simulated_s(compute_s, collective_s(workers), host_s)


@pytest.mark.parametrize("compute_s", [0.02, 0.1, 0.4])
@pytest.mark.parametrize("host_s", [0.0, 0.05, 0.2])
def test_steps_follow_one_another_in_the_longer_time_of_host_and_device(compute_s, host_s):
    for workers in (1, 4, 16):
        expected = max(host_s, replayed(workers, compute_s))
        assert true_s(workers, compute_s, host_s) == pytest.approx(expected, rel=0.02)


def projected(scaling: str, measured: list[MeasuredStep], host_s: float) -> dict[int, Projection]:
    targets = [(n, 1) for n in (8, 16, 32)]
    made = project_step_times(measured, scaling, targets, replayed, host_issue_s=host_s)
    assert {p.rule for p in made} == {BY_LINKS}
    return {p.workers: p for p in made}


@pytest.mark.parametrize("host_s", [0.045, 0.12])
def test_in_strong_scaling_the_host_becomes_the_limit(host_s):
    """Of 400 ms of computing, which more workers divide, 45 ms to issue it are the limit from 16 on, 120 ms
    from 4 on, which is measured."""
    measured = [MeasuredStep(n, true_s(n, 0.4 / n, host_s), 1) for n in (1, 2, 4)]
    with_it, without = (projected("strong", measured, s) for s in (host_s, 0.0))
    for n in (8, 16, 32):
        truth_s = true_s(n, 0.4 / n, host_s)
        assert with_it[n].interval.middle_s == pytest.approx(truth_s, rel=0.03)
        assert with_it[n].interval.low_s < truth_s < with_it[n].interval.high_s
        limited = truth_s <= 1.001 * host_s
        assert limited == (n >= 16 or host_s > 0.1)
        assert with_it[n].host_issue_s == (host_s if limited else 0)
        assert without[n].host_issue_s == 0
    if host_s < 0.1:
        assert without[32].interval.middle_s < 0.75 * true_s(32, 0.4 / 32, host_s)
    assert (
        f"limited by the host, which needs {1e3 * host_s:.0f} ms to issue"
        in describe_projected_step_time(with_it[32])
    )
    assert "limited by the host" in describe_projection_basis(with_it[32], measured)
    assert "the host" not in describe_projected_step_time(without[32])


def test_a_fast_host_changes_nothing():
    measured = [MeasuredStep(n, true_s(n, 0.4 / n, 0.005), 1) for n in (1, 2, 4)]
    assert projected("strong", measured, 0.005) == projected("strong", measured, 0.0)


def test_a_step_that_the_host_limits_says_nothing_of_computing():
    """60 ms of computing a worker, 75 to issue it; communication is the limit from 4 on."""

    def slow(workers: int, compute_s: float) -> float:
        return compute_s + 0.01 * workers

    measured = [MeasuredStep(n, max(0.075, slow(n, 0.06)), 1) for n in (1, 4, 8)]
    assert fit_computation_s(slow, measured, "weak", 0.075)(32) == pytest.approx(0.06, rel=1e-3)
    assert fit_computation_s(slow, measured[:1], "weak", 0.075)(32) == pytest.approx(
        0.065, rel=1e-3
    )


@pytest.mark.parametrize(
    ("operations", "issue_s", "known"),
    [
        (500, 0.01, True), (5000, 0.01, False), (5000, 0.08, False), (5000, 0.095, True), (9e9, 0.1, True),
        (500, 0.105, True), (500, 0.12, False),
    ],
)  # fmt: skip
def test_the_time_of_a_host_that_may_have_waited_is_not_known(operations, issue_s, known):
    assert is_host_unblocked(operations, issue_s, 0.1) == known


def evidence(*records: dict) -> ProjectionInputs:
    points = (MeasuredStep(2, 0.1, 1),)
    return ProjectionInputs("one", "fsdp", "net", "strong", "", None, points, (), (records,))


def record(*issue_ms: float | None, slowdown: dict | None = None, on_host: bool = False) -> dict:
    return {
        "workers": [{"issue_ms": ms} for ms in issue_ms],
        "settings": {"slowdown": slowdown},
        "strategy": {"traits": {"states_on_host": on_host}},
    }


def test_the_hosts_time_is_the_slowest_workers_by_the_median_of_repeats():
    assert evidence(record(3.0, 5.0), record(9.0, 1.0), record(2.0, 4.0)).host_issue_s == 5e-3
    waiting = (record(5.0, 5.0, slowdown={"factor": 2}), record(5.0, 5.0, on_host=True))
    for unknown in (record(3.0, None), *waiting, record()):
        assert evidence(unknown).host_issue_s is None
        assert evidence(unknown, record(3.0, 4.0)).host_issue_s == 4e-3
    before = record(1.0)
    del before["workers"][0]["issue_ms"], before["strategy"]["traits"]["states_on_host"]
    assert evidence(before).host_issue_s is None
