"""What public measurements are planned as: every configuration is one that a config.yaml may say."""

from __future__ import annotations

import csv
from pathlib import Path

import pytest

BENCHMARKS = Path(__file__).parents[2] / "benchmarks" / "prediction"
COLUMNS = [
    "sweep",
    "strategy",
    "dp",
    "tp",
    "pp",
    "cp",
    "micro_batch",
    "accumulate",
    "precision",
    "weights",
]
COLUMNS += ["checkpointing", "compile", "offload", "outcome", "throughput", "step_s"]
#: Strategies as sweeps call them, and what they are planned as.
CALLED = {
    "ddp": "ddp",
    "zero1": "zero1",
    "zero2": "fsdp",
    "fsdp": "fsdp",
    "fsdp+tp": "tensor",
    "megatron": "pipeline",
}


@pytest.fixture
def planner(monkeypatch):
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    import public_plans

    monkeypatch.setattr(public_plans, "prepare_pool_process", lambda: None)
    return public_plans.Planner


def test_every_configuration_of_a_public_measurement_is_a_config(planner):
    from public_plans import read_configurations

    known = read_configurations()
    plans = planner(known["models"])
    for name, c in known["configurations"].items():
        _, _, subject = plans.subject(c)
        assert subject.settings.gpus == c["experiment"]["gpus"], name


def test_every_strategy_of_a_public_sweep_is_a_config(planner, tmp_path):
    from public_sweep_runs import MODELS, SWEEPS, read_runs

    base = dict.fromkeys(COLUMNS, "") | {"micro_batch": 1, "accumulate": 4, "outcome": "ok"}
    base |= {"dp": 2, "step_s": 1.0}
    rows = [
        base
        | {"sweep": "vtrain-h1024-l24", "strategy": strategy}
        | {"tp": 2 if strategy == "fsdp+tp" else 1, "pp": 2 if strategy == "megatron" else 1}
        for strategy in CALLED
    ]
    rows += [base | {"sweep": sweep, "strategy": "ddp"} for sweep in SWEEPS]
    path = tmp_path / "sweeps.csv"
    with path.open("w", encoding="utf-8", newline="") as file:
        writer = csv.DictWriter(file, COLUMNS)
        writer.writeheader()
        writer.writerows(rows)
    runs, plans = read_runs(path), planner(MODELS)
    assert len(runs) >= len(SWEEPS) + len(CALLED) - 1
    for run in runs:
        _, _, subject = plans.subject(run.configuration)
        assert subject.settings.strategy == CALLED[run.row["strategy"]], run.row
        assert subject.request.num_accumulated_parts == 4
