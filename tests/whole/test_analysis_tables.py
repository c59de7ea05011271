"""Tables: the right numbers, and for every cell without one the reason."""

from __future__ import annotations

import csv

import fixture_records as fixture
import pandas as pd
import pytest

from stratbench.analysis.decision import candidates
from stratbench.analysis.decision.constraints import Constraints
from stratbench.analysis.records import collect
from stratbench.analysis.records.columns import COORDINATES, EPOCH_COLUMNS, read_cells
from stratbench.analysis.records.groups import Repeats
from stratbench.analysis.records.measures import MEASURES, format_number
from stratbench.analysis.report import report
from stratbench.analysis.tables import tables
from stratbench.analysis.tables.summary import build_summary_table, read_summary
from stratbench.cell import record
from stratbench.extensions.audit import audit
from stratbench.extensions.paper.metrics import MEMORY_RATIO, METRICS
from stratbench.extensions.servers import section


def analysed(root, cells, statuses=None, change=None, device="cuda"):
    """cells.csv and the summary of constructed records."""
    study_dir = fixture.write_study(root, cells, statuses, device, change)
    collect.collect_records(cells, study_dir, study_dir / "cells.csv", study_dir / "epochs.csv")
    found = read_cells(study_dir / "cells.csv")
    return found, build_summary_table(found)


def pick(summary, measure, strategy, gpus, column="text"):
    rows = summary[
        (summary["measure"] == measure)
        & (summary["strategy"] == strategy)
        & (summary["gpus"] == gpus)
    ]
    return rows[column].item()


def small(**kwargs):
    return fixture.expand(strategies=("single", "ddp"), models=("vgg16",), **kwargs)


def with_throughputs(samples_per_s, repeat_factor=lambda repeat: 1.0):
    """Give records the throughput of (strategy, gpus), times the repeat's factor."""

    def change(cell, record):
        value = samples_per_s[cell.strategy, cell.gpus] * repeat_factor(cell.repeat)
        record["time"]["throughput_samples_per_s"] = value
        record["time"]["train_time_s"] = 600.0 / value
        return record

    return change


THROUGHPUTS = {("single", 1): 120.0, ("ddp", 1): 100.0, ("ddp", 2): 180.0, ("ddp", 4): 300.0}


def test_speedup_and_efficiency_are_against_the_right_baseline(tmp_path):
    _, summary = analysed(tmp_path, small(), change=with_throughputs(THROUGHPUTS))
    assert pick(summary, "speedup", "ddp", 1) == "1.00"
    assert pick(summary, "speedup", "ddp", 4) == "3.00"
    assert pick(summary, "efficiency", "ddp", 2) == "0.90"
    assert pick(summary, "efficiency", "ddp", 4) == "0.75"
    assert pick(summary, "speedup_vs_single", "ddp", 4) == "2.50"
    assert pick(summary, "speedup_vs_single", "ddp", 1) == "0.83"
    assert pick(summary, "efficiency_vs_single", "ddp", 4, "value") == pytest.approx(0.625)
    assert pick(summary, "training_time", "ddp", 4) == "2.00"


def test_throughput_is_told_in_total_and_per_worker(tmp_path):
    _, summary = analysed(tmp_path, small(), change=with_throughputs(THROUGHPUTS))
    assert pick(summary, "throughput", "ddp", 4) == "300"
    assert pick(summary, "throughput_per_worker", "ddp", 4) == "75.0"
    assert set(summary.loc[summary["measure"] == "throughput_per_worker", "unit"]) == {"images/s"}


@pytest.mark.parametrize(
    ("peak_gib", "unit", "text"), [(1.5, "MiB", "1536"), (24, "GiB", "24.0"), (150, "GiB", "150")]
)
def test_memory_of_gigabytes_is_in_gib_in_all_tables_of_the_experiment(
    tmp_path, peak_gib, unit, text
):
    def change(cell, record):
        record["memory"]["peak_bytes"] = int(peak_gib * 2**30 / cell.gpus)
        return record

    _, summary = analysed(tmp_path, small(), change=change)
    assert pick(summary, "memory", "ddp", 1) == text
    units = summary[summary["measure"].isin(["memory", "model_states"])]["unit"]
    assert set(units) == {unit}


