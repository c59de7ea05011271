"""A cluster's accounting: what it says of waits and load, and what it must not be taken for."""

from __future__ import annotations

import math
import re
from dataclasses import replace
from pathlib import Path

import pytest

from stratbench.extensions.queue import background
from stratbench.extensions.queue.answer import simulate_queue_and_answer
from stratbench.extensions.queue.break_even import (
    GANG,
    QueueBlock,
    QueuedTraining,
    TrainingQueue,
    make_recorded_queue,
    simulate_modes,
)
from stratbench.extensions.queue.history import FIELDS, HistoryError, parse_gpu_count, read_history
from stratbench.extensions.queue.request import QueueRequest
from stratbench.extensions.queue.simulator import Arrival, Cluster, Rules, SimulatedJob

HEADER = "|".join(FIELDS)
DAY = "2026-03-0{}T{}"


def line(**said):
    """A finished job of 2 GPUs in half of what it asked for, with what is `said` otherwise."""
    values = {
        "JobIDRaw": "7",
        "User": "ann",
        "Partition": "gpu",
        "Submit": "2026-03-01T10:00:00",
        "Eligible": "2026-03-01T10:00:00",
        "Start": "2026-03-01T10:30:00",
        "End": "2026-03-01T11:30:00",
        "State": "COMPLETED",
        "TimelimitRaw": "120",
        "NNodes": "1",
        "ReqTRES": "billing=8,cpu=8,gres/gpu=2,mem=64G,node=1",
        "AllocTRES": "billing=8,cpu=8,gres/gpu:a100=2,gres/gpu=2,mem=64G,node=1",
        "Flags": "SchedMain",
    } | said
    return "|".join(values.values())


def history(tmp_path, lines, header=True, **how):
    path = tmp_path / "history.txt"
    path.write_text("\n".join([*([HEADER] if header else []), *lines]) + "\n")
    return read_history(path, **({"gpus_per_node": 4} | how))


#: A second job, so that there is a window.
LATER = line(
    User="bob", Submit="2026-03-01T11:00:00", Start="2026-03-01T11:00:00", End="2026-03-01T13:30:00"
)


@pytest.mark.parametrize(
    ("tres", "gpus"),
    [
        ("cpu=4,gres/gpu=2,gres/gpu:a100=2,node=1", 2),
        ("gres/gpu:a100=2,gres/gpu:v100=1", 3),
        ("billing=4,cpu=4,gres/gpu=16,mem=1T,node=4", 16),
        ("billing=4,cpu=4,node=1", 0),
        ("", 0),
    ],
)
def test_typed_gpus_are_not_counted_twice(tres, gpus):
    assert parse_gpu_count(tres) == gpus


def test_a_dependency_or_a_begin_time_is_no_wait(tmp_path):
    held = line(Submit="2026-03-01T08:00:00", Eligible="2026-03-01T10:20:00")
    assert history(tmp_path, [held, LATER]).entries[0].wait_s == 600


def test_each_run_of_a_requeued_job_is_a_wait_of_its_own(tmp_path):
    first = line(State="PREEMPTED", End="2026-03-01T10:40:00")
    again = line(
        Submit="2026-03-01T10:40:00", Eligible="2026-03-01T10:42:01", Start="2026-03-01T10:50:00"
    )
    found = history(tmp_path, [first, again, LATER])
    assert [e.wait_s for e in found.entries] == [1800, 479, 0]
    assert next(found.iter_waits_by_width()).num_jobs == 3


def test_limits_that_are_no_numbers_and_jobs_that_never_ran_are_left_out_where_they_say_nothing(
    tmp_path,
):
    gone = {"Start": "None", "End": "2026-03-01T10:30:00", "AllocTRES": ""}
    lines = [
        line(TimelimitRaw="Partition_Limit"),
        line(TimelimitRaw="UNLIMITED", State="TIMEOUT"),
        line(State="CANCELLED by 1000", **gone),
        # An older SLURM states the end as the start.
        line(State="CANCELLED by 1000", **gone | {"Start": "2026-03-01T10:30:00"}),
        line(State="PENDING", Start="Unknown", End="Unknown", AllocTRES=""),
        LATER,
    ]
    found = history(tmp_path, lines)
    [row] = found.iter_waits_by_width()
    assert (row.num_jobs, row.used_wall_time_share) == (6, 1.0)
    assert row.mean_wait_s == pytest.approx(1200)
    assert row.gpus_label == "2-3"
    assert row.backfilled_share == 0
    assert found.requested_to_used_time_ratios == [0.8]
    asked = [a.requested_wall_time_s for a in found.make_arrivals()]
    assert asked == [3600, 3600, 9000]  # unknown: as the others, and never less than they took


