"""A study's records are projected: the table, the figure, the sentences, with and without links."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import fixture_records
import numpy as np
import pandas as pd
import pytest

from stratbench.cell import software_gpu
from stratbench.cell.coordinates import Cell
from stratbench.extensions.links import measure as links
from stratbench.extensions.links.collective_cost import (
    CollectiveTime,
    LinkLayout,
    LinkModel,
    compute_ring_cost,
    compute_tree_cost,
)
from stratbench.extensions.plan.schedule import read_records_by_cell
from stratbench.extensions.projection import __main__ as command
from stratbench.extensions.projection.evidence import gather_projection_inputs
from stratbench.extensions.projection.shown.section import make_section_entries
from stratbench.extensions.projection.study import project_training_durations
from stratbench.study.config import config as configuration
from stratbench.study.config.config import Study

pytestmark = [pytest.mark.timeout(300), pytest.mark.slow]


def config_of(results: Path, **changes: Any) -> dict[str, Any]:
    experiment = {
        "dataset": "images",
        "strategies": ["single", "ddp", "ps-async"],
        "models": ["vgg-compact"],
        "gpus": [1, 2, 4],
        "epochs": 1,
        "global_batch": 128,
        "lr": 0.1,
        "device": "cpu",
    }
    return {
        "study": "small",
        "results": str(results),
        "datasets": {"images": {"source": "synthetic", "train_samples": 512, "test_samples": 32}},
        "cluster": {"gpus_per_node": 8},
        "studies": {"small": {"experiments": {"one": experiment | changes}}},
    }


@pytest.fixture(scope="module")
def footprints(tmp_path_factory: Any) -> Path:
    """What the plan keeps between runs: footprints take seconds."""
    return tmp_path_factory.mktemp("plan-cache")


def write_records(study: Study, results: Path) -> None:
    """Made-up records of all cells, with the study's settings."""
    fixture_records.write_study(results, study.cells, device="cpu")
    for cell in study.cells:
        path = cell.record_path(results)
        settings = json.loads(study.settings(cell).as_json())
        path.write_text(json.dumps(json.loads(path.read_text()) | {"settings": settings}))


@pytest.fixture
def study(tmp_path: Path, footprints: Path) -> dict[str, Any]:
    """The config of a study whose records are made up."""
    (tmp_path / "plan-cache").symlink_to(footprints)
    config = config_of(tmp_path)
    _, read = configuration.load_config(config)
    write_records(read, tmp_path)
    return config


def projected(config: dict[str, Any], capsys: Any) -> tuple[pd.DataFrame, str]:
    assert command.main(["--config", json.dumps(config)]) == 0
    table = pd.read_csv(Path(config["results"]) / "small" / "projection.csv")
    return table[table.kind != "measured"], capsys.readouterr().out


def test_every_strategy_gets_intervals_and_refusals(study, capsys):
    table, told = projected(study, capsys)
    assert set(table.strategy) == {"ddp", "ps-async"}
    ddp = table[table.strategy == "ddp"].set_index("workers")
    assert list(ddp.index) == [8, 16, 32, 64, 128, 256, 512, 1024]
    assert ddp.step_low_s[8] < ddp.step_s[8] < ddp.step_high_s[8]
    assert 0 < ddp.efficiency_low[8] < ddp.efficiency[8] < ddp.efficiency_high[8]
    assert "between nodes" in ddp.reason[16]  # 8 a node, and no step or link was measured between
    assert "more than 8 times" in ddp.reason[64]
    assert ddp.step_s.isna()[16]
    assert "single: not projected: it has records of a single worker count" in told
    assert "ddp: strong scaling, measured on 1, 2, 4 workers" in told
    assert "cannot be split evenly over 256 workers" in ddp.reason[256]  # of a global batch of 128
    assert ddp.train_s[8] == pytest.approx(ddp.step_s[8] * 4, rel=1e-4)  # batches in 512 samples
    assert 0 < ddp.memory_low_bytes[8] <= ddp.memory_bytes[8] <= ddp.memory_high_bytes[8]
    assert ddp.evidence[8].startswith("steps measured on 1, 2 and 4 workers, by ")


