"""How a cell with parameter servers is supervised and judged, and what its record says of them."""

from __future__ import annotations

import json
import time
from dataclasses import replace
from pathlib import Path

import pytest
from test_efficiency import RUN, job, sends, worker
from test_launch import LOST, FakeProcess, job_with

from launching import settings
from stratbench.cell.run_folder import RunFolder
from stratbench.extensions.servers.figures import compute_server_cell_totals
from stratbench.extensions.servers.node import ServedProcesses
from stratbench.extensions.servers.runner import ServedRunner
from stratbench.telemetry.timeline import PhaseLog
from stratbench.train.agent import Exits, ProcessExit
from stratbench.train.ending import CellEnding


def joined(folder: Path, rank: int) -> None:
    """Worker `rank` has connected to its servers, and trains."""
    log = PhaseLog(RunFolder(folder).get_phase_log_path(rank), rank, time.monotonic())
    for event in ("start", "end"):
        log.write_phase_event("build", event)
    log.write_phase_event("train", "start")


@pytest.mark.parametrize(("joins", "expected"), [(False, "error"), (True, "timeout")])
def test_an_error_of_a_worker_that_servers_wait_for_wins_over_the_deadline(
    tmp_path, joins, expected
):
    job = replace(job_with(tmp_path, [None, LOST]), settings=settings("ps-async"))
    for rank in (0, 1) if joins else (0,):
        joined(tmp_path, rank)
    exits = Exits([ProcessExit("server0", None), ProcessExit("rank1", 1)], reached_time_limit=True)
    assert ServedRunner().classify(job, exits, None).status == expected


@pytest.mark.parametrize(
    ("said", "reason"),
    [
        ("ValueError: my network broke", "worker 1 was lost: ValueError: my network broke"),
        ("RunEnded: it was given up", "worker 1 was lost"),  # a consequence, no cause
    ],
)
def test_what_a_worker_that_servers_lost_says_itself_is_told(tmp_path, said, reason):
    lost = {"status": "error", "reason": said}
    job = replace(job_with(tmp_path, [None, lost]), settings=settings("ps-sync"))
    statistics = {"error": "worker 1 was lost", "lost": [{"worker": 1, "reason": "closed"}]}
    RunFolder(tmp_path).get_server_statistics_path(0).write_text(json.dumps(statistics))
    exits = Exits([ProcessExit("rank1", 1)], reached_time_limit=False)
    assert ServedRunner().classify(job, exits, None) == CellEnding("error", reason)


def test_the_record_has_what_a_lost_worker_says_itself(tmp_path):
    """An asynchronous cell that went on without one is ok."""
    lost = {"status": "error", "reason": "AcceleratorError: CUDA error: uncorrectable ECC error"}
    job = replace(job_with(tmp_path, [None, lost]), settings=settings("ps-async"))
    assert ServedRunner().build_server_entry(job) is None
    told = [{"worker": 1, "reason": "the connection was closed"}]
    statistics = {"server": 0, "lost": told, "step_ends_s": [1.0]}
    RunFolder(tmp_path).get_server_statistics_path(0).write_text(json.dumps(statistics))
    found = ServedRunner().build_server_entry(job)
    assert found == {"servers": [{"server": 0, "lost": [told[0] | {"own_reason": lost["reason"]}]}]}


@pytest.mark.parametrize(
    ("n_nodes", "ended", "expected"),
    [
        (1, {"rank0": 0}, False),
        (1, {"rank0": 0, "rank1": 0}, True),  # the servers have nobody left
        (2, {"rank0": 0, "rank1": 0}, False),  # workers of another node may be at it still
        (1, {"rank0": -9}, False),  # the servers know
        (2, {"rank0": -9, "rank1": 0}, False),
        (1, {"rank1": -9}, True),  # the servers would wait for it
        (2, {"rank1": 1}, True),
        (1, {"server0": 1}, True),
        (2, {"server0": 0}, False),
    ],
)
def test_what_a_servers_cell_cannot_go_on_without(tmp_path, n_nodes, ended, expected):
    job = replace(job_with(tmp_path, [None, None]), settings=settings("ps-async"))
    job = replace(job, workers_per_node=2 // n_nodes)
    joined(tmp_path, 0)
    if ended.get("rank1") == 0:
        joined(tmp_path, 1)
    workers = [FakeProcess("rank0"), FakeProcess("rank1")]
    assert (
        ServedProcesses(job, workers, [FakeProcess("server0")]).is_success_impossible(ended)
        is expected
    )


def test_what_a_server_dropped_was_no_training():
    """Two servers, three shards: of eight pushes, all, five and seven entered the weights."""
    servers = [
        {"epochs": [{"epoch": 0, "end_s": 4.0}], "tickets_settled": 8, "train_time_s": 4.0,
         "updates": [4, 3], "staleness": [[8], [4, 1]]},
        {"train_time_s": 3.0, "updates": [4], "staleness": [[5, 2]]},
    ]  # fmt: skip
    run = compute_server_cell_totals([{"losses": {}}], servers, 6, per_epoch=[])
    assert (run["samples_seen"], run["samples_applied"]) == (48, 40)


def test_an_epoch_whose_workers_were_all_lost_has_no_train_loss():
    """Of the second, one told what it had; of the first, none."""
    servers = [
        {"epochs": [{"epoch": n, "end_s": 4.0 + n} for n in range(2)], "tickets_settled": 8,
         "train_time_s": 4.0, "updates": [8], "staleness": [[8]]},
    ]  # fmt: skip
    workers = [
        {"per_epoch": [], "losses": losses}
        for losses in ({}, {"1": {"0": [6.0, 4]}}, {"1": {"0": [3.0, 2]}})
    ]
    epochs = [{"epoch": n, "train_loss": None} for n in (1, 2)]
    run = compute_server_cell_totals(workers, servers, 6, per_epoch=epochs)
    assert [entry["train_loss"] for entry in run["per_epoch"]] == [None, 1.5]


def test_the_busiest_server_and_the_links_are_counted(tmp_path):
    moved = {"by_server_bytes": [(3000, 6000), (0, 0)]}
    workers = [
        worker(0, communication=sends(100, "measured") | moved) | {"steps": 30},
        worker(1, communication=sends(500, "measured") | moved) | {"steps": 10},
    ]
    one = job(tmp_path, strategy="ps-async")
    statistics = {"workers": [{"bytes_in": 3000, "bytes_out": 1}] * 2}
    one.folder.get_server_statistics_path(0).write_text(json.dumps(statistics))
    found = ServedRunner().communication(one, workers, RUN)
    assert found["local_bytes_per_step"] == 2 * 9000 / 40  # all on one node
    assert found["busiest_link_bytes_per_batch"] == 0
    assert found["busiest_server_bytes_per_s"] == 6002 / 2
