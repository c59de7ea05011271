"""The audit: silent on sound records, and every rule fires on the fault that it is there for."""

from __future__ import annotations

from dataclasses import asdict
from types import SimpleNamespace

import fixture_records as fixture
import pandas as pd
import pytest
from planted import faster

from stratbench.analysis.records import collect
from stratbench.analysis.records.columns import read_cells
from stratbench.analysis.records.findings import AUDIT_COLUMNS, read_audit_findings
from stratbench.analysis.records.measures import MEASURES
from stratbench.analysis.tables import tables
from stratbench.analysis.tables.summary import build_summary_table
from stratbench.cell.coordinates import Cell
from stratbench.extensions.audit import audit
from stratbench.extensions.audit.across_cells.machines import (
    find_tensor_parallel_groups_across_nodes,
)
from stratbench.extensions.audit.traffic import compute_min_traffic_bytes_per_s

MODELS = ("vgg16",)


def findings(root, change=None, device="cuda", cells=None):
    """The audit of a constructed study whose records `change(cell, record)` may spoil."""
    cells = cells or fixture.expand(models=MODELS, repeats=2)
    study_dir = fixture.write_study(root, cells, device=device, change=change)
    collect.collect_records(cells, study_dir, study_dir / "cells.csv", study_dir / "epochs.csv")
    rows = read_cells(study_dir / "cells.csv")
    return audit.audit_cells(rows, audit.read_records(rows, study_dir))


def only(spoil, strategy="ddp", gpus=None):
    """Spoil the records of one strategy (at one worker count)."""

    def change(cell, record):
        if cell.strategy == strategy and gpus in (None, cell.gpus):
            spoil(record)
        return record

    return change


def of_each_worker(*path, value):
    def spoil(record):
        for worker in record["workers"]:
            place = worker["provenance"]
            for key in path[:-1]:
                place = place.setdefault(key, {})
            place[path[-1]] = value

    return spoil


def put(*path, value):
    def spoil(record):
        place = record
        for key in path[:-1]:
            place = place[key]
        place[path[-1]] = value

    return spoil


