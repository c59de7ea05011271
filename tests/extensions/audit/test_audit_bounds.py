"""The audit on repeats that scatter, and on cells that ran at the same time."""

from __future__ import annotations

import math
import random
from datetime import UTC, datetime, timedelta
from typing import Any

import fixture_records as fixture
import pandas as pd
import planted
import pytest
from planted import faster, started_again

from stratbench.analysis.records.columns import COLUMNS
from stratbench.cell.coordinates import Cell
from stratbench.extensions.audit.audit import RULES
from stratbench.extensions.audit.rule import AuditData

Record = dict[str, Any]
RULE = {rule.id: rule for rule in RULES}


def record_of(strategy: str, gpus: int, repeat: int = 0) -> Record:
    return fixture.make_record(
        Cell("constructed", "main", strategy, "resnet50", "cifar10", gpus, repeat)
    )


def told(rule: str, *records: Record) -> str:
    """All that the rule says of the records."""
    cells = pd.DataFrame([planted.row(record) for record in records], columns=list(COLUMNS))
    found = RULE[rule].check(AuditData(cells, list(records)))
    return "; ".join(f.values_text for f in found)


# ---------------------------------------------------------------- repeats


def test_equal_training_times_are_a_copy():
    one, other = record_of("ddp", 4), record_of("ddp", 4, 1)
    assert told("same-value-twice", one, other) == ""
    other["time"]["train_time_s"] = one["time"]["train_time_s"]
    assert "in ddp resnet50 on 4 and in ddp resnet50 on 4" in told("same-value-twice", one, other)
    for record in (one, other):  # few digits agree by chance
        record["time"]["train_time_s"] = 12.5
    assert told("same-value-twice", one, other) == ""


def repeats_of(noise: float, repeats: int, seed: int) -> list[Record]:
    rng = random.Random(seed)
    records = []
    for repeat in range(repeats):
        record = record_of("ddp", 2, repeat)
        faster(record["time"]["train_time_s"] / 100 / math.exp(rng.gauss(0, noise)))(record)
        records.append(record)
    return records


@pytest.mark.slow
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
