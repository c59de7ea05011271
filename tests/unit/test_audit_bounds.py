"""Bounds of the audit that honest records of every strategy keep, and planted faults do not.

Staleness that busy workers cannot avoid, bytes of half precision, communication in no time, workers that were
to be slowed, repeats that scatter.
"""

from __future__ import annotations

import copy
import math
import random
from datetime import UTC, datetime, timedelta
from typing import Any

import fixture_records as fixture
import pandas as pd
import planted
import pytest
import torch
from planted import both, faster, put, started_again

from stratbench.analysis.audit import RULES, memory, times
from stratbench.analysis.audit.checks import Facts
from stratbench.analysis.audit.rule import Evidence
from stratbench.analysis.records.columns import COLUMNS
from stratbench.cell.coordinates import Cell
from stratbench.ps.policies.policies import POLICIES, make_policy, parse_options
from stratbench.ps.policies.policy import Hyper
from stratbench.ps.tickets import TicketPlan
from virtual_clock import Timing, simulate

Record = dict[str, Any]
RULE = {rule.id: rule for rule in RULES}


def record_of(strategy: str, gpus: int, repeat: int = 0) -> Record:
    return fixture.make_record(
        Cell("constructed", "main", strategy, "resnet50", "cifar10", gpus, repeat)
    )


def told(rule: str, *records: Record) -> str:
    """All that the rule says of the records."""
    cells = pd.DataFrame([planted.row(record) for record in records], columns=list(COLUMNS))
    found = RULE[rule].check(Evidence(cells, list(records)))
    return "; ".join(f.figures for f in found)


# ---------------------------------------------------------------- staleness

#: Workers, what slows them, and the time of their transfers and of the server, where computing takes 1.
MACHINES = {
    "equal": ({}, ()),
    "jittery": ({"compute_spread": 0.5, "transfer_spread": 0.5}, ()),
    "a straggler": ({"compute_spread": 0.05}, (6.0,)),
    "all unequal": ({"compute_spread": 0.05}, tuple(1.5**i for i in range(8))),
    "slow links": ({"push_s": 2.0, "pull_s": 2.0, "compute_spread": 0.05}, ()),
    "a slow server": ({"apply_s": 1.0, "compute_spread": 0.05}, ()),
}
#: Options that make a policy wait as much as it can.
WAITING = {"ps-ssp": {"staleness_bound": 0}, "ps-async-modified": {"staleness_bound": 0}}