def test_a_ratio_has_an_interval_paired_by_repeat_and_a_value_has_a_range(tmp_path):
    # The repeats differ a hundredfold, alike for every strategy: paired ratios do not vary.
    change = with_throughputs(THROUGHPUTS, lambda repeat: 10.0**repeat)
    _, summary = analysed(tmp_path, small(repeats=3), change=change)
    assert pick(summary, "speedup", "ddp", 4) == "3.00 [3.00, 3.00]"
    assert pick(summary, "throughput", "ddp", 4, "high") == pytest.approx(30000)
    assert pick(summary, "throughput", "ddp", 4, "spread") == "range"
    assert pick(summary, "throughput", "ddp", 4, "value") == pytest.approx(3000)


def test_a_baseline_is_paired_with_the_repeats_that_both_have(tmp_path):
    def change(cell, record):
        if cell.gpus == 1 and cell.strategy == "ddp" and cell.repeat == 2:
            return None
        return with_throughputs(THROUGHPUTS, lambda repeat: 10.0**repeat)(cell, record)

    _, summary = analysed(tmp_path, small(repeats=3), change=change)
    told = pick(summary, "speedup", "ddp", 4)
    assert told == "3.00 [3.00, 3.00] (2 of 3; without a baseline)"
    assert pick(summary, "speedup_vs_single", "ddp", 4) == "2.50 [2.50, 2.50]"


def test_a_time_to_the_target_says_how_many_repeats_never_reached_it(tmp_path):
    def change(cell, record):
        best = {("ddp", 1): (0.9, 0.9, 0.9), ("ddp", 4): (0.5, 0.9, 0.5)}
        peak = best.get((cell.strategy, cell.gpus), (0.5, 0.5, 0.5))[cell.repeat]
        for entry in record["score"]["per_epoch"]:
            entry["score"] = min(entry["score"], peak)
        return record

    cells = small(repeats=3)
    study_dir = fixture.write_study(tmp_path, cells, change=change)
    asked = collect.Expectations(target_scores_by_experiment={"main": 0.8})
    collect.collect_records(
        cells, study_dir, study_dir / "cells.csv", study_dir / "epochs.csv", asked
    )
    found = read_cells(study_dir / "cells.csv")
    summary = build_summary_table(found)
    assert pick(summary, "time_to_target", "ddp", 1).endswith("]")
    assert pick(summary, "time_to_target", "ddp", 4).endswith(" (1 of 3; 2 × target not reached)")
    assert pick(summary, "time_to_target", "ddp", 2) == "n/a (target not reached)"
    assert pick(summary, "training_time", "ddp", 4, "ok") == 3
    # The fastest is not the best if others of its repeats never were there.
    rows = summary[(summary["measure"] == "time_to_target") & (summary["gpus"] != 2)]
    listed = rows[rows["strategy"] == "ddp"].to_dict("records")
    measure = MEASURES["time_to_target"]
    assert report.find_clearly_best_row(listed, measure, 0.03) is None
    whole = [row | {"ok": row["cells"]} for row in listed]
    assert report.find_clearly_best_row(whole, measure, 0.03)["gpus"] == 4
    copied = [row | {"flags": "unusable: same-value-twice"} for row in whole]
    assert report.find_clearly_best_row(copied, measure, 0.03) is None
    doubted = [row | {"flags": "doubtful: repeats-uneven"} for row in whole]
    assert report.find_clearly_best_row(doubted, measure, 0.03)["gpus"] == 4


def test_servers_hold_back_workers_of_which_the_time_is_known(tmp_path):
    def change(cell, record):
        if cell.repeat == 0:
            record |= {"status": "timeout", "reason": "it took too long"}
            record["time"]["train_time_s"] = None
        return record

    cells = fixture.expand(("ps-async",), ("vgg16",), (4,), repeats=3)
    found, _ = analysed(tmp_path, cells, change=change)
    found["server_wait_s"], found["servers"] = [300.0, 40.0, 40.0], [2, 2, 2]
    found["train_time_s"] = [float("nan"), 100.0, 100.0]
    (line,) = section.list_server_report_rows(found)
    assert line["waiting"] == "5.0%"  # 80 s, seen by two servers, of 8 x 100 s