def test_measured_links_are_used_where_there_are_some(study, capsys):
    true = {"within": LinkModel(1e-7, 1e12), "between": LinkModel(1e-6, 1e11)}
    times = [
        CollectiveTime("gloo", kind, n, nodes, size, 0, cost.compute_time_s(true))
        for kind, algorithm in (("all_reduce", compute_ring_cost), ("broadcast", compute_tree_cost))
        for n, nodes in ((2, 1), (4, 1), (4, 2), (8, 2))
        for size in (1 << 10, 1 << 16, 1 << 22)
        for cost in [algorithm(kind, size, LinkLayout(n, nodes))]
    ]
    links.write_links(Path(study["results"]) / "small" / "links", times, 1.1)
    table, told = projected(study, capsys)
    ddp = table[table.strategy == "ddp"].set_index("workers")
    assert ddp.reason.isna()[16]  # the link between nodes was measured
    assert set(ddp.rule[[8, 16, 32]]) <= {"replay on measured links", "perfect", "a + b/N",
                                          "same loss per doubling"}  # fmt: skip
    assert "replay on measured links" in told or "the model did worse" in told
    servers = table[table.strategy == "ps-async"].set_index("workers")
    assert "between nodes" in servers.reason[16]  # their links were not
    assert "has no links of servers-" in told


def write_free_links(study: dict[str, Any]) -> None:
    """Links within a node that cost nothing."""
    true = {"within": LinkModel(1e-9, 1e15)}
    times = [
        CollectiveTime(
            "gloo", kind, n, 1, size, 0, algorithm(kind, size, LinkLayout(n)).compute_time_s(true)
        )
        for kind, algorithm in (("all_reduce", compute_ring_cost), ("broadcast", compute_tree_cost))
        for n in (2, 4)
        for size in (1 << 10, 1 << 16, 1 << 22)
    ]
    links.write_links(Path(study["results"]) / "small" / "links", times, 1.0)


def test_a_step_is_no_shorter_than_the_host_takes_to_issue_it(tmp_path, footprints, capsys):
    """1.2 s of computing, divided by the workers, and 200 ms to issue a step: the limit from 8 workers on."""
    (tmp_path / "plan-cache").symlink_to(footprints)
    study = config_of(tmp_path, strategies=["ddp"])
    write_records(configuration.load_config(study)[1], tmp_path)
    write_free_links(study)
    found = {}
    for issue_ms in (None, 200.0):
        for path in Path(study["results"]).glob("small/cells/one/ddp/*/*/*/record.json"):
            record = json.loads(path.read_text())
            step_s = 1.2 / record["cell"]["gpus"]
            record["time"]["throughput_samples_per_s"] = record["batch"]["global_batch"] / step_s
            for worker in record["workers"]:
                worker["issue_ms"] = issue_ms
            path.write_text(json.dumps(record))
        table, told = projected(study, capsys)
        row = table[(table.strategy == "ddp") & (table.workers == 8)].iloc[0]
        assert row.rule == "replay on measured links"
        found[issue_ms] = row
        limited = ", limited by the host, which needs 200 ms to issue a step"
        assert (limited in told) == (limited in row.evidence) == (issue_ms is not None)
    assert found[None].step_s == pytest.approx(0.15, rel=0.02)
    assert pd.isna(found[None].host_s)
    assert found[200.0].step_s == pytest.approx(0.2, rel=0.01)
    assert found[200.0].host_s == 0.2
    (section,) = make_section_entries(Path(study["results"]) / "small" / "projection.csv")
    by = {(r["strategy"], r["workers"]): r["by"] for r in section["rows"]}
    assert by["ddp", 8] == "links, host"
    assert by["ddp", 4] == "measured"