def test_without_gpus_in_the_accounting_a_node_counts_as_its_gpus(tmp_path):
    plain = {
        "ReqTRES": "billing=8,cpu=8,node=2",
        "AllocTRES": "billing=8,cpu=8,node=2",
        "NNodes": "2",
    }
    found = history(
        tmp_path, [line(**plain), line(**plain, End="2026-03-01T12:00:00")], header=False
    )
    assert found.are_gpus_counted_by_node
    assert [e.gpus for e in found.entries] == [8, 8]
    # Where others have GPUs, a job without is none of this queue.
    mixed = history(tmp_path, [line(**plain), line(), LATER])
    assert not mixed.are_gpus_counted_by_node
    assert len(mixed.entries) == 2


def test_load_is_that_of_the_window_in_which_all_jobs_are_listed(tmp_path):
    """sacct lists a long job that began before its window; before the first end others are missing."""
    lines = [
        line(Submit="2026-02-20T00:00:00", Start="2026-02-20T00:00:00", End="2026-03-01T12:00:00"),
        line(End="2026-03-01T11:00:00"),
        line(
            Submit="2026-03-01T11:00:00",
            Start="2026-03-01T12:00:00",
            End="Unknown",
            State="RUNNING",
        ),
        line(
            Submit="2026-03-01T13:00:00",
            Start="Unknown",
            End="Unknown",
            State="PENDING",
            AllocTRES="",
        ),
    ]
    found = history(tmp_path, lines)
    assert found.window_days == pytest.approx(2 / 24)
    assert found.mean_gpus_in_use == pytest.approx(
        2.0
    )  # 11 to 12 the long one, 12 to 13 the one that runs
    assert found.max_gpus_in_use == 2
    assert len(found.make_arrivals()) == 3
    assert found.make_arrivals()[0].submit_s == 0


def test_failures_of_nodes_give_their_mean_time_between_two(tmp_path):
    found = history(tmp_path, [line(State="NODE_FAIL"), line(), LATER])
    assert found.compute_node_mtbf_days(3) == pytest.approx(3 * 2 / 24)
    assert history(tmp_path, [line(), LATER]).compute_node_mtbf_days(3) is None


def test_one_users_jobs_are_known_as_such(tmp_path):
    assert not history(tmp_path, [line(), LATER]).has_one_user
    assert history(tmp_path, [line(), line(End="2026-03-01T12:00:00")]).has_one_user


def test_a_partition_is_read_alone_and_a_wrong_name_names_those_there(tmp_path):
    lines = [line(), line(Partition="cpu,debug"), LATER]
    assert len(history(tmp_path, lines, partition="debug").entries) == 1
    with pytest.raises(
        HistoryError, match=r"'big': no job in .* has this partition; give one of cpu,debug, gpu"
    ):
        history(tmp_path, lines, partition="big")


def test_other_columns_are_read_by_their_names(tmp_path):
    path = tmp_path / "history.txt"
    names = "State|AllocTRES|Submit|Start|End|Planned"
    rows = (
        "COMPLETED|gres/gpu=4|1000|1060|2000|00:01:00\nCOMPLETED|gres/gpu=4|1000|2000|3000|00:16:40"
    )
    path.write_text(f"{names}\n{rows}\n")
    found = read_history(path, 4)
    assert [e.wait_s for e in found.entries] == [60, 1000]
    assert next(found.iter_waits_by_width()).used_wall_time_share is None
    assert math.isclose(found.mean_gpus_in_use, 4)


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        (
            "1|2|3",
            "history.txt, line 1: has 3 values instead of 13; write the file by sacct -a -X -P -D -o Job",
        ),
        ("Submit|Start|State\n", "has no column End; write the file by"),
        (f"{HEADER}\n{line(Start='yesterday')}", "line 2: Start = 'yesterday' is not a time"),
        (f"{HEADER}\n{line(Submit='Unknown')}", "line 2: has no time in the column Submit"),
        (HEADER, "has no job with a GPU that started"),
        ("", "has no job with a GPU that started"),
    ],
)
def test_what_is_no_accounting_is_refused_with_what_to_do(tmp_path, text, reason):
    path = tmp_path / "history.txt"
    path.write_text(text)
    with pytest.raises(HistoryError) as error:
        read_history(path, 4)
    assert reason in str(error.value)


