"""What has finished without Snakemake's notice is kept, and known by its settings afterwards."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace

import fixture_records as fixture
import pytest

from stratbench.cell import record
from stratbench.cell.coordinates import Cell
from stratbench.cell.settings import Settings
from stratbench.study import resume, snakemake_internals

CELL = Cell("demo", "digits", "ddp", "resnet-compact", "digits", 2, 0)


class Output(list):
    @property
    def record(self) -> str:
        return self[0]


@pytest.fixture
def snakemake(monkeypatch: pytest.MonkeyPatch):
    """What is used of Snakemake's workflow; `log` tells what was done to it."""
    log: list[object] = []
    monkeypatch.setattr(
        snakemake_internals.os, "execv", lambda program, argv: log.append(argv[1:3])
    )
    return SimpleNamespace(
        dag=SimpleNamespace(
            needrun=lambda job: job.planned,
            reason=lambda job: SimpleNamespace(missing_output=job.missing),
        ),
        persistence=SimpleNamespace(
            unlock=lambda: log.append("unlock"),
            incomplete=lambda job: job.output if job.marked else [],
            has_metadata=lambda job: job.known,
            finished=log.append,
        ),
        async_run=lambda result: result,
        log=log,
    )


def trained(folder: Path, **facts: bool) -> SimpleNamespace:
    """A job of Snakemake's whose cell has a record and a timeline."""
    made = fixture.make_record(CELL)
    output = Output([str(folder / "record.json"), str(folder / "timeline.csv")])
    record.write_record(output[0], made)
    Path(output[1]).touch()
    return SimpleNamespace(
        output=output,
        params=SimpleNamespace(
            cell=json.dumps(CELL.as_dict()), settings=json.dumps(made["settings"])
        ),
        **{"planned": True, "missing": False, "marked": False, "known": True} | facts,
    )


RESTART = ["unlock", ["-m", "snakemake"]]


def test_a_record_written_when_snakemake_was_killed_is_kept(snakemake, tmp_path):
    cell = trained(tmp_path, marked=True)
    resume.report_finished_jobs(snakemake, [cell])
    assert snakemake.log == [cell, *RESTART]


def test_a_cell_that_finished_after_the_plan_was_made_is_planned_anew(snakemake, tmp_path):
    resume.report_finished_jobs(snakemake, [trained(tmp_path, missing=True)])
    assert snakemake.log == RESTART


def test_settings_of_a_cell_that_finished_while_snakemake_was_away_are_noted(snakemake, tmp_path):
    cell = trained(tmp_path, planned=False, known=False)
    resume.report_finished_jobs(snakemake, [cell])
    assert snakemake.log == [cell]


@pytest.mark.parametrize(
    "spoil",
    [
        lambda job: Path(job.output[0]).write_text('{"cut'),
        lambda job: Path(job.output[0]).unlink(),
        lambda job: Path(job.output[1]).unlink(),
        lambda job: setattr(job.params, "settings", json.dumps({"lr": 7})),
        lambda job: setattr(job.params, "cell", json.dumps({"study": "other"})),
        lambda job: setattr(job, "marked", False),  # forced, or its settings have changed
    ],
)
def test_what_is_no_record_of_the_cell_is_trained(snakemake, tmp_path, spoil):
    cell = trained(tmp_path, marked=True)
    spoil(cell)
    resume.report_finished_jobs(snakemake, [cell])
    assert snakemake.log == []


MADE = {"source": "synthetic", "train_samples": 256}


@pytest.mark.parametrize(
    ("stated", "wanted", "again"),
    [
        (MADE, MADE, False),
        (MADE, MADE | {"train_samples": 128}, True),
        (None, MADE, True),  # of an older version, which did not say
        (None, None, False),
    ],
)
@pytest.mark.parametrize("what", ["record", "block"])
def test_what_was_trained_on_other_data_is_made_anew(tmp_path, capsys, what, stated, wanted, again):
    trained = fixture.make_record(CELL)["settings"] | ({"data_spec": stated} if stated else {})
    path = tmp_path / f"{what}.json"
    content = {"settings": trained}
    if what == "block":  # its own settings are of other things
        content = {"settings": {"steps": 60}, "trained": {"ddp": trained, "fsdp": trained}}
    path.write_text(json.dumps(content))
    resume._told.clear()
    workflow = SimpleNamespace(dag=SimpleNamespace(forcefiles=set()))
    asked = Settings(**trained | {"data_spec": wanted})
    for _ in range(2):
        resume.retrain_results_of_changed_data(workflow, path, asked)
    assert workflow.dag.forcefiles == ({str(path)} if again else set())
    assert capsys.readouterr().err.count("such results are made again") == again


@pytest.mark.parametrize("content", [None, "", "{}", "[]", '{"settings": 3}', '{"trained": 3}'])
def test_what_cannot_be_read_is_left_to_who_reads_it(tmp_path, content):
    path = tmp_path / "record.json"
    if content is not None:
        path.write_text(content)
    workflow = SimpleNamespace(dag=SimpleNamespace(forcefiles=set()))
    made = fixture.make_record(CELL)["settings"]
    resume.retrain_results_of_changed_data(workflow, path, Settings(**made | {"data_spec": MADE}))
    assert not workflow.dag.forcefiles
