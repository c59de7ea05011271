"""Cells of every strategy and precision, on 1 to 8 GPUs with every option: trained, recorded, consistent."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pandas as pd
import pytest
from design import COUNTS, INSTALLED, Planned, cells_of, design, precisions, wishes_of
from machine import Machine

from launching import OF_THE_MACHINE
from stratbench.analysis.records.columns import COLUMNS
from stratbench.cell import software_gpu
from stratbench.cell.record import Record
from stratbench.cell.settings import Settings
from stratbench.extensions.audit import memory, traffic, workers
from stratbench.extensions.audit.across_cells import machines
from stratbench.extensions.audit.rule import AuditData, Rule
from stratbench.workload.data.prepare import prepare_data_set

pytestmark = pytest.mark.timeout(900)
#: Kinds of evidence that are not times.
SOUND = (workers, traffic, memory, machines)


@pytest.fixture(scope="session")
def data_sets(tmp_path_factory: pytest.TempPathFactory) -> Callable[[Settings], Path]:
    """A function that prepares the data set of a cell; returns its folder."""
    root = tmp_path_factory.mktemp("data-sets")

    def prepared(s: Settings) -> Path:
        if not (root / s.dataset).exists():
            prepare_data_set(s.dataset, root / s.dataset, spec=s.data_spec)
        return root / s.dataset

    return prepared


@pytest.mark.parametrize("cell", design(), ids=str)
def test_a_cell_is_trained_and_its_record_agrees_with_itself(
    trained: Callable[..., Record],
    gpus: Callable[..., None],
    machine: Machine,
    data_sets: Callable[[Settings], Path],
    tmp_path: Path,
    cell: Planned,
) -> None:
    gpus(count=max(COUNTS))
    _, settings = cell.cell_and_settings()
    record = trained(settings, data_dir=data_sets(settings))
    assert record["status"] == "ok"
    assert record["strategy"]["name"] == cell.strategy
    assert (record["provenance"]["device"], record["settings"]["precision"]) == (
        "cuda",
        cell.precision,
    )
    assert software_gpu.was_trained_on_software_gpu(record)
    used = [worker["provenance"]["gpu"] for worker in record["workers"]]
    assert len({gpu["uuid"] for gpu in used}) == cell.gpus
    assert all(gpu["uuid"] == machine.uuid(gpu["index"]) for gpu in used)
    assert findings(record) == []
    issued = [worker["issue_ms"] for worker in record["workers"]]
    if record["strategy"]["kind"] == "collective":
        assert 0 < min(issued) <= max(issued) < 1e3 * record["time"]["train_time_s"]
    else:  # a server's worker waits for the server
        assert issued == [None] * cell.gpus
    samples = timeline_of(tmp_path)
    for gpu in used:
        rows = samples[(samples["kind"] == "gpu") & (samples["id"] == str(gpu["index"]))]
        assert rows["energy_j"].is_monotonic_increasing
        assert rows["mem_used_bytes"].notna().all()
    # In a sample a quick cell may have none: the worker looks while it holds its own.
    held = [worker["memory"]["nvml_process_used_bytes"] for worker in record["workers"]]
    assert min(held) > 0


def findings(record: Record) -> list[str]:
    """What the audit finds wrong in devices, workers, memory and traffic of a record."""
    evidence = AuditData(pd.DataFrame(columns=list(COLUMNS)), [record])
    return [
        f"{rule.id}: {found.values_text}"
        for module in SOUND
        for rule in vars(module).values()
        if isinstance(rule, Rule) and rule.severity != "note" and rule.id not in OF_THE_MACHINE
        for found in rule.check(evidence)
    ]


def timeline_of(folder: Path) -> pd.DataFrame:
    (path,) = folder.rglob("timeline.csv")
    return pd.read_csv(path, dtype={"id": str})


@pytest.mark.parametrize("strategy", INSTALLED)
def test_the_design_meets_every_precision_count_and_option(strategy: str) -> None:
    cells, left = cells_of(strategy, INSTALLED.index(strategy))
    met = {cell.precision for cell in cells}
    for precision in set(precisions()) - met:  # then the product says why
        reason = replace(cells[0], precision=precision, keys={}).refusal()
        assert "precision" in reason, reason
    for gpus in set(COUNTS) - {cell.gpus for cell in cells}:
        reason = replace(cells[0], gpus=gpus, options={}, keys={}).refusal()
        assert any(word in reason for word in ("worker", "at most", "stages")), reason
    for wish in left:
        assert wish.option is None, f"no cell of {strategy} has {wish}"
    assert len(left) < len(wishes_of(strategy))