@pytest.mark.parametrize(
    ("status", "printed"),
    [
        ("oom", "OOM"),
        ("timeout", ">3000 s"),
        ("diverged", "div."),
        ("missing", "missing"),
        ("error", "error"),
    ],
)
def test_a_cell_without_a_result_is_printed_as_such_in_every_table(tmp_path, status, printed):
    cells, summary = analysed(tmp_path, small(repeats=2), {("ddp", "vgg16", 1): status})
    for measure in MEASURES:
        assert pick(summary, measure, "ddp", 1) == printed
    assert pick(summary, "speedup", "ddp", 4) == f"n/a (1 worker: {printed})"
    assert pick(summary, "efficiency", "ddp", 2) == f"n/a (1 worker: {printed})"
    assert pd.notna(pick(summary, "speedup_vs_single", "ddp", 4, "value"))
    lines = tables.build_worker_counts_and_table_lines(cells, summary, MEASURES["training_time"])
    table = tables.build_summary_text_table(cells, *lines)
    assert table.loc[table["strategy"] == "ddp", "1 GPU"].item() == printed


def test_a_ratio_to_a_single_that_failed_or_is_not_there_says_so(tmp_path):
    _, summary = analysed(tmp_path / "a", small(), {("single", "vgg16", 1): "oom"})
    assert pick(summary, "speedup_vs_single", "ddp", 4) == "n/a (single: OOM)"
    cells = fixture.expand(strategies=("ddp",), models=("vgg16",), gpus=(2, 4))
    _, summary = analysed(tmp_path / "b", cells)
    assert pick(summary, "speedup_vs_single", "ddp", 4) == "n/a (no single)"
    assert pick(summary, "speedup", "ddp", 4) == "n/a (no 1 worker)"


def test_repeats_that_ended_differently_are_all_told(tmp_path):
    def change(cell, record):
        if cell.strategy == "ddp" and cell.gpus == 4 and cell.repeat == 0:
            return fixture.make_record(cell, "oom")
        return record

    _, summary = analysed(tmp_path, small(repeats=3), change=change)
    assert pick(summary, "score", "ddp", 4).endswith("] (2 of 3; OOM)")
    assert pick(summary, "score", "ddp", 4, "ok") == 2


def test_no_group_of_cells_is_left_out(tmp_path):
    cells = fixture.expand(repeats=1)
    _, summary = analysed(tmp_path, cells, fixture.DEMO_STATUSES)
    groups = {(c.strategy, c.model, c.gpus) for c in cells}
    for _, rows in summary.groupby("measure"):
        assert set(zip(rows["strategy"], rows["model"], rows["gpus"], strict=True)) == groups
        assert rows["text"].str.len().gt(0).all()


@pytest.mark.slow
def test_the_files_hold_the_same_texts_and_the_summary_reads_back(tmp_path):
    cells = fixture.expand(models=("vgg16", "convnext_large"), repeats=2)
    _, summary = analysed(tmp_path, cells, fixture.DEMO_STATUSES)
    study_dir = tmp_path / "constructed"
    cells_csv, audit_csv = str(study_dir / "cells.csv"), str(study_dir / "audit.csv")
    audit.main(["--cells", cells_csv, "--out", audit_csv])
    arguments = ["--cells", cells_csv, "--audit", audit_csv]
    arguments += ["--out-dir", str(study_dir / "tables")]
    assert tables.main([*arguments, "--summary-out", str(study_dir / "summary.csv")]) == 0
    pd.testing.assert_frame_equal(
        read_summary(study_dir / "summary.csv"), summary, check_dtype=False
    )
    folder = study_dir / "tables" / "main"
    told = set(summary.dropna(subset=["value"])["measure"])
    assert {p.stem for p in folder.iterdir()} == told < set(MEASURES)
    with open(folder / "training_time.csv", newline="") as f:
        header, *lines = list(csv.reader(f))
    assert header == ["model", "strategy", "1 GPU", "2 GPUs", "4 GPUs"]
    row = dict(zip(header, lines[0], strict=True))
    assert (row["strategy"], row["2 GPUs"]) == ("single", tables.NO_CELL)
    markdown = (folder / "training_time.md").read_text()
    assert "| " + " | ".join(lines[-1]) + " |" in markdown
    assert "A worker is one GPU" in markdown
    latex = (folder / "training_time.tex").read_text()
    assert r"convnext\_large" in latex
    assert latex.count(r"\\") == len(lines) + 1


def test_every_caption_says_what_a_worker_is(tmp_path):
    gpu, _ = analysed(tmp_path / "gpu", small())
    cpu, summary = analysed(tmp_path / "cpu", small(), device="cpu")
    assert tables.describe_worker_devices(gpu).startswith(
        f"A worker is one GPU ({fixture.GPU_NAME}"
    )
    assert (
        "CPU process; the processes of a cell share 2 cores of"
        in tables.describe_worker_devices(cpu)
    )
    mixed = tables.describe_worker_devices(pd.concat([gpu, cpu]))
    assert "different devices" in mixed
    assert "one GPU" in mixed
    assert "CPU process" in mixed
    lines = tables.build_worker_counts_and_table_lines(cpu, summary, MEASURES["memory"])
    assert "4 CPU processes" in tables.build_summary_text_table(cpu, *lines).columns


