"""The schedule of a real strategy's step, traced on fake tensors, and what its replay makes of it."""

from __future__ import annotations

import pytest
from test_plan_footprint import request_for

from stratbench.extensions.links.collective_cost import LinkLayout, LinkModel
from stratbench.extensions.plan.device_rates import Device
from stratbench.extensions.projection.links import Links
from stratbench.extensions.projection.replay import Schedule, simulate_step_s
from stratbench.extensions.projection.traced import trace_schedule
from stratbench.extensions.servers.policies.policies import POLICIES
from stratbench.strategies import REGISTRY, get_strategy_class

pytestmark = [pytest.mark.timeout(120), pytest.mark.slow]

DEVICE = Device("made up", 1 << 34, 1e12, 1e11, 1e10, 1e9, is_gpu=False)
FAST, SLOW = LinkModel(1e-9, 1e15), LinkModel(1e-3, 1e7)
KINDS = ("all_reduce", "all_gather", "reduce_scatter", "broadcast", "send")


def scheduled(strategy: str, workers: int = 4, on_cuda: bool = False, **options) -> Schedule:
    device = "cuda" if on_cuda else "cpu"
    request = request_for(strategy, workers=workers, device=device, options=options)
    return trace_schedule(request, 8, DEVICE)


def scheduled_gpt(strategy: str, on_cuda: bool = False, **options) -> Schedule:
    device = "cuda" if on_cuda else "cpu"
    request = request_for(strategy, "small text", workers=4, device=device, options=options)
    return trace_schedule(request, 8, DEVICE)


def step_s(schedule: Schedule, link: LinkModel, workers: int = 4) -> float:
    links = Links("gloo", {kind: {"within": link} for kind in KINDS})
    layout = LinkLayout(workers)
    return simulate_step_s(
        schedule, 1.0, lambda call: links.compute_collective_time(call, layout)[0]
    )


@pytest.fixture(scope="module")
def ddp() -> Schedule:
    return scheduled("ddp", bucket_cap_mb=1)


def test_buckets_of_ddp_start_during_backward_in_order(ddp):
    reduced = [s for s in ddp.collectives if s.call.collective_name == "all_reduce"]
    assert len(reduced) >= 2
    assert [s.computed_share_at_start for s in reduced] == sorted(
        s.computed_share_at_start for s in reduced
    )
    assert (
        1 / 4
        < reduced[0].computed_share_at_start
        < reduced[-1].computed_share_at_start
        <= ddp.computed_share_at_backward_end
        < 1
    )
    assert not any(s.blocks_computation for s in reduced)


def test_what_links_cost_is_what_the_replay_adds(ddp):
    assert step_s(ddp, FAST) == pytest.approx(1.0, rel=1e-3)
    links = Links("gloo", {kind: {"within": SLOW} for kind in KINDS})
    all_s = sum(links.compute_collective_time(s.call, LinkLayout(4))[0] for s in ddp.collectives)
    assert max(1.0, all_s) < step_s(ddp, SLOW) < 1.0 + all_s


def test_fsdp_gathers_before_it_computes_and_runs_ahead_on_gpus_alone():
    """So do its scatters: with gloo the host waits for them."""
    on_cpu, on_gpu = (scheduled("fsdp", on_cuda=on_cuda) for on_cuda in (False, True))
    for schedule in (on_cpu, on_gpu):
        gathers = [s for s in schedule.collectives if s.call.collective_name == "all_gather"]
        scatters = [s for s in schedule.collectives if s.call.collective_name == "reduce_scatter"]
        assert gathers
        assert all(s.blocks_computation for s in gathers)
        assert all(s.is_prefetched for s in gathers) == (schedule is on_gpu)
        assert scatters
        assert all(s.blocks_computation for s in scatters) == (schedule is on_cpu)
    middle = LinkModel(1e-5, 1e9)
    assert step_s(on_gpu, middle) < step_s(on_cpu, middle)


@pytest.mark.parametrize(("data", "on_cuda"), [("ddp", False), ("fsdp", True)])
def test_replicas_of_divided_networks_exchange_gradients_beside_backward(data, on_cuda):
    """Activations are waited for. Ranks count through the tensor workers first, so replicas lie apart."""
    schedule = scheduled_gpt("tensor", on_cuda, tensor_parallel_size=2, data_parallel=data)
    activations = [s for s in schedule.collectives if s.call.rank_stride == 1]
    replicas = [s for s in schedule.collectives if s.call.rank_stride == 2]
    assert {s.call.group_size for s in schedule.collectives} == {2}
    assert all(s.blocks_computation and not s.is_prefetched for s in activations)
    gradients = [s for s in replicas if s.call.collective_name != "all_gather"]
    assert not any(s.blocks_computation for s in gradients)
    assert (
        1 / 4
        < gradients[0].computed_share_at_start
        < gradients[-1].computed_share_at_start
        <= schedule.computed_share_at_backward_end
    )
    assert all(s.is_prefetched for s in replicas if s not in gradients)

    def step_s(within_s: float, between_s: float) -> float:
        took_s = {1: within_s, 2: between_s}
        return simulate_step_s(schedule, 1.0, lambda call: took_s[call.rank_stride])

    assert step_s(1e-3, 0) == pytest.approx(1 + len(activations) * 1e-3)
    assert 1 <= step_s(0, 1e-3) < 1 + 0.3 * len(replicas) * 1e-3
    assert (
        1.01 < step_s(0, 1 / len(replicas)) < 1.9
    )  # of the whole second a part is beside computing


def test_layers_divided_among_all_wait_for_activations():
    schedule = scheduled_gpt("tensor", on_cuda=True)
    assert {s.call.group_size for s in schedule.collectives} == {None}
    assert all(s.blocks_computation and not s.is_prefetched for s in schedule.collectives)


def test_every_micro_batch_of_a_pipeline_is_in_its_schedule():
    schedule = scheduled_gpt("pipeline", pipeline_parallel_size=2, microbatches=4)
    sends = [s for s in schedule.collectives if s.call.collective_name == "send"]
    assert len(sends) == 4
    gradients = [s for s in schedule.collectives if s.call.rank_stride == 1]
    assert gradients
    assert any(not s.blocks_computation for s in gradients)


@pytest.mark.parametrize(
    "strategy", sorted(set(REGISTRY) - set(POLICIES) - {"single", "deepspeed", "command"})
)
@pytest.mark.parametrize("model", ["small images", "small text"])
def test_a_strategy_names_every_kind_of_collective_that_its_steps_start(strategy, model):
    options = {"pipeline": {"microbatches": 2}}.get(strategy, {})
    max_grad_norm = None if strategy in ("gossip", "local-sgd", "diloco") else 1.0
    if strategy in ("tensor", "pipeline") and model == "small images":
        pytest.skip("its layers are not divided")
    request = request_for(strategy, model, workers=2, options=options, max_grad_norm=max_grad_norm)
    found = {s.call.collective_name for s in trace_schedule(request, 8, DEVICE).collectives}
    assert found <= set(get_strategy_class(strategy).collectives)
