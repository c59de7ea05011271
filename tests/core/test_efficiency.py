"""Throughput in context, from what workers and the sampler left, with answers worked out by hand."""

from __future__ import annotations

import csv
import json
from dataclasses import replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import pytest

from launching import settings
from stratbench.cell.coordinates import Cell
from stratbench.cell.run_folder import RunFolder
from stratbench.strategies.mesh import Mesh
from stratbench.telemetry.timeline import SAMPLE_COLUMNS
from stratbench.train import assemble, efficiency
from stratbench.train.job import Job
from stratbench.train.running import totals

FLOPS = {"forward_flops_per_sample": 10**9, "training_flops_per_sample": 3 * 10**9}
RUN = {"samples_seen": 1000, "samples_applied": 1000, "train_time_s": 2.0}


def job(folder: Path, workers: int = 2, **changes: Any) -> Job:
    s = settings(gpus=workers, **changes)
    return Job(
        cell=Cell("tests", "tiny", "ddp", s.model, s.dataset, s.gpus, 0), settings=s,
        data_dir=folder, data={"shape": [1, 16, 16], "train_samples": 64}, folder=RunFolder(folder),
        workers_per_node=workers, use_cuda=False, threads=1,
        origin_unix_s=0.0, origin_s=0.0, time_limit_s=None,
    )  # fmt: skip


def worker(rank: int, gpu: str | None = "NVIDIA A100-SXM4-80GB", **more: Any) -> dict[str, Any]:
    provenance: dict[str, Any] = {"host": {"name": "n0"}}
    if gpu:
        provenance["gpu"] = {"name": gpu, "index": rank + 4}
    return {"rank": rank, "steps": 10, "provenance": provenance} | more


# ---------------------------------------------------------------- operations


@pytest.mark.parametrize(("precision", "peak"), [("fp16", 312e12), ("fp32", 19.5e12)])
def test_share_of_the_peak(tmp_path, precision, peak):
    workers = [worker(0, **FLOPS), worker(1)]
    found = efficiency.compute_flops_and_mfu(job(tmp_path, precision=precision), workers, RUN)
    assert found == {
        **FLOPS,
        "achieved_flops_per_s": 3 * 10**9 * 500,
        "peak_flops_per_s": 2 * peak,
        "mfu": pytest.approx(1.5e12 / (2 * peak)),
    }


@pytest.mark.parametrize(
    ("second", "precision"),
    [
        (worker(1, "Unheard-of 9000"), "fp16"),
        (worker(1, None), "fp16"),
        (worker(1), "fp64"),
        (None, "fp16"),
    ],
)
def test_no_share_of_an_unknown_peak(tmp_path, second, precision):
    """An unlisted GPU, a CPU, a precision without a figure, a worker that was lost."""
    workers = [w for w in (worker(0, **FLOPS), second) if w]
    found = efficiency.compute_flops_and_mfu(job(tmp_path, precision=precision), workers, RUN)
    assert set(found) == {*FLOPS, "achieved_flops_per_s"}


def test_operations_of_a_run_that_did_not_finish(tmp_path):
    assert efficiency.compute_flops_and_mfu(job(tmp_path), [], {}) is None
    assert efficiency.compute_flops_and_mfu(job(tmp_path), [worker(0, **FLOPS)], {}) == FLOPS


# ---------------------------------------------------------------- communication and breakdown


def sends(n_bytes: float, method: str = "ring", **times: float) -> dict[str, Any]:
    rates = {"sent_bytes_per_step": n_bytes, "received_bytes_per_step": 2 * n_bytes}
    return {"method": method} | rates | times


def test_a_workers_bytes_are_weighted_by_its_steps():
    workers = [
        worker(0, communication=sends(100, "measured")) | {"steps": 30},
        worker(1, communication=sends(500, "measured")) | {"steps": 10},
    ]
    found = efficiency.build_communication_entry(workers, RUN)
    assert found["sent_bytes_per_step"] == 200
    # Both together receive 400 bytes 40 times in 2 s: half of it on each link.
    assert found["implied_bytes_per_s"] == 400 * 40 / 2 / 2


def test_strategies_that_do_not_say():
    assert efficiency.build_communication_entry([worker(0, communication=None)], RUN) is None
    assert efficiency.build_communication_entry([], {}) is None


def test_exposed_communication_comes_out_of_backward():
    marked = {"data": 1.0, "forward": 2.0, "backward": 5.0, "other": 0.5}
    workers = [
        worker(r, breakdown_ms=marked, communication=sends(1, exposed_ms=2.0 + 2 * r))
        for r in (0, 1)
    ]
    found = efficiency.build_communication_entry(workers, RUN)
    split = efficiency.compute_mean_phase_times_ms(workers, found)
    assert split == {
        "data": 1.0, "forward": 2.0, "backward": 2.0, "exposed_communication": 3.0, "optimizer": 0.5,
    }  # fmt: skip
    assert list(split)[2:4] == ["backward", "exposed_communication"]
    more = efficiency.compute_mean_phase_times_ms(workers, found | {"exposed_ms": 99.0})
    assert (more["backward"], more["exposed_communication"]) == (0.0, 5.0)
    assert efficiency.compute_mean_phase_times_ms(workers, None)["backward"] == 5.0
    assert efficiency.compute_mean_phase_times_ms([], None) is None


