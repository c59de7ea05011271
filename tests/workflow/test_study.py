"""A whole study: what is made, and what a second run makes again."""

from __future__ import annotations

import importlib.util
import os
import sys

import pytest
from tiny_study import Workflow, skipping_config

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]

CELLS = [
    ("first", "single", "vgg-compact", "1gpu"),
    ("first", "ddp", "vgg-compact", "1gpu"),
    ("first", "ddp", "vgg-compact", "2gpu"),
    ("second", "single", "vgg-compact", "1gpu"),
]


def test_every_cell_has_a_record_and_the_report_is_there(finished):
    for cell in CELLS:
        assert finished.record(*cell).exists(), cell
        assert finished.record(*cell).with_name("timeline.csv").exists(), cell
    report = finished.folder / "results/tiny/report.html"
    assert "vgg-compact" in report.read_text()
    assert 'href="explore.html"' in report.read_text()
    assert "vgg-compact" in report.with_name("explore.html").read_text()


def test_what_the_plan_calls_infeasible_is_skipped_and_told(finished):
    results = finished.folder / "results/tiny"
    assert "infeasible (needs " in (results / "tables/second/training_time.md").read_text()
    assert "infeasible (needs " in (results / "report.html").read_text()
    assert ",does not fit,,needs " in (results / "decision.csv").read_text()


def test_records_are_exported_or_it_is_said_what_that_needs(finished):
    output = finished.run("export").stdout
    if importlib.util.find_spec("pyarrow"):
        exported = finished.folder / "results/tiny/export/parquet/cells.parquet"
        assert exported.exists(), output
    else:
        assert "pip install -r envs/requirements-export.txt" in output


def test_pytorch_was_imported_once_for_all_cells(finished):
    logs = list((finished.folder / "results/tiny/logs").glob("*/*/*/*/rep0.log"))
    assert len(logs) == len(CELLS)
    for log in logs:
        assert "share a fork server" in log.read_text(), log


def test_stages_but_no_cells_are_benchmarked(finished):
    """A cell's processes live under the fork server, where Snakemake does not look."""
    found = {p.stem for p in (finished.folder / "results/tiny/benchmarks").iterdir()}
    assert {"merge_records", "make_plots", "write_report"} <= found
    assert len(list((finished.folder / "results/data").glob("tiny-images-*.benchmark.tsv"))) == 1
    assert not list((finished.folder / "results/tiny/cells").rglob("*.tsv"))


def test_a_second_run_makes_nothing(finished):
    assert finished.jobs() == {}


def test_a_changed_learning_rate_retrains_its_experiment_only(finished):
    config = skipping_config()
    # vgg16 would not be planned yet.
    config["studies"]["tiny"]["experiments"]["second"] |= {"lr": 0.01, "models": ["vgg-compact"]}
    finished.write_config(config)
    try:
        output = finished.run("-n").stdout
    finally:
        finished.write_config(skipping_config())
    assert output.count("train tiny/") == 1
    assert "train tiny/second: single, vgg-compact, workers: 1, repeat 0; log: results/" in output
    # The reason is what changed, and not the rest of the settings.
    assert "before: 'lr=0.05' now: 'lr=0.01'" in output
    assert "momentum" not in output


def test_a_changed_time_limit_retrains_nothing(finished):
    config = skipping_config()
    config["studies"]["tiny"]["experiments"]["second"]["time_limit_s"] = 500
    finished.write_config(config)
    try:
        assert finished.jobs() == {}
    finally:
        finished.write_config(skipping_config())


def test_a_further_model_leaves_finished_cells_alone(finished):
    config = skipping_config()
    config["studies"]["tiny"]["experiments"]["second"]["models"].append("resnet-compact")
    finished.write_config(config)
    try:
        assert finished.jobs()["train_cell"] == 1
    finally:
        finished.write_config(skipping_config())


def test_partial_merges_what_is_there_and_lists_what_is_missing(finished):
    config = skipping_config()
    del config["studies"]["tiny"]["experiments"]["first"]
    config["studies"]["tiny"]["experiments"]["second"] |= {
        "models": ["vgg-compact"],
        "strategies": ["single", "fsdp"],
    }
    finished.write_config(config)
    try:
        result = finished.run("partial")
    finally:
        finished.write_config(skipping_config())
    assert result.returncode == 0, result.stdout
    cells = (finished.folder / "results/tiny/partial/cells.csv").read_text()
    assert cells.count(",ok,") == 1
    assert cells.count(",missing,") == 1
    assert "second" in result.stdout
    assert "fsdp" in result.stdout