def recorded(
    folder: Path,
    monkeypatch: pytest.MonkeyPatch,
    arrivals: list[Arrival],
    last_days: float = math.inf,
) -> Path:
    """What sacct says of a simulated queue on 8 nodes of 8 GPUs, of who had not ended `last_days` ago."""
    started: list[SimulatedJob] = []
    start = Cluster._start_job
    monkeypatch.setattr(
        Cluster, "_start_job", lambda self, job, at: (started.append(job), start(self, job, at))
    )
    sim = Cluster(8, 8, arrivals, Rules(num_reservations=1))
    sim.simulate_until(arrivals[-1].submit_s)
    monkeypatch.setattr(Cluster, "_start_job", start)
    now_s = sim.now_s
    lines = ["JobIDRaw|User|Submit|Start|End|State|TimelimitRaw|NNodes|ReqTRES|AllocTRES"]
    for job in [*started, *sim.queue]:
        has_begun = not math.isnan(job.start_s)
        ended = has_begun and job.end_s <= now_s
        if ended and job.end_s < now_s - last_days * 86400:
            continue
        tres = f"gres/gpu={job.gpus}"
        times = [f"{int(t)}" for t in (job.submit_s, *([job.start_s] if has_begun else []))]
        times += ["Unknown"] * (2 - len(times)) + [f"{int(job.end_s)}" if ended else "Unknown"]
        state = "COMPLETED" if ended else "RUNNING" if has_begun else "PENDING"
        limit = int(job.requested_wall_time_s / 60)
        line = [len(lines), f"u{len(lines) % 7}", *times, state, limit, 1, tres, tres * has_begun]
        lines.append("|".join(map(str, line)))
    path = folder / "sacct.txt"
    path.write_text("\n".join(lines) + "\n")
    return path


@pytest.mark.slow
def test_a_history_whose_queue_grows_has_no_answer(tmp_path, monkeypatch):
    """Although GPUs are idle: jobs of 5 and 12 GPUs do not fit together on nodes of 8."""
    monkeypatch.setattr(background, "WIDTHS", {2: 0.2, 5: 0.5, 12: 0.3})
    path = recorded(tmp_path, monkeypatch, background.make_poisson_arrivals(600, 1.2, 64, 3))
    asked = QueueRequest(
        num_gpus=8, training_hours=2.0, history=str(path), nodes=8, reservations="one"
    )
    found = simulate_queue_and_answer(asked, 8, 0.03)
    assert found["mode"] is None
    assert re.search(r"the waiting work grew by [\d,]+ GPU-hours", found["refused"])
    assert read_history(path, 8).mean_gpus_in_use < 0.9 * 64
    monkeypatch.undo()
    path = recorded(tmp_path, monkeypatch, background.make_poisson_arrivals(600, 0.7, 64, 3))
    steady = read_history(path, 8)
    assert steady.queue_growth_gpus < 0.05 * 64
    assert simulate_queue_and_answer(replace(asked, training_hours=0.5), 8, 0.03)["refused"] is None


@pytest.mark.slow
def test_trainings_come_to_a_queue_as_full_as_it_was(tmp_path, monkeypatch):
    """sacct lists who ran when it begins, and not who had ended: before it the cluster looks empty."""
    monkeypatch.setattr(background, "MEDIAN_S", 4 * background.MEDIAN_S)
    monkeypatch.setattr(background, "MAX_S", 7 * background.MAX_S)
    arrivals = background.make_poisson_arrivals(1800, 0.8, 64, 6)
    found = read_history(recorded(tmp_path, monkeypatch, arrivals, last_days=7), 8)
    shape = (8, 8, Rules(num_reservations=1))
    queue = make_recorded_queue(
        *shape, found.make_arrivals(), 2.0, 4, 3, found.simulated_window_begin_s
    )
    moments = [
        [m + found.window_unix_s[0] - found.simulated_window_begin_s for m in block]
        for _, block in queue.blocks
    ]
    truth = TrainingQueue(*shape, [QueueBlock(arrivals, block) for block in moments])
    told, true = (
        simulate_modes(q, QueuedTraining(16, 2.0), modes=[GANG]).compute_mean_hours(GANG).value
        for q in (queue, truth)
    )
    assert told == pytest.approx(true, rel=0.2)
    settled_s = 0.4 * arrivals[-1].submit_s
    late = make_recorded_queue(*shape, arrivals, 2.0, 4, 3, settled_s)
    assert late.blocks[0][1][0] == pytest.approx(settled_s)


def test_a_job_that_began_long_before_the_history_shortens_nothing():
    """A window of 7 days, before which one job had run for 30: what counts is the window."""
    day_s = 86400.0
    arrivals = [Arrival(0.0, 1, 40 * day_s, 50 * day_s)]
    arrivals += [Arrival(30 * day_s + i * 3600, 1, 600.0, 3600.0) for i in range(7 * 24 + 1)]
    queue = make_recorded_queue(8, 8, Rules(num_reservations=1), arrivals, 2.0, 4, 3, 30 * day_s)
    moments = [m for _, block in queue.blocks for m in block]
    assert 30 * day_s <= min(moments) < max(moments) <= 37 * day_s - 3 * 2 * 3600
    with pytest.raises(ValueError, match=r"covers 168 h, .* give the accounting of 360 h or more"):
        make_recorded_queue(8, 8, Rules(num_reservations=1), arrivals, 60.0, 4, 3, 30 * day_s)
