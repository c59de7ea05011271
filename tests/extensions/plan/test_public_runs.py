"""Ranges of time that public runs narrow: which cells they hold for, and how well they hold."""

from __future__ import annotations

import sys
from dataclasses import replace
from pathlib import Path

import pytest

from stratbench.cell.settings import Settings
from stratbench.extensions.plan import duration, public_runs

BENCHMARKS = Path(__file__).parents[3] / "benchmarks" / "prediction"
SHARDED = Settings(
    strategy="fsdp",
    options={"mixed_precision": "policy", "offload": "none"},
    model="m",
    dataset="d",
    gpus=8,
    seed=0,
    global_batch=8,
    per_worker_batch=1,
    lr=0.1,
    precision="bf16",
)


def test_every_run_names_its_source_and_licence():
    for run in public_runs.read_public_runs():
        assert all((run["source"], run["licence"], run["planned_s"])), run
        assert run["url"].startswith("https://")
        assert run["gpu"] in public_runs.GPUS


def test_the_range_says_from_how_many_runs_it_is():
    low, high, least_s, source = public_runs.get_public_time_ratios()
    assert 0.5 < low < 1 < high < 2
    assert 0.1 < least_s < 1
    assert source == f"{len(public_runs.read_public_runs())} public runs on A100 and H100"


@pytest.mark.parametrize(
    ("changes", "reads_text", "alike"),
    [
        ({}, True, True),
        ({"activation_checkpointing": True}, True, True),
        ({}, False, False),
        ({"precision": "fp32"}, True, False),
        ({"compile": True}, True, False),
        ({"strategy": "ddp", "options": {}}, True, False),
        ({"options": {"mixed_precision": "autocast", "offload": "none"}}, True, False),
        ({"options": {"mixed_precision": "policy", "offload": "cpu"}}, True, False),
    ],
)
def test_only_cells_like_the_runs_take_their_range(changes, reads_text, alike):
    assert public_runs.is_like_public_runs(replace(SHARDED, **changes), reads_text) == alike


def test_a_step_on_other_gpus_or_a_short_or_a_waiting_one_keeps_its_range():
    step = duration.PlannedStep(2.0, 1.0, 0.0, 0.0, 0.0, 0.7)
    gpu, band = public_runs.GPUS[0], public_runs.get_public_time_ratios()
    span = public_runs.estimate_time_from_public_runs(gpu, SHARDED, True, step, num_steps=10)
    assert [*span] == pytest.approx([20 * band.low, 20 * band.high])
    assert span.source == band.source
    for other, changes in (
        ("A100 PCIe 80 GB", {}),
        (gpu, {"compute_s": 0.1, "link_s": 0.0}),
        (gpu, {"link_s": 1.6}),
    ):
        seen = public_runs.estimate_time_from_public_runs(
            other, SHARDED, True, replace(step, **changes), num_steps=10
        )
        assert seen is None, (other, changes)


def test_runs_of_other_models_hold_nearly_all_steps_in_a_narrow_range():
    held, widths, runs = 0, [], public_runs.read_public_runs()
    for run in runs:
        low, high, *_ = public_runs.compute_time_ratios(
            r for r in runs if r["model"] != run["model"]
        )
        held += low <= float(run["step_s"]) / float(run["planned_s"]) <= high
        widths.append(high / low)
    assert held >= 0.95 * len(widths)
    assert sorted(widths)[len(widths) // 2] <= 1.9


@pytest.mark.slow
def test_the_tables_times_are_those_of_the_plan(monkeypatch):
    """Where this fails since rates have changed, benchmarks/prediction/public_steps.py makes them anew."""
    monkeypatch.setattr(sys, "path", [str(BENCHMARKS), *sys.path])
    from public_plans import Planner
    from public_steps import plan_s
    from public_sweep_runs import equal_blocks

    run = next(r for r in public_runs.read_public_runs() if r["model"] == "MPT-125m")
    planned_s = plan_s(Planner({}, equal_blocks), run)
    assert planned_s == pytest.approx(float(run["planned_s"]), rel=0.01)


def test_a_measured_peak_is_held_to_the_planned_one_of_its_kind(monkeypatch):
    monkeypatch.setattr(sys, "path", [str(BENCHMARKS), *sys.path])
    from public_gpus import GIB, KINDS, Measured

    measured = Measured("name", {}, [], None, None, allocated_bytes=8 * GIB, reserved_bytes=9 * GIB)
    planned = {kind: measured.planned_gib(name) for kind, name in KINDS.items()}
    assert planned == {"allocated": 8, "active": 8, "reserved": 9, "nvidia-smi": 9}
    assert measured.error_percent(KINDS["reserved"], 10) == pytest.approx(-10)