@pytest.mark.parametrize("machine", MACHINES)
@pytest.mark.parametrize("name", POLICIES)
def test_every_policy_is_as_stale_as_its_busy_workers_make_it(name, machine):
    """The real policies on a virtual clock."""
    how, slowdown = MACHINES[machine]
    for options in ({}, WAITING[name]) if name in WAITING else ({},):
        for workers in (2, 6):
            optimizer = "sgd" if not parse_options(name, options).refusal("sgd") else "adamw"
            hyper = Hyper(0.01, workers=workers, optimizer=optimizer, betas=(0.9, 0.999), eps=1e-8)
            policy = make_policy(name, torch.zeros(1), hyper, options)
            plan = TicketPlan(2, 60, workers)
            trace = simulate(
                [policy], plan, lambda *_: torch.ones(1), Timing(1.0, slowdown=slowdown, **how)
            )
            (counts,) = trace.staleness
            dropped = sum(trace.dropped)
            ages = [counts[age] for age in range(max(counts) + 1)]
            record = record_of(name, workers)
            parts = policy.options.pushes_per_ticket
            record["server"]["servers"][0] |= {
                "staleness": [ages],
                "updates": [policy.version],
                "dropped": [dropped],
                "workers": [
                    link | {"tickets": made // parts}
                    for link, made in zip(
                        record["server"]["servers"][0]["workers"], trace.pushes, strict=True
                    )
                ],
            }
            found = told("contradictory-server", record)
            assert "mean staleness" not in found, (options, workers, found)


@pytest.mark.parametrize("gpus", [2, 4, 8])
@pytest.mark.parametrize("name", ["ps-async", "ps-dana", "ps-dcasgd", "ps-ormo", "ps-ssp"])
@pytest.mark.parametrize("stale", [0, 9, 0.05, 0.2])
def test_workers_that_never_wait_and_are_hardly_stale_are_found(name, gpus, stale):
    """`stale`: how many pushes, or their share of the least, have missed an update."""
    record = record_of(name, gpus)
    server = record["server"]["servers"][0]
    pushes = sum(server["staleness"][0])
    late = round(stale * (gpus - 1) * pushes) if isinstance(stale, float) else stale
    server["staleness"] = [[max(0, pushes - late), min(pushes, late)]]
    assert "mean staleness" in told("contradictory-server", record)


def test_workers_with_few_batches_and_lost_ones_are_not_judged():
    record = record_of("ps-async", 2)
    server = record["server"]["servers"][0]
    server["staleness"] = [[sum(server["staleness"][0])]]
    assert "mean staleness" in told("contradictory-server", record)
    for change in ({"reassigned": [7]}, {"lost": [{"worker": 1, "step": 3, "reason": "closed"}]}):
        other = copy.deepcopy(record)
        other["server"]["servers"][0] |= change
        assert "mean staleness" not in told("contradictory-server", other)
    server["workers"][1]["tickets"] = 30
    assert "mean staleness" not in told("contradictory-server", record)


# ---------------------------------------------------------------- bytes and times of collectives


def in_16_bits(record: Record, gathers: float) -> Record:
    """The record in bf16 with `gathers` times the bytes of what is gathered."""
    w, size = record["cell"]["gpus"], 4 * record["model"]["parameters"]
    record["settings"]["precision"] = "bf16"
    sent = (w - 1) / w * size * (gathers + 1)
    traffic = record["communication"]
    per_s = traffic["implied_bytes_per_s"] / traffic["sent_bytes_per_step"]
    traffic |= {
        "sent_bytes_per_step": sent,
        "received_bytes_per_step": sent,
        "implied_bytes_per_s": sent * per_s,
    }
    return record


@pytest.mark.parametrize("gpus", [2, 4, 8])
@pytest.mark.parametrize(
    ("strategy", "gathers", "believed"),
    [
        ("fsdp", 2, True),
        ("fsdp", 1, True),  # parameters stay gathered
        ("fsdp", 0.5, False),  # autocast computes in 16 bits, and gathers in 32
        ("fsdp", 0, False),
        ("fsdp-policy", 1, True),  # gathered twice, in 16 bits
        ("fsdp-policy", 0.5, True),
        ("fsdp-policy", 0.25, False),
        ("fsdp-policy", 0, False),
    ],
)
def test_only_what_is_gathered_in_16_bits_sends_less(strategy, gpus, gathers, believed):
    found = told("contradictory-traffic", in_16_bits(record_of(strategy, gpus), gathers))
    assert ("less than 2 copies" in found) == (not believed), found


@pytest.mark.parametrize("gpus", [2, 4, 8])
@pytest.mark.parametrize(("total_ms", "believed"), [(0.0, False), (1e-3, False), (3.0, True)])
def test_an_all_reduce_takes_time(gpus, total_ms, believed):
    record = record_of("ddp", gpus)
    record["communication"] |= {
        "total_ms": total_ms,
        "overlapped_ms": 0.0,
        "exposed_ms": total_ms,
    }
    record["time"]["breakdown_ms"]["exposed_communication"] = total_ms
    found = told("contradictory-traffic", record)
    assert ("fastest link" in found) == (not believed), found


def test_one_worker_and_a_small_network_need_no_time_to_speak_of():
    alone = record_of("ddp", 1)
    assert told("contradictory-traffic", alone) == ""
    small = fixture.make_record(Cell("constructed", "main", "ddp", "mlp", "digits", 2, 0))
    assert told("contradictory-traffic", small) == ""


# ---------------------------------------------------------------- slowed workers

SLOWED = {"workers": [0], "factor": 3}


def slowed(block: dict[str, Any], phase_ms: float | None, slept_ms: float = 4.0):
    """A record with this setting and phase; its slowed worker says that a step took `slept_ms` without."""

    def plant(record: Record) -> None:
        record["settings"]["slowdown"] = block
        phases = record["time"]["breakdown_ms"]
        if phase_ms is not None:
            phases["slowdown"] = phase_ms
        factor = block.get("factor", 1)
        if 0 in block.get("workers", [0]) and phase_ms is not None:
            record["strategy"]["details"]["slowdown"] = {
                "factor": factor,
                "sigma": block.get("sigma", 0.0),
                "mean_factor": max(factor, 1.5 if "sigma" in block else 1),
                "step_without_ms": slept_ms,
            }

    return plant


@pytest.mark.parametrize("strategy", ["ddp", "fsdp", "ps-async", "ps-sync"])
@pytest.mark.parametrize(
    ("plant", "believed"),
    [
        (slowed(SLOWED, 4.1), True),
        (slowed(SLOWED, None), False),
        (slowed(SLOWED, 0.0), False),
        (slowed(SLOWED, 0.5), False),  # a quarter of what the worker says that it slept
        (slowed({"sigma": 0.3}, 2.1), True),
        (slowed({"sigma": 0.3}, None), False),
        (slowed({"workers": [5], "factor": 3}, None), True),  # no worker of this cell
        (slowed({"workers": [0], "factor": 1}, 0.0, 0.0), True),
        (both(slowed(SLOWED, 4.1), put("settings.slowdown", None)), False),
        (both(slowed(SLOWED, 4.1), put("strategy.details.slowdown.factor", 2.0)), False),
        (both(slowed(SLOWED, 4.1), put("strategy.details.slowdown.mean_factor", 1.0)), False),
        (both(slowed(SLOWED, 4.1), put("strategy.details.slowdown.sigma", 0.5)), False),
    ],
)
def test_workers_are_slowed_where_the_settings_say_so_and_only_there(strategy, plant, believed):
    record = record_of(strategy, 2)
    plant(record)
    assert ("slowdown" in told("contradictory-time", record)) == (not believed)


# ---------------------------------------------------------------- repeats


def repeats_of(noise: float, repeats: int, seed: int) -> list[Record]:
    rng = random.Random(seed)
    records = []
    for repeat in range(repeats):
        record = record_of("ddp", 2, repeat)
        faster(record["time"]["train_time_s"] / 100 / math.exp(rng.gauss(0, noise)))(record)
        records.append(record)
    return records


@pytest.mark.parametrize("repeats", [2, 3, 5, 10])
@pytest.mark.parametrize(
    ("noise", "least", "most"), [(0.01, 0, 0), (0.03, 0, 1), (0.25, 12, 20), (0.4, 14, 20)]
)
def test_more_repeats_are_no_more_doubtful(repeats, noise, least, most):
    found = [bool(told("repeats-uneven", *repeats_of(noise, repeats, s))) for s in range(20)]
    if repeats == 2 and noise < 0.4:
        least = 0
    assert least <= sum(found) <= most


def test_ten_repeats_that_scatter_by_8_percent_are_found():
    found = [bool(told("repeats-uneven", *repeats_of(0.08, 10, seed))) for seed in range(20)]
    assert sum(found) >= 18


def test_the_changes_that_the_tests_make_are_the_ones_that_are_found():
    """Sound records of all these strategies trip none of the rules."""
    rules = ("contradictory-server", "contradictory-traffic", "contradictory-time")
    for strategy in ("ddp", "fsdp", "fsdp-policy", "ps-async", "ps-dana", "ps-sync"):
        for gpus in (1, 2, 4, 8):
            for rule in rules:
                assert told(rule, record_of(strategy, gpus)) == "", (strategy, gpus, rule)


# ---------------------------------------------------------------- pipelines


def as_pipeline(record: Record) -> None:
    """The record's workers are the stages of one network, and wait for each other in a tenth of a step."""
    gpus, phases = record["cell"]["gpus"], record["time"]["breakdown_ms"]
    record["strategy"]["mesh"] = {"replicas": 1, "tensor": 1, "stages": gpus}
    phases["bubble"] = sum(phases.values()) / 9
    record["time"]["bubble_share"] = 0.1
    for worker in record["workers"]:
        by = 1000 * worker["rank"]
        own = worker["memory"] = dict(worker["memory"])
        own["peak_bytes"] -= by
    record["memory"]["stages"] = [
        {name: worker["memory"][name] for name in ("peak_bytes", "peak_over_base_bytes")}
        for worker in record["workers"]
    ]


@pytest.mark.parametrize(
    ("spoil", "faults", "says"),
    [
        (put("time.bubble_share", 0.01), times.faults_of_phases, "time.bubble_share is 0.01, but"),
        (put("time.breakdown_ms.bubble", 0.0), times.faults_of_phases, "is 0.1, but"),
        (put("memory.stages.1.peak_bytes", 5), memory.faults_of_peaks, "the peak of stage 1 is 5"),
    ],
)
def test_the_bubble_and_the_peaks_of_stages_are_those_of_the_workers(spoil, faults, says):
    record = record_of("ddp", 4)
    as_pipeline(record)
    assert not [f for f in faults(Facts(record)) if "bubble" in f or "stage" in f]
    spoil(record)
    assert any(says in fault for fault in faults(Facts(record)))


# ---------------------------------------------------------------- copies


def test_percentiles_and_phases_of_another_repeat_are_a_copy():
    one, other = record_of("ddp", 4), record_of("ddp", 4, 1)
    assert told("same-value-twice", one, other) == ""
    own = copy.deepcopy(other)
    percentiles = ("min", "p10", "p50", "p90", "p99", "max")
    own["time"]["step_ms"] |= {name: one["time"]["step_ms"][name] for name in percentiles}
    assert "the percentiles of the steps in" in told("same-value-twice", one, own)
    # A clock of 0.5 us tells few values of short steps apart, and few steps have few percentiles.
    for name in percentiles:
        one["time"]["step_ms"][name] /= 100
        own["time"]["step_ms"][name] /= 100
    assert told("same-value-twice", one, own) == ""
    other["time"]["breakdown_ms"] = one["time"]["breakdown_ms"]
    assert "the phases of a mean step in" in told("same-value-twice", one, other)


# ---------------------------------------------------------------- cells at the same time


def from_to(record: Record, first_s: int, last_s: int) -> Record:
    """The record, with its start and end in s after a moment."""
    ends = (datetime(2000, 1, 1, tzinfo=UTC) + timedelta(seconds=s) for s in (first_s, last_s))
    record["provenance"] |= dict(
        zip(("started", "finished"), (end.isoformat() for end in ends), strict=True)
    )
    return record


def test_every_cell_on_a_gpu_beside_a_long_one_is_found():
    long, short = from_to(record_of("ddp", 2), 0, 900), from_to(record_of("ddp", 2, 1), 10, 20)
    late = from_to(record_of("fsdp", 2), 40, 90)
    said = told("shared-devices", long, short, late)
    assert "10 s together with ddp on 2, repeat 0" in said
    assert "50 s together with ddp on 2, repeat 0" in said
    # Who was away for a time may have left the GPU to others then.
    started_again(long)
    long["restarts"]["between_s"] = 600.0
    assert told("shared-devices", long, short, late) == ""


def test_cells_on_the_cpu_take_turns_if_they_have_more_threads_than_cores():
    def on_cpu(strategy: str, cores: list[int], *span: int) -> Record:
        cell = Cell("constructed", "main", strategy, "resnet50", "cifar10", 2, 0)
        record = from_to(fixture.make_record(cell, device="cpu"), *span)
        for worker in record["workers"]:
            worker["provenance"]["host"]["affinity"] = cores
        return record

    one = on_cpu("ddp", [0, 1, 2], 0, 60)
    said = told("shared-cores", one, on_cpu("fsdp", [0, 1, 2], 30, 90))
    assert said == (
        "4 threads on 3 cores of constructed-host, 30 s together with ddp on 2, repeat 0"
    )
    assert told("shared-cores", one, on_cpu("fsdp", [0, 1, 2], 60, 90)) == ""
    assert told("shared-cores", one, on_cpu("fsdp", [3, 4, 5], 30, 90)) == ""
    assert told("shared-cores", one, on_cpu("fsdp", [0, 1, 2, 3], 30, 90)) == ""
    assert told("shared-cores", record_of("ddp", 2), record_of("fsdp", 2)) == ""


# ---------------------------------------------------------------- repeats that ended otherwise


def test_a_repeat_out_of_memory_does_not_differ_in_what_no_worker_lived_to_tell():
    repeats = [record_of("fsdp", 2, repeat) for repeat in range(3)]
    for record in repeats[:2]:  # a layer that not every step calls, which workers find out
        record["strategy"]["traits"]["equals_ddp"] = False
    stopped = fixture.make_record(Cell(**repeats[2]["cell"]), "oom")
    assert stopped["strategy"]["wrap_groups"] == []
    assert told("repeats-differ", *repeats[:2], stopped) == ""
    assert "strategy.traits.equals_ddp" in told("repeats-differ", *repeats)
    repeats[2]["strategy"] = stopped["strategy"]
    assert "strategy.wrap_groups" in told("repeats-differ", *repeats)