def test_the_wait_comes_out_of_the_exchange():
    marked = {"forward": 2.0, "backward": 5.0, "server": 4.0, "other": 0.1}
    workers = [worker(0, breakdown_ms=marked, communication=sends(1, server_wait_ms=3.0))]
    split = efficiency.compute_mean_phase_times_ms(
        workers, efficiency.build_communication_entry(workers, RUN)
    )
    assert split == {"forward": 2.0, "backward": 5.0, "push": 1.0, "server_wait": 3.0, "other": 0.1}


# ---------------------------------------------------------------- energy


def leave_samples(folder: Path, watts: dict[int, float]) -> None:
    """Samples of ten seconds; GPUs by index."""
    with RunFolder(folder).get_timeline_samples_path(0).open("w", newline="") as file:
        writer = csv.DictWriter(file, SAMPLE_COLUMNS, restval="")
        writer.writeheader()
        for t in range(11):
            for index, power in watts.items():
                writer.writerow(
                    {"t_s": t, "node": "n0", "kind": "gpu", "id": index, "energy_j": 5 + t * power}
                )


def leave_phases(folder: Path, rank: int, *spans: tuple[float, float]) -> None:
    lines = [
        {"t_s": t, "rank": rank, "phase": "train", "event": event}
        for span in spans
        for t, event in zip(span, ("start", "end"), strict=True)
    ]
    lines.append({"t_s": 9, "rank": rank, "phase": "eval", "event": "start"})
    RunFolder(folder).get_phase_log_path(rank).write_text(
        "".join(json.dumps(x) + "\n" for x in lines)
    )


def test_energy_of_the_cells_own_gpus_while_they_train(tmp_path):
    leave_samples(tmp_path, {0: 1000.0, 4: 100.0, 5: 200.0})
    leave_phases(tmp_path, 0, (1, 3), (4, 5.5))
    leave_phases(tmp_path, 1, (1, 2))
    one = job(tmp_path)
    intervals = efficiency.read_gpu_training_intervals(one, [worker(0), worker(1)])
    found = efficiency.build_energy_entry(one, RUN, intervals)
    assert found["train_joules"] == pytest.approx(3.5 * 100 + 200)
    assert found["joules_per_sample"] == pytest.approx(0.55)


@pytest.mark.parametrize(
    ("sampled", "end_s", "gpu"),
    [
        ({4: 1.0}, 2, "A100-SXM4-80GB"),
        ({4: 1.0, 5: 1.0}, 12, "A100-SXM4-80GB"),
        ({4: 1.0, 5: 1.0}, 2, None),
    ],
)
def test_no_energy_where_samples_lack(tmp_path, sampled, end_s, gpu):
    """A GPU without counters, training that outlasts the samples, a CPU."""
    leave_samples(tmp_path, sampled)
    leave_phases(tmp_path, 0, (1, end_s))
    leave_phases(tmp_path, 1, (1, 2))
    one = job(tmp_path)
    intervals = efficiency.read_gpu_training_intervals(one, [worker(0), worker(1, gpu)])
    assert efficiency.build_energy_entry(one, RUN, intervals) is None


# ---------------------------------------------------------------- profile


def test_the_trace_is_named_where_it_is(tmp_path):
    folder = RunFolder.from_log_dir(tmp_path)
    folder.create_empty_folder()
    one = replace(job(tmp_path), folder=folder)
    assert assemble.build_profile_entry(one, None) is None
    folder.profile_trace_path.touch()
    found = assemble.build_profile_entry(one, "a note")
    assert found["note"] == "a note"
    assert tmp_path / found["trace"] == folder.profile_trace_path


# ---------------------------------------------------------------- samples that entered the weights


def test_steps_that_overflowed_were_no_training():
    workers = [
        {"rank": r, "train_time_s": 1.0, "steps": 10, "samples": 40, "epoch_times_s": [1.0],
         "per_epoch": [], "strategy": {"updates_applied": 7}}
        for r in range(2)
    ]  # fmt: skip
    run = totals.summarize_collective_run(workers, Mesh(2))
    assert (run["samples_seen"], run["samples_applied"]) == (80, 56)


def test_a_record_says_how_many_repeats_were_planned(tmp_path):
    """Without the config's number, as of a segment, it says nothing."""
    planned = replace(job(tmp_path), planned_repeats=5)
    now = datetime.now(UTC)
    assert assemble.build_provenance_entry(planned, now)["planned_repeats"] == 5
    assert "planned_repeats" not in assemble.build_provenance_entry(job(tmp_path), now)