def test_the_wait_for_the_slowest_follows_from_the_workers_own_times(study, capsys):
    """Steps as they are where links cost nothing, and the time of a worker's computing varies by half."""
    write_free_links(study)
    draw = np.random.default_rng(5)

    def step_s(workers: int) -> float:
        return draw.lognormal(0, 0.45, size=(4000, workers)).max(axis=1).mean() / workers

    truth_s, errors = step_s(8), {}
    paths = list(Path(study["results"]).glob("small/cells/one/ddp/*/*/*/record.json"))
    assert len(paths) == 3
    for path in paths:
        record = json.loads(path.read_text())
        seconds = step_s(record["cell"]["gpus"])
        record["time"]["throughput_samples_per_s"] = record["batch"]["global_batch"] / seconds
        path.write_text(json.dumps(record))
    for with_series in (False, True):
        for path in paths if with_series else ():
            record = json.loads(path.read_text())
            for worker in record["workers"]:
                worker["own_ms"] = draw.lognormal(3, 0.45, size=128).tolist()
            path.write_text(json.dumps(record))
        table, _ = projected(study, capsys)
        row = table[(table.strategy == "ddp") & (table.workers == 8)].iloc[0]
        errors[with_series] = math.log(row.step_s / truth_s), row.rule
        if with_series:
            assert row.rule == "replay on measured links"
            assert row.step_low_s < truth_s < row.step_high_s
    assert abs(errors[True][0]) < 0.05 < abs(errors[False][0]), errors


def test_servers_are_projected_by_a_queue_and_not_past_its_knee(study, capsys):
    """At 0.01 of a measured step a push leaves servers room for eight workers, at 0.15 not."""
    _, read = configuration.load_config(study)
    record = fixture_records.make_record(
        next(c for c in read.cells if c.strategy == "ps-async" and c.gpus == 4)
    )
    step_s = record["batch"]["global_batch"] / record["time"]["throughput_samples_per_s"]
    for share, refused in ((0.01, False), (0.15, True)):
        rate = 4 * record["model"]["parameters"] / (share * step_s)
        times = [
            CollectiveTime(f"servers-{wire}", "push_pull", n, 1, size, 0, 1e-9 + n * size / rate)
            for wire in ("shm", "tcp")
            for n in (1, 2, 4)
            for size in (1 << 16, 1 << 20, 1 << 24)
        ]
        links.write_links(Path(study["results"]) / "small" / "links", times, 1.0)
        table, _ = projected(study, capsys)
        row = table[(table.strategy == "ps-async") & (table.workers == 8)].iloc[0]
        if refused:
            assert "the servers are saturated" in row.reason
        else:
            assert pd.isna(row.reason)
            assert row.step_low_s < row.step_s < row.step_high_s


def test_servers_of_several_nodes_are_projected_by_the_counts_alone(study, capsys):
    times = [CollectiveTime("servers-shm", "push_pull", n, 1, 1 << 20, 0, n * 1e-6) for n in (1, 2)]
    links.write_links(Path(study["results"]) / "small" / "links", times, 1.0)
    study["cluster"]["gpus_per_node"] = 2
    for path in Path(study["results"]).glob("small/cells/one/ps-async/*/*/*/record.json"):
        record = json.loads(path.read_text())
        for rank, worker in enumerate(record["workers"]):
            worker["provenance"]["slurm"] = {"SLURMD_NODENAME": f"node{rank // 2}"}
        path.write_text(json.dumps(record))
    _, told = projected(study, capsys)
    assert (
        "ps-async: `links` does not measure push and pull between nodes; only the measured counts"
        in told
    )


def test_a_link_that_is_missing_is_told_and_the_counts_alone_are_used(study, capsys):
    times = [
        CollectiveTime("gloo", "send", 2, 1, size, 0, 1e-3 + size / 1e9) for size in (1024, 1 << 20)
    ]
    links.write_links(Path(study["results"]) / "small" / "links", times, 1.0)
    table, told = projected(study, capsys)
    assert "was not measured within nodes with gloo" in told
    assert table[table.strategy == "ddp"].rule.dropna().ne("replay on measured links").all()