def test_records_travel_as_one_file_and_are_compared(finished):
    bundled = finished.run("bundle", "--config", "bundle={hosts: replaced}")
    assert bundled.returncode == 0, bundled.stdout
    assert "results/tiny/tiny.stratbench.zip (4 records" in bundled.stdout
    sets = "sets={folder: results/tiny, file: results/tiny/tiny.stratbench.zip, paper: paper:v1}"
    result = finished.run("compare", "--config", sets, "compare={fail_above: 0.05}")
    assert result.returncode == 0, result.stdout
    assert "ddp: 1.000 times the training time" in result.stdout
    assert "folder and paper have no cell with the same strategy" in result.stdout
    assert "cannot tell" in result.stdout
    assert (
        finished.folder / "results/compare/folder+file+paper/index.html"
    ).stat().st_size > 10_000
    gone = finished.run("compare", "--config", "sets={a: paper:v1, b: gone.zip}")
    assert gone.returncode != 0
    assert "sets.b = 'gone.zip': there is no such file or folder" in gone.stdout


def test_snakemake_report_carries_the_plots(finished):
    result = finished.run("--report", "report.html")
    assert result.returncode == 0, result.stdout
    text = (finished.folder / "report.html").read_text()
    assert "training_time" in text


CONDA = """#!/bin/sh
# As much of conda as Snakemake asks for; an environment is this Python.
case "$*" in
"info --json") echo '{{"conda_prefix": "{prefix}", "platform": "linux-64"}}' ;;
--version) echo "conda 25.1.0" ;;
clean*) ;;
config*) echo '{{"get": {{"channel_priority": "strict"}}}}' ;;
*)
    while [ "$1" != --prefix ]; do shift; done
    mkdir -p "$2/bin"
    printf '#!/bin/sh\nexec "%s" "$@"\n' "{python}" > "$2/bin/python"
    chmod +x "$2/bin/python"
    ;;
esac
"""


def test_jobs_in_conda_environments_find_the_package(workflow):
    """Snakemake takes PYTHONPATH from them."""
    bin_dir = workflow.folder / "conda/bin"
    bin_dir.mkdir(parents=True)
    conda = bin_dir / "conda"
    conda.write_text(CONDA.format(prefix=bin_dir.parent, python=sys.executable))
    conda.chmod(0o755)
    (bin_dir / "activate").write_text("PATH=$1/bin:$PATH\n")
    workflow.variables["PATH"] = f"{bin_dir}:{os.environ['PATH']}"
    done = workflow.run("results/tiny/cells.json", "--sdm", "conda")
    assert done.returncode == 0, done.stdout
    assert "Activating conda environment" in done.stdout


def test_a_run_trains_a_deleted_record_again_and_no_other(finished, warm):
    """The last test of the study, whose results it leaves changed."""
    finished.share_import(warm)
    record = finished.record(*CELLS[2])
    others = {cell: finished.record(*cell).stat().st_mtime_ns for cell in CELLS if cell != CELLS[2]}
    record.unlink()
    jobs = finished.jobs()
    assert jobs["train_cell"] == 1
    assert jobs["merge_records"] == jobs["make_plots"] == jobs["write_report"] == 1
    targets = ("results/tiny/cells.csv", str(record.relative_to(finished.folder)))
    done = finished.run(*targets)
    assert done.returncode == 0, done.stdout
    assert record.exists()
    for cell, mtime in others.items():
        assert finished.record(*cell).stat().st_mtime_ns == mtime, cell
    assert finished.jobs(*targets) == {}


def test_other_data_of_the_same_name_are_made_anew_and_trained_on(finished, tmp_path):
    """Told by what is there: Snakemake remembers nothing, or another folder has the same results."""
    config = skipping_config()
    config["studies"]["tiny"]["experiments"]["second"]["models"] = [
        "vgg-compact"
    ]  # vgg16 is not planned
    config["results"] = str(finished.folder / "results")
    elsewhere = Workflow(tmp_path, config)
    assert not {"prepare_data", "train_cell"} & elsewhere.jobs().keys()
    config["datasets"]["tiny-images"]["train_samples"] = 96
    elsewhere.write_config(config)
    assert elsewhere.jobs().items() >= {"prepare_data": 1, "train_cell": len(CELLS)}.items()
    assert "train_cell" not in elsewhere.jobs("check")
    # What decides nothing is no reason: a default that is stated.
    config["datasets"]["tiny-images"] |= {"train_samples": 128, "seed": 0}
    elsewhere.write_config(config)
    assert not {"prepare_data", "train_cell"} & elsewhere.jobs().keys()
