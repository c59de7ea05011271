"""The timeline: phases joined to samples by time and rank, and energy of known series."""

from __future__ import annotations

import csv
import json
import math
from pathlib import Path
from types import SimpleNamespace

import pytest

from stratbench.telemetry import timeline as timeline_module
from stratbench.telemetry.timeline import (
    SAMPLE_COLUMNS,
    PhaseLog,
    compute_energy_joules,
    merge_timeline,
    read_phase_intervals,
    read_samples,
)


def write_samples(path: Path, rows: list[dict]) -> Path:
    with path.open("w", newline="") as file:
        writer = csv.DictWriter(file, SAMPLE_COLUMNS, restval="")
        writer.writeheader()
        writer.writerows({"node": "n0", "kind": "gpu", "id": 0} | row for row in rows)
    return path


def write_log(path: Path, *entries: tuple[float, int, str, str]) -> Path:
    keys = ("t_s", "rank", "phase", "event")
    path.write_text("".join(json.dumps(dict(zip(keys, e, strict=True))) + "\n" for e in entries))
    return path


def phases_of(timeline: Path) -> list[tuple[float, str, str]]:
    with timeline.open(newline="") as file:
        return [(float(row["t_s"]), row["id"], row["phase"]) for row in csv.DictReader(file)]


def test_phase_log_counts_from_the_origin_and_appends(tmp_path, monkeypatch):
    now_s = iter((200.0, 200.25, 201.0, 203.5))
    monkeypatch.setattr(timeline_module, "time", SimpleNamespace(monotonic=lambda: next(now_s)))
    path = tmp_path / "rank1.jsonl"
    for phase in ("setup", "eval"):
        log = PhaseLog(path, rank=1, origin_s=100.0)
        log.write_phase_event(phase, "start")
        log.write_phase_event(phase, "end")
    setup, evaluation = read_phase_intervals([path])
    assert (setup.rank, setup.phase, evaluation.phase) == (1, "setup", "eval")
    assert (setup.start_s, setup.end_s) == (100, 100.25)
    assert (evaluation.start_s, evaluation.end_s) == (101, 103.5)


def test_a_phase_that_never_ended_is_open_and_a_cut_line_is_left_out(tmp_path):
    path = write_log(tmp_path / "r.jsonl", (1, 0, "setup", "start"), (2, 0, "setup", "end"))
    with path.open("a") as file:
        file.write(
            '{"t_s": 3, "rank": 0, "phase": "train epoch 1", "event": "start"}\n{"t_s": 4, "r'
        )
    assert [tuple(i) for i in read_phase_intervals([path])] == [
        (0, "setup", 1, 2),
        (0, "train epoch 1", 3, math.inf),
    ]


def test_every_row_gets_its_ranks_phase_and_the_machine_the_lowest_ranks(tmp_path):
    one = write_samples(
        tmp_path / "n0.csv",
        [{"t_s": t} for t in (0, 1, 2, 3, 4)]
        + [{"t_s": 3, "kind": "process", "id": "rank1"}]
        + [{"t_s": 3, "kind": "process", "id": "server0"}],
    )
    other = write_samples(tmp_path / "n1.csv", [{"t_s": 2.5, "node": "n1"}])
    logs = [
        write_log(
            tmp_path / "0.jsonl",
            (0.5, 0, "setup", "start"),
            (1.5, 0, "setup", "end"),
            (2, 0, "train epoch 1", "start"),
            (4, 0, "train epoch 1", "end"),
        ),
        write_log(tmp_path / "1.jsonl", (2.5, 1, "server wait", "start")),
    ]
    merge_timeline([one, other, tmp_path / "absent.csv"], logs, tmp_path / "out.csv")
    assert phases_of(tmp_path / "out.csv") == [
        (0, "0", ""),
        (1, "0", "setup"),
        (2, "0", "train epoch 1"),
        (2.5, "0", "train epoch 1"),
        (3, "0", "train epoch 1"),
        (3, "rank1", "server wait"),
        (3, "server0", "train epoch 1"),
        (4, "0", ""),
    ]


