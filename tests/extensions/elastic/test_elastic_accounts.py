"""What the record of a split synchronous cell says where members told nothing at their end."""

from __future__ import annotations

import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from test_elastic_coordinator import Cell, stop
from test_restarts import job_in

from launching import until
from stratbench.cell.settings import Settings
from stratbench.extensions.elastic import launch
from stratbench.extensions.elastic.accounts import accounts
from stratbench.extensions.elastic.run_files import RunFiles
from stratbench.train.job import Job


@pytest.fixture
def cell(tmp_path: Path) -> Any:
    """A coordinator of epochs of 4 steps."""
    (tmp_path / "cell").mkdir()
    found = Cell(tmp_path / "cell")
    yield found
    found.coordinator.close()


def job_of(tmp_path: Path, *incarnations: dict[str, Any]) -> Job:
    """A job of 2 epochs of 4 steps that had these incarnations."""
    job = job_in(tmp_path, epochs=2)
    s = replace(job.settings, more={"elastic": {"elastic": True}}, epochs=2, global_batch=16)
    job = replace(job, settings=s, data={"train_samples": 64})
    for number, incarnation in enumerate(incarnations):
        RunFiles(job.folder).write_member_history(number, incarnation)
    return job


def test_a_training_goes_on_only_with_its_own_settings_and_data(tmp_path: Path) -> None:
    job = job_of(tmp_path)
    state = job.folder.path / "state"

    def is_kept(s: Settings = job.settings, data: dict[str, Any] = job.data) -> bool:
        job.folder.create_empty_folder()
        job.folder.write_job(job.to_json())
        state.touch()
        launch.prepare_run_folder(job.folder, job.cell, s, data)
        return state.exists()

    assert is_kept()
    assert not is_kept(s=replace(job.settings, epochs=3))
    assert not is_kept(data=job.data | {"sha256": "prepared anew"})


def entries(*losses: float) -> list[dict[str, Any]]:
    return [
        {"epoch": n, "test_loss": x, "score": 0.5, "train_loss": None}
        for n, x in enumerate(losses, 1)
    ]


def test_the_time_of_members_that_were_all_lost_counts(cell: Cell, tmp_path: Path) -> None:
    """Their checkpoint says how far they came; the epochs' losses, that one told of the first."""
    begun_unix_s = time.time()
    first = cell.member(0)
    first.wait_for_message()
    first.send_message("begun", pause_s=None)
    first.send_message("trained", epochs={"0": [8.0, 4, 1, 0.25]})
    first.send_message("epoch", entry=entries(0.5)[0])
    until(lambda: cell.epochs)
    cell.coordinator.history.generations[-1].reported_unix_s -= 60
    first._connection.close()
    until(lambda: cell.coordinator.history.lost_members)
    cell.checkpoint = 6, []
    second = cell.member(1)
    assert second.wait_for_message()["step"] == 6
    second.send_message("begun", pause_s=None)
    stop(second, 8, epochs={"1": [2.0, 2, 1, 0.5]})
    until(lambda: len(cell.coordinator.history.generations) == 3)
    job = job_of(tmp_path, cell.coordinator.export_member_history())
    run = accounts.compute_training_totals(job, entries(0.5, 0.4))
    of_first, of_second = run["epoch_times_s"]
    assert of_first == 0.25
    assert 60.5 <= of_second <= 60.5 + time.time() - begun_unix_s
    assert [e["train_loss"] for e in run["per_epoch"]] == [2.0, None]
    told = accounts.make_elastic_entry(job)
    assert [(g["from_step"], g["to_step"]) for g in told["generations"]][:2] == [(0, 6), (6, 8)]
    assert told["steps_repeated"] == 0


def test_the_time_of_all_that_ended_with_their_launcher_counts(cell: Cell, tmp_path: Path) -> None:
    begun_unix_s = time.time()
    first = cell.member(0)
    first.wait_for_message()
    first.send_message("begun", pause_s=None)
    until(lambda: cell.coordinator.has_training_begun)
    incarnation = cell.coordinator.export_member_history()
    incarnation["written_unix_s"] += 60
    job = job_of(tmp_path, incarnation)
    train_time_s = accounts.compute_training_totals(job, entries(0.5))["train_time_s"]
    assert 60 <= train_time_s <= 60 + time.time() - begun_unix_s


def test_an_epoch_of_which_steps_were_lost_and_others_done_again_has_no_mean_loss(
    cell: Cell, tmp_path: Path
) -> None:
    """As many losses are known as it has steps, but not those of its steps."""
    generation = {
        "number": 0, "members": [0, 1], "from_step": 0, "cause": "start", "began_unix_s": 1.0,
        "formed_unix_s": 0.0, "ended_unix_s": 2.0, "reported_unix_s": 2.0, "to_step": 2, "pause_s": None,
        "from_checkpoint": False, "broken": True, "train_s_by_epoch": {"0": 1.0},
    }  # fmt: skip
    again = generation | {"number": 1, "from_step": 1, "to_step": 8, "from_checkpoint": True}
    whole = {"loss_sum": 8.0, "reported_steps": 4.0, "train_s": 1.0, "pause_s": 0.0}
    incarnation = cell.coordinator.export_member_history()
    incarnation |= {"generations": [generation, again], "totals_by_epoch": {"0": whole, "1": whole}}
    run = accounts.compute_training_totals(job_of(tmp_path, incarnation), entries(0.5, 0.4))
    assert [e["train_loss"] for e in run["per_epoch"]] == [None, 2.0]


@pytest.mark.parametrize(
    ("started", "ended", "expected"),
    [
        (99.0, 105.0, (0.6, 5.0)),  # by SLURM a second before it was asked for
        (99.0, 100.0, (0.6, 0.6)),
        (101.0, 105.0, (1.0, 5.0)),
        (None, 100.0, (None, 0.6)),
    ],
)
def test_dates_in_whole_seconds_set_no_start_before_the_submission(started, ended, expected):
    """Such a record was unusable: its job had started before its cell."""
    entry = {"number": 0, "slot": 0, "id": "7", "submitted_unix_s": 100.6, "reason": ""}
    entry |= {"started_unix_s": started, "ended_unix_s": ended}
    told = accounts.make_worker_job_entry(entry, {}, 100.0)
    found = told["started_s"], told["ended_s"]
    assert found == pytest.approx(expected)
    assert told["allocated_s"] == pytest.approx(found[1] - found[0] if started else 0.0)
