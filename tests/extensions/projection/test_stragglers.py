"""What waiting for the slowest of N workers costs, from series of workers' own times."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
from test_plan_footprint import request_for

from launching import settings
from stratbench.extensions.plan.footprint import fake
from stratbench.extensions.projection.stragglers import MIN_STEPS, read_stragglers


def recorded(*series: list[float]) -> dict[str, Any]:
    return {"workers": [{"own_ms": own} if own else {} for own in series]}


def test_the_slowest_of_alike_workers_is_as_far_off_as_theory_says():
    draw = np.random.default_rng(1)
    series = draw.exponential(size=(8, 400)).clip(0.01)
    stragglers = read_stragglers([recorded(*series.tolist())])
    for workers in (1, 4, 16):
        # The largest of W exponential times is H_W times their mean.
        of_theory = sum(1 / k for k in range(1, workers + 1))
        assert stragglers.compute_slowest_to_mean_time_ratio(workers) == pytest.approx(
            of_theory, rel=0.06
        )
    assert (
        stragglers.compute_slowest_to_mean_time_ratio(16, 1.0)
        > stragglers.compute_slowest_to_mean_time_ratio(16)
        > stragglers.compute_slowest_to_mean_time_ratio(16, -1.0)
    )


def test_a_worker_that_is_always_slow_is_so_in_every_step_once_it_is_drawn():
    slow, quick = [3.0] * MIN_STEPS, [1.0] * MIN_STEPS
    stragglers = read_stragglers([recorded(slow, quick)])
    assert stragglers.compute_slowest_to_mean_time_ratio(1000) == pytest.approx(
        1.5
    )  # 3 over the mean, 2
    assert 1.0 < stragglers.compute_slowest_to_mean_time_ratio(2) < 1.5


def times_of(workers: int, stays: float, seed: list[int], steps: int = 100) -> np.ndarray:
    """Log-normal times, of whose variance a share is the worker's own."""
    draw = np.random.default_rng(seed)
    own, varying = draw.normal(size=(workers, 1)), draw.normal(size=(workers, steps))
    return np.exp(0.2 * (math.sqrt(stays) * own + math.sqrt(1 - stays) * varying))


@pytest.mark.parametrize(("stays", "least", "most"), [(0.0, 0.8, 0.04), (0.5, 0.7, 0.25)])
def test_it_is_as_sure_as_it_is_right(stays, least, most):
    """An interval of 80 % on four times the workers; narrow where workers have no level of their own."""
    within, widths = [], []
    for job in range(60):
        truth = times_of(16, stays, [job])
        measured = read_stragglers([recorded(*truth[:4].tolist())])
        # As a projection does: what four wait for is in their measured step.
        step_s = [truth[:n].max(axis=0).mean() for n in (4, 16)]
        projected_s = (
            step_s[0]
            * measured.compute_slowest_to_mean_time_ratio(16)
            / measured.compute_slowest_to_mean_time_ratio(4)
        )
        error = math.log(projected_s / step_s[1])
        width = 1.28 * math.log(
            measured.compute_slowest_to_mean_time_ratio(16, 1.0)
            / measured.compute_slowest_to_mean_time_ratio(16)
        )
        within.append(abs(error) < math.hypot(width, 0.01))
        widths.append(width)
    assert np.mean(within) >= least
    assert np.median(widths) < most


def test_few_workers_are_less_sure_of_what_stays():
    widths = {
        n: np.median([
            math.log(
                s.compute_slowest_to_mean_time_ratio(8 * n, 1.0)
                / s.compute_slowest_to_mean_time_ratio(8 * n)
            )
            for job in range(40)
            for s in [read_stragglers([recorded(*times_of(n, 0.5, [job]).tolist())])]
        ])
        for n in (2, 8)
    }  # fmt: skip
    assert widths[2] > 1.2 * widths[8] > 0


