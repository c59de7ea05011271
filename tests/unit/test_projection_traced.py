"""The schedule of a real strategy's step, traced on fake tensors, and what its replay makes of it."""

from __future__ import annotations

import pytest
from test_plan_footprint import request_for

from stratbench.plan.device_rates import Device
from stratbench.plan.projection.links import Links
from stratbench.plan.projection.replay import Schedule, replay
from stratbench.plan.projection.traced import traced_schedule
from stratbench.ps.policies.policies import POLICIES
from stratbench.strategies import REGISTRY, strategy_class
from stratbench.telemetry.collective_cost import Layout, Link

pytestmark = [pytest.mark.timeout(120), pytest.mark.slow]

DEVICE = Device("made up", 1 << 34, 1e12, 1e11, 1e10, 1e9, is_gpu=False)
FAST, SLOW = Link(1e-9, 1e15), Link(1e-3, 1e7)
KINDS = ("all_reduce", "all_gather", "reduce_scatter", "broadcast", "send")


def scheduled(strategy: str, workers: int = 4, on_cuda: bool = False, **options) -> Schedule:
    device = "cuda" if on_cuda else "cpu"
    request = request_for(strategy, workers=workers, device=device, options=options)
    return traced_schedule(request, 8, DEVICE)


def step_s(schedule: Schedule, link: Link, workers: int = 4) -> float:
    links = Links("gloo", {kind: {"within": link} for kind in KINDS})
    layout = Layout(workers)
    return replay(schedule, 1.0, lambda call: links.chosen(call, layout)[0]).step_s


@pytest.fixture(scope="module")
def ddp() -> Schedule:
    return scheduled("ddp", bucket_cap_mb=1)


def test_buckets_of_ddp_start_during_backward_in_order(ddp):
    reduced = [s for s in ddp.collectives if s.call.kind == "all_reduce"]
    assert len(reduced) >= 2
    assert [s.share for s in reduced] == sorted(s.share for s in reduced)
    assert 1 / 4 < reduced[0].share < reduced[-1].share <= ddp.backward_ends < 1
    assert not any(s.needed for s in reduced)


def test_what_links_cost_is_what_the_replay_adds(ddp):
    assert step_s(ddp, FAST) == pytest.approx(1.0, rel=1e-3)
    links = Links("gloo", {kind: {"within": SLOW} for kind in KINDS})
    all_s = sum(links.chosen(s.call, Layout(4))[0] for s in ddp.collectives)
    assert max(1.0, all_s) < step_s(ddp, SLOW) < 1.0 + all_s


def test_fsdp_gathers_before_it_computes_and_runs_ahead_on_gpus_alone():
    on_cpu, on_gpu = (scheduled("fsdp", on_cuda=on_cuda) for on_cuda in (False, True))
    for schedule in (on_cpu, on_gpu):
        gathers = [s for s in schedule.collectives if s.call.kind == "all_gather"]
        scatters = [s for s in schedule.collectives if s.call.kind == "reduce_scatter"]
        assert gathers
        assert all(s.needed for s in gathers)
        assert scatters
        assert not any(s.needed for s in scatters)
    middle = Link(1e-5, 1e9)
    assert step_s(on_gpu, middle) < step_s(on_cpu, middle)


@pytest.mark.parametrize(
    "strategy", sorted(set(REGISTRY) - set(POLICIES) - {"single", "deepspeed", "command"})
)
@pytest.mark.parametrize("model", ["resnet-compact", "gpt-compact"])
def test_a_strategy_names_every_kind_of_collective_that_its_steps_start(strategy, model):
    options = {"pipeline": {"microbatches": 2}}.get(strategy, {})
    clip_norm = None if strategy in ("gossip", "local-sgd", "diloco") else 1.0
    if strategy in ("tensor", "pipeline") and model == "resnet-compact":
        pytest.skip("its layers are not divided")
    request = request_for(strategy, model, workers=2, options=options, clip_norm=clip_norm)
    found = {s.call.kind for s in traced_schedule(request, 8, DEVICE).collectives}
    assert found <= set(strategy_class(strategy).collectives)