def smaller_states(record):
    states = record["memory"]["model_states"]
    record["memory"]["model_states"] = {name: n // 3 for name, n in states.items()}


def smaller_peak(record):
    record["memory"]["peak_bytes"] //= 9


def uneven(record):
    if record["cell"]["repeat"] == 1:
        faster(1.3)(record)


def less_accurate(record):
    for entry in record["score"]["per_epoch"]:
        entry["score"] = 0.2
    record["score"] |= {"final": 0.2, "best": 0.2}


def mixed_dtype(record):
    record["strategy"]["details"]["compute_dtype"] = "bfloat16"


PAUSE = {"node": 0, "begin_s": 3.0, "length_s": 45.0, "asleep_s": 0.0, "in_training": True}
#: rule: (the fault, the strategy of the cells that must be found, or None for a comparison)
PLANTED = {
    "sharding-slow-alone": (only(faster(1 / 1.4), "fsdp", 1), "fsdp"),
    "superlinear": (only(faster(3), "ddp", 4), "ddp"),
    "memory-reduced-too-much": (only(smaller_states, "fsdp", 2), "fsdp"),
    "bandwidth-impossible": (only(faster(20_000), "ps-sync", 4), "ps-sync"),
    "score-below-floor": (only(put("score", "final", value=0.2), "ddp", 2), "ddp"),
    "async-alone-unlike-sync": (
        only(put("score", "final", value=0.90), "ps-async", 1),
        "ps-async",
    ),
    "same-value-twice": (only(put("time", "train_time_s", value=123.45), "ddp"), "ddp"),
    "unequal-samples": (only(put("batch", "samples_seen", value=250_000), "ddp", 4), None),
    "loss-in-parts": (only(put("task", "loss_adds_up", value=False)), None),
    "unequal-start": (only(put("model", "initial_weights_sha256", value="0" * 64), "fsdp"), None),
    "mixed-precision": (only(mixed_dtype, "fsdp"), None),
    "mixed-data": (only(put("data", "sha256", value="0" * 64), "fsdp"), None),
    "mixed-devices": (only(of_each_worker("gpu", "name", value="Other GPU")), None),
    "mixed-hosts": (only(of_each_worker("host", "name", value="other-host")), None),
    "mixed-versions": (only(of_each_worker("software", "torch", value="9.9")), None),
    "mixed-drivers": (only(of_each_worker("driver", "driver_version", value="999.0")), None),
    "mixed-revisions": (only(put("provenance", "git", "dirty", value=True)), None),
    "busy-machine": (
        only(put("provenance", "busy_at_start", value={"0": {"other_cpu_cores": 5.0}})),
        "ddp",
    ),
    "foreign-process-on-gpu": (
        only(
            put("provenance", "busy_at_start", value={"0": {"other_gpu_processes": {"0": [4711]}}})
        ),
        "ddp",
    ),
    "paused-while-timed": (only(put("pauses", value=[PAUSE]), "ddp", 4), "ddp"),
    "steps-uneven": (only(put("time", "step_ms", value={"p50": 10.0, "p99": 40.0})), "ddp"),
    "late-start": (only(put("time", "start_skew_ms", value=[90_000.0, 0.4]), "ddp", 4), "ddp"),
    "recompiled": (only(put("time", "recompilations", value=2), "ddp", 4), "ddp"),
    "repeats-uneven": (only(uneven, "ddp", 2), "ddp"),
    "input-bound": (only(put("time", "breakdown_ms", value={"data": 30.0})), "ddp"),
}
#: Rules whose fault is not in single records; each has a test of its own below.
ELSEWHERE = {
    "oom-with-more-workers",
    "synthetic-unlike-real",
    "no-common-cell",
    "throttled",
    "workers-are-processes",
    "processes-share-cores",
    "groups-cross-nodes",
    "memory-held-by-others",  # tests/extensions/audit/test_audit_faults.py
    "fewer-workers-than-asked",  # there, too
    "shared-cores",  # tests/extensions/audit/test_audit_bounds.py
    "full-run-against-steps",  # tests/extensions/verdict/test_verdict_files.py
    "confounded-order",  # tests/extensions/audit/test_confounding.py, and the next four
    "not-in-turns",
    "slow-host",
    "confounded-host",
    "times-follow-time",
    # tests/extensions/audit/test_audit_recorded.py
    "idle-worker",
    "clock-low",
    "loaded-machine",
    "repeats-uneven-memory",
}


def test_sound_records_trip_nothing(tmp_path):
    assert findings(tmp_path) == []


@pytest.mark.parametrize("rule", PLANTED)
def test_a_planted_fault_is_found_where_it_is(tmp_path, monkeypatch, rule):
    change, strategy = PLANTED[rule]
    monkeypatch.setattr(audit, "RULES", [r for r in audit.RULES if r.id == rule])
    found = findings(tmp_path, change)
    assert found
    assert all(f.get("strategy") == strategy for f in found)
    assert all(len(f["figures"]) > 10 for f in found)


@pytest.mark.parametrize(
    ("strategy", "kind", "gpus", "servers", "precision", "expected"),
    [
        # 1e6 parameters, 100 batches in 10 s: one copy a batch is 40 MB/s in fp32.
        ("ddp", "collective", 4, None, "fp32", 2 * 3 / 4 * 40e6),
        ("fsdp", "collective", 4, None, "fp32", 3 * 3 / 4 * 40e6),
        ("fsdp", "collective", 2, None, "bf16", 3 * 1 / 2 * 20e6),
        ("ddp", "collective", 1, None, "fp32", 0),
        ("single", "collective", 1, None, "fp32", 0),
        ("ps-async", "server", 4, 1, "fp32", 2 * 4 * 40e6),
        ("ps-async", "server", 4, 2, "fp32", 4 * 40e6),
        ("ps-async", "server", 4, None, "fp32", 2 * 4 * 40e6),  # the paper's: not said
    ],
)
def test_implied_traffic_is_that_of_the_algorithm(
    strategy, kind, gpus, servers, precision, expected
):
    copies = {"ddp": 2, "fsdp": 3, "single": 0}.get(strategy)
    row = SimpleNamespace(
        ring_copies=copies,
        strategy_kind=kind,
        gpus=gpus,
        servers=servers,
        precision=precision,
        model_parameters=1_000_000,
        trainable_parameters=1_000_000,
        samples_seen=6400,
        global_batch=64,
        train_time_s=10.0,
    )
    assert compute_min_traffic_bytes_per_s(row) == pytest.approx(expected)
    row.train_time_s = None
    assert compute_min_traffic_bytes_per_s(row) is None


def test_a_peak_that_sharding_cannot_reach_is_found_in_the_figure_that_is_printed(tmp_path):
    found = findings(tmp_path, only(smaller_peak, "fsdp", 2))
    reduced = [f["figures"] for f in found if f["rule"] == "memory-reduced-too-much"]
    assert reduced
    assert all(text.startswith("peak memory: ddp") for text in reduced)


def test_a_throttled_gpu_is_found_in_the_timeline(tmp_path):
    cells = fixture.expand(strategies=("single", "ddp"), models=MODELS)
    for cell in cells:
        path = cell.record_path(tmp_path).with_name("timeline.csv")
        path.parent.mkdir(parents=True)
        reasons = "sw_thermal_slowdown" if cell.gpus == 4 else "sw_power_cap"
        samples = [
            {"t_s": t, "kind": "gpu", "throttle": reasons if t > 5 else ""} for t in range(10)
        ]
        path.write_text(fixture.timeline_text([{"t_s": 0, "kind": "host"}, *samples]))
    (found,) = findings(tmp_path, cells=cells)
    assert (found["rule"], found["gpus"]) == ("throttled", 4)
    assert found["figures"] == "throttled in 40% of the samples"


def test_generated_data_must_train_as_fast_as_real_data(tmp_path):
    cells = fixture.expand(strategies=("ddp",), models=MODELS)
    cells += fixture.expand(strategies=("ddp",), models=MODELS, experiment="b", dataset="made")

    def change(cell, record):
        if cell.dataset == "made":
            record["data"]["synthetic"] = True
            faster(1.2)(record)
        return record

    found = findings(tmp_path, change, cells=cells)
    assert {(f["rule"], f["gpus"]) for f in found} == {
        ("synthetic-unlike-real", n) for n in (1, 2, 4)
    }


def test_servers_and_collectives_need_a_cell_in_common(tmp_path):
    cells = fixture.expand(strategies=("ddp",), models=MODELS)
    cells += fixture.expand(strategies=("ps-sync",), models=("resnet50",))
    (found,) = findings(tmp_path / "a", cells=cells)
    assert found["rule"] == "no-common-cell"
    assert found["severity"] == "warning"  # of such a study a bundle is sound
    cells += fixture.expand(strategies=("ps-sync",), models=MODELS)
    assert findings(tmp_path / "b", cells=cells) == []


def test_a_cpu_study_is_known_for_what_it_is(tmp_path):
    found = findings(tmp_path, device="cpu")
    said = {f["rule"]: f["figures"] for f in found}
    assert said == {
        "workers-are-processes": "CPU processes sharing 2 cores of constructed-host",
        "processes-share-cores": "4 processes on 2 cores",
    }


def test_out_of_memory_on_more_gpus_than_it_fits_is_doubted(tmp_path):
    cells = fixture.expand(strategies=("fsdp",), models=MODELS)
    study_dir = fixture.write_study(tmp_path, cells, {("fsdp", "vgg16", 4): "oom"})
    collect.collect_records(cells, study_dir, study_dir / "cells.csv", study_dir / "epochs.csv")
    (found,) = audit.audit_cells(read_cells(study_dir / "cells.csv"))
    assert (found["rule"], found["gpus"]) == ("oom-with-more-workers", 4)
    assert found["figures"] == "out of memory on 4, but not on 2"

    def weak(cell, record):
        record["batch"] |= {"global_batch": 32 * cell.gpus, "per_worker_batch": 32}
        return record

    study_dir = fixture.write_study(tmp_path, cells, {("fsdp", "vgg16", 4): "oom"}, change=weak)
    collect.collect_records(cells, study_dir, study_dir / "cells.csv", study_dir / "epochs.csv")
    assert audit.audit_cells(read_cells(study_dir / "cells.csv")) == []


def test_cells_without_a_result_trip_nothing(tmp_path):
    cells = fixture.expand(models=MODELS)
    statuses = {(c.strategy, c.model, c.gpus): "oom" for c in cells}
    study_dir = fixture.write_study(tmp_path, cells, statuses)
    collect.collect_records(cells, study_dir, study_dir / "cells.csv", study_dir / "epochs.csv")
    assert audit.audit_cells(read_cells(study_dir / "cells.csv")) == []


def test_the_bandwidth_that_a_record_counted_is_judged(tmp_path):
    """More than the parameters need: a strategy that sends too much is found too."""
    cells = fixture.expand(strategies=("single", "ddp", "ps-sync"), models=("vgg16",))
    for column, strategy in (
        ("implied_bytes_per_s", "ddp"),
        ("busiest_server_bytes_per_s", "ps-sync"),
    ):
        change = only(put("communication", column, value=1e12), strategy, 4)
        found = findings(tmp_path / strategy, change, cells=cells)
        tripped = {(f["strategy"], f["gpus"]) for f in found if f["rule"] == "bandwidth-impossible"}
        assert tripped == {(strategy, 4)}


def test_doubted_figures_are_marked_and_others_are_not(tmp_path):
    cells = fixture.expand(strategies=("single", "ddp"), models=MODELS)
    study_dir = fixture.write_study(tmp_path, cells, change=only(less_accurate, "ddp", 2))
    collect.collect_records(cells, study_dir, study_dir / "cells.csv", study_dir / "epochs.csv")
    assert (
        audit.main(["--cells", str(study_dir / "cells.csv"), "--out", str(tmp_path / "a.csv")]) == 0
    )
    rows = read_cells(study_dir / "cells.csv")
    summary = build_summary_table(rows, read_audit_findings(tmp_path / "a.csv"))
    flagged = summary[summary["flags"] != ""]
    assert list(zip(flagged["strategy"], flagged["gpus"], flagged["measure"], strict=True)) == [
        ("ddp", 2, "score")
    ]
    lines = tables.build_worker_counts_and_table_lines(rows, summary, MEASURES["score"])
    table = tables.build_summary_text_table(rows, *lines).set_index("strategy")
    assert table.loc["ddp", "2 GPUs"] == "20.00 †"
    assert "†" not in table.loc["ddp", "4 GPUs"]


@pytest.mark.parametrize("lost", [0, 1])
def test_batches_that_fill_no_epoch_are_not_unequal_samples(tmp_path, lost):
    """128 samples per worker, of 50,000 in 6 epochs; `lost`: whole epochs that one cell did not train."""

    def weak(cell, record):
        batch = record["batch"]
        batch["global_batch"] = 512 * cell.gpus
        batch["samples_seen"] = (6 - lost * (cell.gpus == 4)) * (
            50_000 - 50_000 % batch["global_batch"]
        )
        return record

    cells = fixture.expand(strategies=("ddp",), models=MODELS)
    rules = {f["rule"] for f in findings(tmp_path, weak, cells=cells)}
    assert ("unequal-samples" in rules) == bool(lost)


def test_a_finding_on_a_comparison_marks_all_its_cells_and_one_on_the_study_none(tmp_path):
    cells = fixture.expand(strategies=("single", "ddp"), models=("vgg16", "resnet50"))
    study_dir = fixture.write_study(tmp_path, cells)
    collect.collect_records(cells, study_dir, study_dir / "cells.csv", study_dir / "epochs.csv")
    rows = read_cells(study_dir / "cells.csv")
    blank = dict.fromkeys(AUDIT_COLUMNS)
    found = pd.DataFrame(
        [
            blank | {"rule": "a", "severity": "unusable", "affects": "time", "model": "vgg16"},
            blank | {"rule": "b", "severity": "unusable", "affects": "all"},
            blank | {"rule": "c", "severity": "note", "affects": "all", "model": "vgg16"},
        ]
    )
    summary = build_summary_table(rows, found)
    marked = summary[summary["flags"] != ""]
    assert set(marked["flags"]) == {"unusable: a"}
    assert set(marked["model"]) == {"vgg16"}
    assert {MEASURES[name].audit_kind for name in marked["measure"]} == {"time"}


def test_a_server_waits_for_no_late_worker(tmp_path):
    """Its clock starts when all are ready; what one of them then loses, the others train."""
    assert not findings(tmp_path, only(put("time", "start_skew_ms", value=[90_000.0]), "ps-async"))


@pytest.mark.parametrize(
    ("tensor", "on_a_node", "nodes", "wrong"),
    [
        (2, 3, 2, True),
        (4, 6, 2, True),
        (2, 2, 2, False),
        (4, 2, 2, False),
        (2, 4, 1, False),
        (1, 3, 2, False),
    ],
)
def test_workers_that_divide_layers_are_on_one_node_where_it_holds_them(
    tensor, on_a_node, nodes, wrong
):
    """A group larger than a node cannot be on one."""
    record = {
        "cell": asdict(Cell("s", "e", "tensor", "gpt-char", "text", on_a_node * nodes, 0)),
        "status": "ok",
        "workers": [],
        "strategy": {"mesh": {"replicas": 1, "tensor": tensor, "stages": 1}},
        "provenance": {"nodes": nodes, "workers_per_node": on_a_node},
    }
    found = list(
        find_tensor_parallel_groups_across_nodes.check(
            SimpleNamespace(records=[record], timelines={})
        )
    )
    assert bool(found) == wrong