@pytest.mark.parametrize("measured", [2, 4])
@pytest.mark.parametrize("common", [0.1, 0.3])
def test_nobody_waits_for_what_makes_all_workers_of_a_step_slow(measured, common):
    said, alone, of_alone = [], [], []
    for job in range(20):
        truth = times_of(32, 0.0, [job], steps=200)
        shared = np.exp(common * np.random.default_rng([job, 1]).normal(size=200))
        said.append(
            read_stragglers(
                [recorded(*(truth * shared)[:measured].tolist())]
            ).compute_slowest_to_mean_time_ratio(32)
        )
        alone.append(
            read_stragglers(
                [recorded(*truth[:measured].tolist())]
            ).compute_slowest_to_mean_time_ratio(32)
        )
        of_alone.append(truth.max(axis=0).mean() / truth.mean())
    assert np.mean(said) == pytest.approx(np.mean(of_alone), rel=0.03)
    assert np.mean(alone) == pytest.approx(np.mean(of_alone), rel=0.03)


def test_rare_long_steps_of_one_worker_stay_its_own():
    draw = np.random.default_rng(4)
    series = np.where(draw.random((2, 4000)) < 0.03, 4.0, 1.0) * draw.lognormal(0, 0.02, (2, 4000))
    none_long = 0.97**16
    assert read_stragglers([recorded(*series.tolist())]).compute_slowest_to_mean_time_ratio(
        16
    ) == pytest.approx((none_long + 4 * (1 - none_long)) / (0.97 + 4 * 0.03), rel=0.06)


def test_workers_that_are_slow_in_the_same_steps_alone_wait_for_nobody():
    own = np.random.default_rng(3).lognormal(0, 0.5, size=100)
    stragglers = read_stragglers([recorded(own.tolist(), (2 * own).tolist())])
    assert stragglers.compute_slowest_to_mean_time_ratio(1000) == pytest.approx(4 / 3)


def test_repeats_are_pooled_as_shares_of_their_own_mean():
    one = recorded([1.0] * 30, [1.0] * 30)
    other = recorded([5.0] * 40, [5.0] * 40)
    stragglers = read_stragglers([one, other])
    assert stragglers.relative_step_times.shape == (4, 30)
    assert stragglers.compute_slowest_to_mean_time_ratio(8) == pytest.approx(1.0)
    assert stragglers.compute_slowest_to_mean_time_ratio(8, 1.0) == pytest.approx(1.0)


@pytest.mark.parametrize(
    "record",
    [
        recorded([1.0] * 50),
        recorded([1.0] * (MIN_STEPS - 1), [1.0] * 50),
        recorded([1.0] * 50, []),
        recorded([0.0] * 50, [0.0] * 50),
        recorded([0.0] + [1.0] * 49, [1.0] * 50),
        {"workers": []},
    ],
)
def test_nothing_is_said_without_enough_of_it(record):
    assert read_stragglers([record]) is None


@pytest.mark.parametrize(
    ("strategy", "model", "has"),
    [
        ("ddp", "vgg-compact", True),
        ("zero1", "vgg-compact", True),
        ("ddp", "resnet-compact", False),
        ("ps-sync", "resnet-compact", True),
        ("fsdp", "vgg-compact", False),
    ],
)
def test_a_strategy_says_in_which_phases_it_waits_for_nobody(strategy, model, has):
    """Where buffers are sent before forward, it waits in each."""
    request = request_for(strategy, model, workers=1 if strategy == "ps-sync" else 2)
    with fake.open_fake_worker_environment(request):
        network, made, worker = fake.build_model_strategy_and_worker(request)
        fake.set_up_strategy(made, network, worker)
        assert bool(made.own_phases) == has


@pytest.mark.slow
@pytest.mark.parametrize("strategy", ["ddp", "ps-sync"])
def test_real_workers_record_the_times_in_which_they_wait_for_nobody(start_cell, warm, strategy):
    launched = start_cell(settings(strategy, model="vgg-compact"), env=warm)
    code, output = launched.finish()
    assert code == 0, output
    for worker in launched.read_record()["workers"]:
        assert len(worker["own_ms"]) == worker["steps"]
        assert 0 < min(worker["own_ms"]) <= max(worker["own_ms"]) < 1e3 * worker["train_time_s"]