def test_what_is_sharded_is_traced_on_each_count(tmp_path, footprints, capsys):
    """Its request differs with the count: its groups' parts do."""
    (tmp_path / "plan-cache").symlink_to(footprints)
    config = config_of(tmp_path, strategies=["fsdp"])
    _, read = configuration.load_config(config)
    write_records(read, tmp_path)
    for link, fits in ((LinkModel(1e-2, 1e9), False), (LinkModel(1e-7, 1e13), True)):
        times = [
            CollectiveTime("gloo", kind, n, 1, size, 0, cost.compute_time_s({"within": link}))
            for kind in ("all_gather", "reduce_scatter", "all_reduce")
            for n in (2, 4)
            for size in (1 << 10, 1 << 16, 1 << 22)
            for cost in [compute_ring_cost(kind, size, LinkLayout(n))]
        ]
        links.write_links(tmp_path / "small" / "links", times, 1.1)
        table, told = projected(config, capsys)
        assert ("alone would take longer than its measured step on" in told) == (not fits)
    row = table[table.workers == 8].iloc[0]
    assert row.step_low_s < row.step_s < row.step_high_s
    # An eighth of the states, and the same activations as before for half the samples.
    assert 0 < row.memory_bytes < 1e9


def test_processes_that_share_cores_are_not_projected(study, capsys):
    for path in Path(study["results"]).glob("small/cells/*/*/*/*/*/record.json"):
        record = json.loads(path.read_text())
        for worker in record["workers"]:
            worker["provenance"]["host"]["cpu_quota_cores"] = 6.0
        path.write_text(json.dumps(record))
    table, _ = projected(study, capsys)
    assert (
        table[table.workers == 8]
        .reason.str.contains("8 CPU processes per node would share its 6 cores")
        .all()
    )


def test_the_time_to_a_target_is_told_where_updates_stay_the_same(study, capsys):
    block = study["studies"]["small"]["experiments"]["one"]
    rows = {}
    for target in (0.5, 0.999):
        block["target_score"] = target
        table, _ = projected(study, capsys)
        rows[target] = table[table.workers == 8].set_index("strategy")
    reached, missed = rows[0.5], rows[0.999]
    assert 0 < reached.target_low_s["ddp"] < reached.target_s["ddp"] < reached.train_s["ddp"]
    assert "depend on the number of workers" in reached.why_no_target["ps-async"]
    assert missed.target_s.isna().all()
    assert missed.why_no_target["ddp"] == "not all of its trainings reached 0.999"


def test_the_plan_is_told_of_trainings_on_counts_that_exist_nowhere(study):
    block = study["studies"]["small"]["experiments"]["one"]
    block["gpus"] = [1, 2, 4, 8]
    config, read = configuration.load_config(study)
    found = project_training_durations(config, read, read_records_by_cell(read, config["results"]))
    ddp = {c.gpus: p for c, p in found.items() if c.strategy == "ddp"}
    assert set(ddp) == {8}  # 16 and 32 are on nodes between which nothing was measured
    assert ddp[8].global_batch == 128
    assert ddp[8].span.source.startswith("projected, 80 %: steps measured on 1, 2 and 4 workers")
    table = pd.DataFrame(
        command.make_rows_and_projections(config, read, evidence_of_ddp(config, read))[0]
    )
    row = table[table.workers == 8].iloc[0]
    assert (ddp[8].span.low_s, ddp[8].span.high_s) == (row.train_low_s, row.train_high_s)


def test_records_of_other_settings_than_the_configs_are_left_out_by_name(study, capsys):
    config, read = configuration.load_config(study)
    known = read_records_by_cell(read, config["results"])
    assert len(known) > 3
    assert capsys.readouterr().out == ""
    study["studies"]["small"]["experiments"]["one"]["lr"] = 0.375
    config, read = configuration.load_config(study)
    assert read_records_by_cell(read, config["results"]) == {}
    (told,) = capsys.readouterr().out.splitlines()
    assert "was trained with lr 0.1 (config: 0.375)" in told
    assert told.endswith(f" (and {len(known) - 1} more records of other settings)")


