"""The verdict from a study's files: what counts, what is left out, and what it writes."""

from __future__ import annotations

import json

import pandas as pd
import pytest
from synthetic_files import Files
from synthetic_paired import World

from stratbench.analysis.records import collect
from stratbench.analysis.records.columns import COLUMNS
from stratbench.cell.coordinates import Cell
from stratbench.extensions.audit import audit
from stratbench.extensions.verdict.full_runs import read_complete_blocks
from stratbench.extensions.verdict.paired.evidence import iter_comparisons

RULE = {rule.id: rule for rule in audit.RULES}["full-run-against-steps"]


@pytest.fixture(scope="module")
def raced(tmp_path_factory) -> Files:
    files = Files(tmp_path_factory.mktemp("race"))
    assert files.to_the_end() < 8
    return files


def verdict(files: Files) -> dict:
    files.command("tell")
    return json.loads((files.root / "verdict" / "verdict.json").read_text())


def test_a_study_is_raced_from_its_files_alone(raced, capsys):
    found = verdict(raced)
    told = capsys.readouterr().out
    assert [b["leader"] for b in found["comparisons"]] == ["ps-dana", "ps-dana"]
    assert {b["claim"] for b in found["comparisons"]} == {"within"}
    assert found["done"]
    assert found["spent_gpu_hours"] < found["matrix_gpu_hours"]
    assert (
        "vgg-compact on 2 GPUs (first): ps-dana is within 3 % of the fastest (95 %, on 3 nodes)."
        in told
    )
    assert "Cost so far" in told
    assert "Done: everything is decided." in told


def test_next_without_a_file_prints_the_round_and_writes_nothing(tmp_path, capsys):
    files = Files(tmp_path)
    files.command("next")
    found = json.loads(capsys.readouterr().out)
    assert (found["round"], found["done"], found["expected_gpu_hours"]) == (1, False, None)
    assert [(b["gpus"], b["block"], b["dataset"]) for b in found["comparisons"]] == [
        (1, 1, "digits"),
        (2, 1, "digits"),
    ]
    assert not files.root.exists()


def test_blocks_of_other_settings_and_broken_ones_do_not_count_and_are_named(tmp_path):
    files = Files(tmp_path)
    first = files.next_round()
    stale, broken = (files.write_block(entry) for entry in first["comparisons"])
    content = json.loads(stale.read_text())
    content["trained"]["ddp"]["lr"] = 0.5
    stale.write_text(json.dumps(content))
    broken.write_text('{"schema_version": 1}')
    assert [b["block"] for b in files.next_round()["comparisons"]] == [1, 1]
    notes = " ".join(verdict(files)["notes"])
    assert "ddp had other settings than those of the config" in notes
    assert "has invalid values" in notes


@pytest.mark.parametrize("lost", ["pass", "mean_step_s", "status"])
def test_a_block_that_lacks_what_is_read_of_it_is_named_with_a_remedy(tmp_path, lost):
    files = Files(tmp_path)
    path = files.write_block(files.next_round()["comparisons"][0])
    content = json.loads(path.read_text())
    del content["segments"][1][lost]
    path.write_text(json.dumps(content))
    (note,) = verdict(files)["notes"]
    assert f"not used: {path} has invalid values: segments[1]" in note
    assert "delete it, and the block is measured again" in note
    assert read_complete_blocks(files.root) == []


def test_blocks_of_cpu_processes_say_so_whatever_the_config_leaves_open(tmp_path):
    files = Files(tmp_path, device="auto")
    files.run({"comparisons": files.next_round()["comparisons"], "full_runs": []})
    found = verdict(files)
    assert found["hours"] == "worker-hours"
    assert {comparison["device"] for comparison in found["comparisons"]} == {"cpu"}


def test_a_full_run_of_other_settings_does_not_count(tmp_path):
    files = Files(tmp_path)
    files.run(files.next_round())
    asked = files.next_round()["full_runs"][0]
    path = files.write_record(Cell(**asked))
    record = json.loads(path.read_text())
    record["settings"]["lr"] = 0.5
    path.write_text(json.dumps(record))
    assert asked in files.next_round()["full_runs"]
    assert any("settings are not the config's" in note for note in verdict(files)["notes"])


def test_segments_never_enter_the_tables_of_training_time(raced, tmp_path):
    """Of the whole study only the full runs become rows with a time."""
    cells = raced.study.cells
    (raced.root / "cells.json").write_text(json.dumps([c.as_dict() for c in cells]))
    for block in raced.root.glob("blocks/*/*/*/block1"):
        segment = block / "segments" / "00-ddp" / "record.json"
        segment.parent.mkdir(parents=True, exist_ok=True)
        segment.write_text(json.dumps(raced.record(cells[0])))
    rows = collect.collect_records(
        cells, raced.root, tmp_path / "cells.csv", tmp_path / "epochs.csv"
    )
    found = pd.read_csv(tmp_path / "cells.csv")
    timed = set(found.dropna(subset=["train_time_s"])["record_path"])
    runs = raced.root.glob("cells/**/rep0/record.json")  # more seeds are no cells of this study
    assert timed == {str(p.relative_to(raced.root)) for p in runs}
    assert len(rows) == len(cells) - len(timed)


def full_run_findings(files: Files) -> list[audit.Finding]:
    records = [json.loads(p.read_text()) for p in files.root.glob("cells/**/record.json")]
    assert records
    cells = pd.DataFrame(columns=list(COLUMNS))
    return list(RULE.check(audit.AuditData(cells, records, study_dir=files.root)))


def test_a_full_run_that_takes_longer_than_its_steps_is_found_and_an_honest_one_is_not(
    raced, tmp_path
):
    assert full_run_findings(raced) == []
    slow = Files(tmp_path, World(**{**vars(raced.world), "sustained": 1.08}))
    slow.to_the_end()
    found = full_run_findings(slow)
    assert found
    assert all("%" in f.values_text and "blocks" in f.values_text for f in found)
    assert {f.coordinates["strategy"] for f in found} >= {"ps-dana"}


def test_a_full_run_of_other_settings_is_not_held_to_the_blocks(raced):
    records = [json.loads(p.read_text()) for p in raced.root.glob("cells/**/record.json")]
    for record in records:
        record["settings"]["global_batch"] = 64
        record["time"]["train_time_s"] *= 2
    cells = pd.DataFrame(columns=list(COLUMNS))
    assert list(RULE.check(audit.AuditData(cells, records, study_dir=raced.root))) == []


def test_cells_that_the_plan_skips_do_not_race(tmp_path):
    study = Files(tmp_path).study
    skipped = {c.path for c in study.cells if (c.strategy, c.gpus) == ("fsdp", 2)}
    whole, part = (list(iter_comparisons(study, paths)) for paths in ((), skipped))
    assert part[0].strategies == whole[0].strategies
    assert set(whole[1].strategies) - set(part[1].strategies) == {"fsdp"}
