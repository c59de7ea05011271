"""Divided layers and stages on 4 and 8 GPUs: each rank holds and sends what the plan says."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from design import Planned
from machine import Machine
from test_cells import data_sets, findings  # noqa: F401  (a fixture)

from stratbench.cell.record import Record
from stratbench.cell.settings import Settings
from stratbench.extensions.plan import against_records
from stratbench.extensions.plan.check import check_study
from stratbench.extensions.plan.schedule import make_plan
from stratbench.strategies.mesh import Mesh
from stratbench.study.config.config import load_config

pytestmark = pytest.mark.timeout(900)
#: How far a rank's peak may be from the plan's, as a share of it and in bytes. What is sent lives until it
#: has gone, which the plan takes for at once, and what is received may come late.
PEAK, PEAK_BYTES = 0.03, 1 << 20
ADAMW = {"optimizer": "adamw", "momentum": None}
PAIRS = {"pipeline_parallel_size": 2, "microbatches": 4}
CELLS = {
    "layers over all": Planned("tensor", "bf16", 4, "gpt-compact", {"sequence_parallel": True}, ADAMW),
    "images": Planned("tensor", "fp16", 4, "vit-compact", {"tensor_parallel_size": 2},
    {"max_grad_norm": 1.0}),
    "layers and shards": Planned(
        "tensor", "bf16", 8, "gpt-compact", {"tensor_parallel_size": 2}, {"gradient_accumulation_steps": 2}
    ),
    "layers and replicas": Planned(
        "tensor", "fp32", 8, "gpt-compact", {"tensor_parallel_size": 4, "data_parallel": "ddp"},
        {"max_grad_norm": 1.0}
    ),
    "a stage each": Planned(
        "pipeline", "bf16", 8, "gpt-char", {"schedule": "1f1b", "microbatches": 8}, ADAMW
    ),
    "stages over all": Planned(
        "pipeline", "fp16", 4, "gpt-compact", {"schedule": "gpipe", "microbatches": 4}
    ),
    "1f1b": Planned("pipeline", "fp32", 8, "gpt-compact", PAIRS | {"schedule": "1f1b"},
    {"gradient_accumulation_steps": 2}),
    "interleaved": Planned(
        "pipeline", "bf16", 8, "vit-compact", PAIRS | {"schedule": "interleaved"}, {"max_grad_norm": 1.0}
    ),
    "zero-bubble": Planned("pipeline", "bf16", 8, "gpt-compact", PAIRS | {"schedule": "zero-bubble"}, ADAMW),
    "recomputed": Planned(
        "pipeline", "bf16", 8, "vit-compact", {"pipeline_parallel_size": 4, "microbatches": 4},
        {"activation_checkpointing": True},
    ),
}  # fmt: skip


@pytest.mark.parametrize("cell", CELLS.values(), ids=CELLS)
def test_each_rank_holds_and_sends_what_the_plan_says(
    trained: Callable[..., Record],
    gpus: Callable[..., None],
    machine: Machine,
    data_sets: Callable[[Settings], Path],  # noqa: F811
    tmp_path: Path,
    cell: Planned,
) -> None:
    gpus(count=cell.gpus)
    _, settings = cell.cell_and_settings()
    record = trained(settings, data_dir=data_sets(settings))
    assert record["status"] == "ok", record["reason"]
    assert findings(record) == []
    planned = plan_of(cell, record, tmp_path)
    row = against_records.make_prediction_row(planned, record)
    assert row["states_bytes_predicted"] == row["states_bytes_measured"]
    assert row["sent_bytes_predicted"] == pytest.approx(row["sent_bytes_measured"], rel=1e-9)
    mesh, samples = Mesh(**record["strategy"]["mesh"]), planned.subject.samples_per_step
    assert len(planned.footprint.footprints_of_stages) == mesh.stages
    for worker in record["workers"]:
        of_rank = planned.footprint.footprints_of_stages[mesh.get_coordinate(worker["rank"]).stage]
        peak = of_rank.compute_training_peak(samples, RESIDENT).n_bytes + planned.needs.data_bytes
        held = worker["memory"]["requested_peak_bytes"] - worker["memory"]["cublas_bytes"]
        assert held == pytest.approx(peak, rel=PEAK, abs=PEAK_BYTES), worker["rank"]


#: Threads that the machine's GPUs hold at once.
RESIDENT = 108 * 2048


def plan_of(cell: Planned, record: Record, folder: Path) -> Any:
    """The plan's part of a cell on the GPUs of the machine."""
    config = cell.config() | {
        "results": str(folder / "planned"),
        "cluster": {"gpu": "A100 SXM 80 GB", "gpus_per_node": cell.gpus},
    }
    config, study = load_config(config)
    (planned,) = make_plan(config, check_study(config, study), {}).cells
    assert planned.footprint is not None, planned.reason
    return planned


def test_none_of_these_cells_is_refused() -> None:
    assert {name: reason for name, c in CELLS.items() if (reason := c.refusal())} == {}