def test_of_nested_phases_the_inner_one_counts(tmp_path):
    samples = write_samples(tmp_path / "s.csv", [{"t_s": t} for t in (1, 3, 5)])
    log = write_log(
        tmp_path / "0.jsonl",
        (0, 0, "outer", "start"),
        (2, 0, "inner", "start"),
        (4, 0, "inner", "end"),
        (6, 0, "outer", "end"),
    )
    merge_timeline([samples], [log], tmp_path / "out.csv")
    assert [phase for _, _, phase in phases_of(tmp_path / "out.csv")] == ["outer", "inner", "outer"]


def test_without_logs_or_samples_there_is_still_a_timeline(tmp_path):
    samples = write_samples(tmp_path / "s.csv", [{"t_s": 1}])
    merge_timeline([samples], [tmp_path / "absent.jsonl"], tmp_path / "out.csv")
    assert phases_of(tmp_path / "out.csv") == [(1, "0", "")]
    merge_timeline([], [], tmp_path / "empty.csv")
    assert phases_of(tmp_path / "empty.csv") == []


def test_a_row_cut_short_is_left_out(tmp_path):
    samples = write_samples(tmp_path / "s.csv", [{"t_s": 1}, {"t_s": 2}])
    samples.write_text(samples.read_text() + "3.0,n0,gp")
    assert [row["t_s"] for row in read_samples(samples)] == [1, 2]


def joules(timeline: Path, t0_s: float, t1_s: float, *gpus: tuple[str, str]) -> float | None:
    """Energy of `gpus` (node, id), by default the first of node n0, between two times."""
    return compute_energy_joules([timeline], {gpu: [(t0_s, t1_s)] for gpu in gpus or [("n0", "0")]})


def test_energy_from_a_counter_is_interpolated_at_both_ends(tmp_path):
    # 100 W: the counter grows by 50 J every half second.
    rows = [{"t_s": i / 2, "energy_j": 7000 + 50 * i, "power_w": 999} for i in range(21)]
    timeline = write_samples(tmp_path / "t.csv", rows)
    assert joules(timeline, 1.25, 6.5) == pytest.approx(525)
    assert joules(timeline, 0, 10) == pytest.approx(1000)
    assert joules(timeline, 3.1, 3.1) == pytest.approx(0)


def test_energy_from_power_is_its_integral(tmp_path):
    # P(t) = 20 t: exactly 10 (t1^2 - t0^2), which the trapezoidal rule gives for a line.
    rows = [{"t_s": t / 4, "power_w": 5 * t} for t in range(41)]
    timeline = write_samples(tmp_path / "t.csv", rows)
    assert joules(timeline, 1.1, 8.3) == pytest.approx(10 * (8.3**2 - 1.1**2))


def test_energy_of_uneven_samples_weighs_by_time(tmp_path):
    points = ((0, 100), (1, 100), (9, 300), (10, 300))
    timeline = write_samples(tmp_path / "t.csv", [{"t_s": t, "power_w": p} for t, p in points])
    assert joules(timeline, 0, 10) == pytest.approx(100 + 8 * 200 + 300)


def test_a_counter_that_was_reset_gives_way_to_the_power(tmp_path):
    rows = [{"t_s": t, "energy_j": e, "power_w": 10} for t, e in ((0, 500), (1, 600), (2, 5))]
    timeline = write_samples(tmp_path / "t.csv", rows)
    assert joules(timeline, 0, 2) == pytest.approx(20)


def test_energy_is_by_gpu_and_absent_where_samples_do_not_reach(tmp_path):
    rows = [{"t_s": t, "id": 0, "power_w": 10} for t in range(5)]
    rows += [{"t_s": t, "id": 1, "power_w": 10} for t in range(2, 5)]
    rows += [{"t_s": t, "id": 2} for t in range(5)]
    rows += [{"t_s": t, "id": 0, "node": "n1", "power_w": 30} for t in range(5)]
    timeline = write_samples(tmp_path / "t.csv", rows)
    assert joules(timeline, 0, 4, ("n0", "0"), ("n1", "0")) == pytest.approx(40 + 120)
    assert joules(timeline, 2, 4, ("n0", "0"), ("n0", "1")) == pytest.approx(20 + 20)
    assert joules(timeline, 0, 4, ("n0", "0"), ("n0", "1")) is None  # GPU 1 is seen from 2 s on
    assert joules(timeline, 2, 4, ("n0", "2")) is None
    assert joules(timeline, 2, 5) is None
    assert compute_energy_joules([timeline], {}) is None