def test_records_of_the_software_gpu_are_left_out_of_plans_predictions_and_projections(
    study, capsys
):
    """All three read by `read_records_by_cell`."""
    config, read = configuration.load_config(study)
    known = read_records_by_cell(read, config["results"])
    marked = next(iter(known))
    path = marked.record_path(config["results"])
    record = json.loads(path.read_text())
    record["provenance"]["software_gpu"] = True
    path.write_text(json.dumps(record))
    assert read_records_by_cell(read, config["results"]).keys() == known.keys() - {marked}
    assert capsys.readouterr().out == f"left out: {path} was {software_gpu.WHY}\n"


def evidence_of_ddp(config: dict[str, Any], read: Any) -> Any:
    found = gather_projection_inputs(read_records_by_cell(read, config["results"]))
    return next(e for e in found if e.strategy == "ddp")


def test_counts_up_to_the_one_that_is_asked_for(study, tmp_path):
    out = tmp_path / "asked.csv"
    assert command.main(["--config", json.dumps(study), "--most", "24", "--out", str(out)]) == 0
    table = pd.read_csv(out)
    assert list(table[table.strategy == "ddp"].workers) == [1, 2, 4, 8, 16, 24]
    assert list(table[table.strategy == "single"].workers) == [24]


def test_gpu_hours_and_costs_follow_from_times(study, capsys):
    study["cluster"]["price_per_gpu_hour"] = 2.0
    for path in Path(study["results"]).glob("small/cells/*/*/*/*/*/record.json"):
        record = json.loads(path.read_text())
        for worker in record["workers"]:
            worker["provenance"]["gpu"] = {"name": "A100"}
        path.write_text(json.dumps(record))
    table, _ = projected(study, capsys)
    row = table[(table.strategy == "ddp") & (table.workers == 8)].iloc[0]
    assert row.gpu_hours == pytest.approx(row.train_s * 8 / 3600, rel=1e-4)
    assert row.cost_high == pytest.approx(2 * row.gpu_hours_high, rel=1e-4)
    assert pd.isna(row.target_cost)
    study["decide"] = {"price_per_gpu_hour": 3.0}
    again, _ = projected(study, capsys)
    assert again[(again.strategy == "ddp") & (again.workers == 8)].cost.iloc[0] == pytest.approx(
        1.5 * row.cost, rel=1e-4
    )


def test_a_study_without_records_says_so(tmp_path, capsys):
    assert command.main(["--config", json.dumps(config_of(tmp_path))]) == 1
    assert "train some cells first" in capsys.readouterr().err


def test_weak_and_mixed_scaling_are_told_apart():
    cells = [Cell("s", "e", "ddp", "resnet50", "d", n, 0) for n in (1, 2, 4)]
    records = {c: fixture_records.make_record(c) for c in cells}
    assert gather_projection_inputs(records)[0].scaling == "strong"
    for c, r in records.items():
        r["batch"] |= {"per_worker_batch": 32, "global_batch": 32 * c.gpus}
    assert gather_projection_inputs(records)[0].scaling == "weak"
    records[cells[0]]["batch"]["per_worker_batch"] = 16
    assert "neither" in gather_projection_inputs(records)[0].cannot_project_reason


def test_repeats_tell_how_far_they_lie_apart_and_slurm_the_nodes():
    cells = [Cell("s", "e", "ddp", "resnet50", "d", n, r) for n in (1, 2) for r in (0, 1)]
    records = {c: fixture_records.make_record(c) for c in cells}
    for c, r in records.items():
        r["time"]["throughput_samples_per_s"] = 100.0 * c.gpus * math.exp(0.1 * c.repeat)
        for rank, worker in enumerate(r["workers"]):
            worker["provenance"]["slurm"] = {"SLURMD_NODENAME": f"node{rank}"}
    [evidence] = gather_projection_inputs(records)
    assert [p.nodes for p in evidence.measured_steps] == [1, 2]
    # Two pairs that are 0.1 apart have a variance of 0.005 with 2 degrees of freedom; t at 0.9 is 1.8856.
    assert evidence.repeat_interval_half_width_ln == pytest.approx(
        1.8856 * math.sqrt(0.005), rel=1e-4
    )
    [evidence] = gather_projection_inputs({c: r for c, r in records.items() if c.repeat == 0})
    assert evidence.repeat_interval_half_width_ln == 0