def test_a_study_whose_only_cell_timed_out_says_what_it_knows(tmp_path):
    cells = fixture.expand(strategies=("ddp",), models=("vgg16",), gpus=(2,))

    def change(cell, record):
        return fixture.make_record(cell, "timeout", "cpu") | {"workers": []}

    found, summary = analysed(tmp_path, cells, device="cpu", change=change)
    folder = tmp_path / "tables" / "main"
    folder.mkdir(parents=True)
    (folder / "memory.md").write_text("of an earlier run")
    assert tables.write_and_count_tables(found, summary, tmp_path / "tables") == 1
    assert sorted(p.name for p in folder.iterdir()) == [
        f"training_time.{kind}" for kind in ("csv", "md", "tex")
    ]
    text = (folder / "training_time.md").read_text()
    assert "A worker is a CPU process, whose name no record has." in text
    assert "| vgg16 | ddp | >3000 s |" in text


def test_a_cell_whose_workers_died_unseen_does_not_add_a_device(tmp_path):
    def change(cell, record):
        if cell.gpus == 4:
            record = fixture.make_record(cell, "timeout", "cpu") | {"workers": []}
        return record

    cells, _ = analysed(tmp_path, small(), device="cpu", change=change)
    assert cells["device_kind"].tolist() == ["cpu"] * len(cells)
    assert tables.describe_worker_devices(cells).count("CPU process;") == 1
    assert "different devices" not in tables.describe_worker_devices(cells)


@pytest.mark.parametrize(
    ("device", "taken"), [("cuda", "peak_bytes"), ("cpu", "peak_over_base_bytes")]
)
def test_tables_decision_and_claims_go_by_the_same_peak(tmp_path, device, taken):
    cells = fixture.expand(strategies=("ddp", "fsdp"), models=("vgg16",), gpus=(4,))
    found, summary = analysed(tmp_path, cells, device=device)
    ddp, fsdp = (fixture.make_record(cell, "ok", device)["memory"][taken] for cell in cells)
    assert pick(summary, "memory", "ddp", 4, "value") == pytest.approx(ddp / 2**20)
    assert pick(summary, "memory_reduction", "fsdp", 4, "value") == pytest.approx(ddp / fsdp)
    groups = Repeats(found)
    of_ddp = candidates.build_measured_candidate(groups, next(iter(groups.all)), Constraints())
    assert of_ddp.peak_memory_bytes == ddp
    (ratio,) = METRICS[MEMORY_RATIO](groups)
    assert ratio.value == pytest.approx(ddp / fsdp)
    # What the paper's VGG16 on 4 GPUs would have printed otherwise: less than its own model states.
    states = pick(summary, "model_states", "ddp", 4, "value")
    assert (ddp / 2**20 > states) == (device == "cuda")


def test_latex_special_characters_are_escaped():
    assert tables.escape_latex("a_b & 5 % >3 #1 {x}") == r"a\_b \& 5 \% $>$3 \#1 \{x\}"


@pytest.mark.parametrize(
    ("value", "text"), [(1490.43, "1490"), (57.94, "57.9"), (2.345, "2.35"), (0.0123, "0.012")]
)
def test_numbers_keep_three_digits(value, text):
    assert format_number(value, None) == text


def test_all_that_a_record_may_say_of_an_epoch_is_a_column(tmp_path):
    """Answers without a score are said by records of some tasks alone."""
    entry = record.load_schema()["properties"]["score"]["properties"]["per_epoch"]["items"]
    assert set(entry["properties"]) == set(EPOCH_COLUMNS) - set(COORDINATES)

    def change(cell, rec):
        rec["score"]["per_epoch"][0]["answers_left_out"] = 7
        return rec

    cells = small(gpus=(1,))
    analysed(tmp_path, cells, change=change)
    with (tmp_path / cells[0].study / "epochs.csv").open() as file:
        rows = list(csv.DictReader(file))
    assert {row["answers_left_out"] for row in rows if row["epoch"] == "1"} == {"7"}
    assert {row["answers_left_out"] for row in rows if row["epoch"] == "2"} == {""}
