"""Blocks: the order of their segments, what is timed, how they end, and that a lost one leaves nothing."""

from __future__ import annotations

import csv
import itertools
import json
import math
import os
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import psutil
import pytest
from test_launch import check_log_is_appended

import invariants
from launching import LIMIT_S, LIMITS_S, WORKFLOW, assert_gone, settings, until
from stratbench.analysis.records import collect
from stratbench.cell import record
from stratbench.cell.run_folder import RunFolder
from stratbench.extensions.verdict import blocks
from stratbench.extensions.verdict.block import run_segments_in_order
from stratbench.extensions.verdict.blocks import BlockPlan, Segment
from stratbench.strategies import get_strategy_class
from stratbench.train.gpu_locks import list_visible_gpus

pytestmark = pytest.mark.timeout(300)


def plan_of(*order: str, **changes: Any) -> BlockPlan:
    plan = BlockPlan(
        study="tests", experiment="tiny", model="vgg-compact", dataset="tiny", gpus=2, block=1,
        order=order, seed=11, steps=4, discarded_steps=2, disagreement_limit=50.0,
    )  # fmt: skip
    return replace(plan, **changes)


# ---------------------------------------------------------------- the order


def ran(plan: BlockPlan, times: dict[str, list[float | str]]) -> list[tuple[str, str]]:
    """Passes and strategies that a block runs whose segments take these times, or end in these ways."""
    left = {name: iter(values) for name, values in times.items()}
    slots = itertools.count()

    def run(pass_name: str, strategy: str) -> Segment:
        found = next(left[strategy])
        ok = isinstance(found, float)
        status, mean_s = ("ok", found) if ok else (found, None)
        return Segment(next(slots), pass_name, strategy, status, mean_s, None, None, 1.0, 2.0)

    told: list[Segment] = []
    done = run_segments_in_order(plan, run, told.append)
    assert [s.slot for s in done] == list(range(len(done)))
    assert [s for s in done if s.pass_name == "burn-in" and s.status == "ok"] == told
    return [(s.pass_name, s.strategy) for s in done]


def test_strategies_run_in_order_and_in_its_mirror_and_a_third_time_where_they_disagree():
    plan = plan_of("b", "a", "c", disagreement_limit=math.log(1.03))
    times = {"a": [1.0, 1.02], "b": [9.0, 1.0, 1.04, 1.0], "c": [2.0, 1.9, 1.95]}
    assert ran(plan, times) == [
        ("burn-in", "b"),
        *(("first", s) for s in "bac"),
        *(("mirror", s) for s in "cab"),
        ("third", "b"), ("third", "c"),
    ]  # fmt: skip


def test_a_strategy_that_ends_badly_drops_out_of_the_rest():
    found = ran(plan_of("a", "b", "c"), {"a": ["oom"], "b": [9.0, 1.0, "timeout"], "c": [1.0, 1.0]})
    assert found == [
        ("burn-in", "a"), ("burn-in", "b"), ("first", "b"), ("first", "c"), ("mirror", "c"),
        ("mirror", "b"),
    ]  # fmt: skip
    assert ran(plan_of("a"), {"a": ["diverged"]}) == [("burn-in", "a")]


def test_the_first_block_takes_the_limit_of_disagreement_from_itself():
    plan = plan_of("a", "b", "c", disagreement_limit=None)
    times = {"a": [9.0, 1.0, 1.1, 1.0], "b": [1.0, 1.001], "c": [1.0, 1.002]}
    assert [s for s in ran(plan, times) if s[0] == "third"] == [("third", "a")]
    times = {name: [9.0, 1.0, 1.1] if name == "a" else [1.0, 1.1] for name in "abc"}
    assert [s for s in ran(plan, times) if s[0] == "third"] == []  # as noisy as all


@pytest.mark.parametrize(
    ("strategy", "options", "length"),
    [
        ("ddp", {}, (15, 50)),
        ("ps-async", {}, (15, 50)),
        ("ddp", {"compress": "powersgd", "powersgd_start_step": 24}, (24, 50)),
        ("local-sgd", {"period": 8}, (16, 56)),
        (
            "local-sgd",
            {"period": 8, "start": 3},
            (19, 56),
        ),  # its averages follow steps 11, 19, 27, …
        ("diloco", {"inner_steps": 40}, (40, 80)),
    ],
)
def test_whole_periods_of_a_strategy_are_timed_and_none_of_its_first_steps(
    strategy, options, length
):
    cls = get_strategy_class(strategy)
    assert cls(cls.Options(**options)).choose_discarded_and_timed_steps(15, 50) == length


def test_a_plan_comes_back_from_json_and_from_a_round():
    plan = plan_of("a", "b")
    assert BlockPlan.from_dict(json.loads(json.dumps(plan.as_dict()))) == plan
    length = {
        "steps": plan.steps,
        "discard": plan.discarded_steps,
        "disagreement": plan.disagreement_limit,
    }
    own = {"order", "study", "steps", "discarded_steps", "disagreement_limit"}
    entry = {k: v for k, v in plan.as_dict().items() if k not in own}
    assert (
        BlockPlan.from_round_entry("tests", entry | {"strategies": ["a", "b"], "settings": length})
        == plan
    )


# ---------------------------------------------------------------- real blocks


class LaunchedBlock:
    """A block at work, and where it leaves what."""

    def __init__(self, root: Path, data: Path, env: dict[str, str], plan: BlockPlan, **changes):
        self.plan = plan
        self.out, self.logs = plan.get_result_folder(root), plan.get_log_folder(root)
        limit_s = changes.pop("limit_s", 300)
        strategies = {name: settings(name, **changes.get(name, {})) for name in plan.order}
        command = [
            sys.executable, "-m", "stratbench.extensions.verdict.block",
            "--block", json.dumps(plan.as_dict()),
            "--settings", json.dumps({name: asdict(s) for name, s in strategies.items()}),
            "--data", str(data), "--out", str(self.out), "--logs", str(self.logs),
            "--time-limit-s", str(limit_s),
        ]  # fmt: skip
        self.process = subprocess.Popen(
            command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
            env=env | {"PYTHONPATH": str(WORKFLOW)},
        )  # fmt: skip

    def finish(self) -> str:
        output, _ = self.process.communicate(timeout=LIMIT_S)
        return output

    @property
    def result(self) -> dict[str, Any]:
        blocks.read_block(self.out / blocks.BLOCK_FILE)  # has all that a verdict reads
        return json.loads((self.out / blocks.BLOCK_FILE).read_text())

    def records(self) -> list[dict[str, Any]]:
        """The records of all segments, which keep all invariants."""
        found = [record.read_record(self.out / s["record"]) for s in self.result["segments"]]
        assert [sentence for each in found for sentence in invariants.broken(each)] == []
        return found


@pytest.fixture(scope="module")
def start_block(
    tmp_path_factory: pytest.TempPathFactory, tiny_data: Path, warm: dict[str, str]
) -> Iterator[Callable[..., LaunchedBlock]]:
    started: list[LaunchedBlock] = []

    def start(plan: BlockPlan, root: Path | None = None, **changes: Any) -> LaunchedBlock:
        root = root or tmp_path_factory.mktemp("block")
        started.append(LaunchedBlock(root, tiny_data, warm, plan, **changes))
        return started[-1]

    yield start
    for block in started:
        block.process.kill()


@pytest.fixture(scope="module")
def finished(start_block) -> LaunchedBlock:
    """A block of a collective, one that diverges, and a server."""
    # Where there is no GPU, the block has to say so itself: what `auto` is, its settings do not.
    auto = {"device": "cpu" if list_visible_gpus() else "auto"}
    block = start_block(
        plan_of("ddp", "zero1", "ps-async"),
        **{"ddp": auto, "zero1": auto | {"lr": 1e30}, "ps-async": auto},
    )
    output = block.finish()
    assert block.process.returncode == 0, output
    return block


@pytest.mark.slow
def test_a_finished_block_says_what_it_ran(finished):
    found = finished.result
    assert [(s["pass"], s["strategy"], s["status"]) for s in found["segments"]] == [
        ("burn-in", "ddp", "ok"),
        ("first", "ddp", "ok"),
        ("first", "zero1", "diverged"),
        ("first", "ps-async", "ok"),
        ("mirror", "ps-async", "ok"),
        ("mirror", "ddp", "ok"),
    ]
    assert found["settings"] == {"steps": 4, "discard": 2, "disagreement": 50.0}
    assert found["device"] == "cpu"
    assert found["hosts"] == [os.uname().nodename]
    assert found["gpu_seconds"] >= 2 * sum(s["wall_s"] for s in found["segments"])
    assert found["trained"]["ddp"] == blocks.remove_length_and_seed(
        settings("ddp", device=found["trained"]["ddp"]["device"], seed=3)
    )


@pytest.mark.slow
def test_segments_leave_records_of_their_steps(finished):
    found = finished.result
    preceding = None
    for segment, rec in zip(found["segments"], finished.records(), strict=True):
        block, steps = rec["block"], rec.get("steps")
        assert (block["slot"], block["pass"]) == (segment["slot"], segment["pass"])
        assert block["preceding"] == preceding
        preceding = segment["strategy"]
        assert rec["cell"]["strategy"] == preceding
        assert rec["settings"]["seed"] == 11  # the block's, whatever the cell's is
        if segment["status"] != "ok":
            assert segment["mean_step_s"] is steps is None
            continue
        assert steps["mean_s"] == segment["mean_step_s"]
        assert (steps["discarded"], steps["timed"], len(steps["each_ms"])) == (2, 4, 4)
        assert sum(steps["each_ms"]) == pytest.approx(4e3 * steps["mean_s"])
        assert 4 * steps["mean_s"] < rec["time"]["train_time_s"]  # of which it is a part
        assert rec["score"]["per_epoch"] == []
        if rec["server"]:
            assert "step_ends_s" not in rec["server"]["servers"][0]


@pytest.mark.slow
def test_segments_are_in_no_table_of_training_times(finished, tmp_path):
    """Not even where a cell has their coordinates."""
    study = finished.out.parents[4]
    assert len(list(study.rglob("record.json"))) == 6
    (tmp_path / "cells.json").write_text(
        json.dumps([finished.plan.make_segment_cell("ddp").as_dict()])
    )
    out = tmp_path / "cells.csv"
    arguments = [
        "--expected", tmp_path / "cells.json", "--records-root", study / "cells", "--out", out,
        "--epochs-out", tmp_path / "epochs.csv",
    ]  # fmt: skip
    assert collect.main([str(a) for a in arguments]) == 1
    (row,) = csv.DictReader(out.open())
    assert (row["status"], row["train_time_s"]) == ("missing", "")


@pytest.mark.slow
def test_a_killed_block_leaves_no_result_and_is_repeated_whole(start_block, tmp_path):
    plan = plan_of("ddp", "ps-async")
    asleep = {"slowdown": {"workers": [0, 1], "factor": 1e6}}  # in its warm-up
    block = start_block(plan, tmp_path, **{"ps-async": asleep})
    until(lambda: list(block.out.glob("segments/01-*/record.json")))
    family = psutil.Process(block.process.pid).children(recursive=True)
    block.process.kill()
    block.finish()
    assert_gone(family)
    assert not (block.out / blocks.BLOCK_FILE).exists()
    again = start_block(plan, tmp_path)
    output = again.finish()
    assert again.process.returncode == 0, output
    assert [s["slot"] for s in again.result["segments"]] == list(range(5))
    assert len(list(again.out.glob("segments/*"))) == 5


@pytest.mark.slow
@pytest.mark.parametrize("signum", [signal.SIGINT, signal.SIGTERM])
def test_a_block_that_is_told_to_stop_ends_its_processes(start_block, signum):
    block = start_block(plan_of("ddp", steps=100_000))
    logs = block.logs / "00-ddp"
    until(
        lambda: (
            (p := RunFolder.from_log_dir(logs).get_phase_log_path(0)).exists()
            and '"train"' in p.read_text()
        )
    )
    family = psutil.Process(block.process.pid).children(recursive=True)
    block.process.send_signal(signum)
    output = block.finish()
    assert block.process.returncode == 128 + signum, output
    assert_gone(family)
    assert not (block.out / blocks.BLOCK_FILE).exists()


@pytest.mark.slow
def test_a_killed_worker_fails_the_block_and_its_evidence_stays(start_block):
    block = start_block(plan_of("ddp", steps=100_000))
    folder = RunFolder.from_log_dir(block.logs / "00-ddp")
    until(
        lambda: (
            folder.get_phase_log_path(0).exists()
            and '"train"' in folder.get_phase_log_path(0).read_text()
        )
    )
    lines = folder.get_pid_list_path(0).read_text().splitlines()
    os.kill(
        int(next(line.split()[1] for line in lines if line.startswith("rank1"))), signal.SIGKILL
    )
    output = block.finish()
    assert block.process.returncode == 1
    assert "segment 00-ddp: rank1: killed by SIGKILL" in output
    kept = json.loads((block.logs / "00-ddp" / record.FAILURE_FILE).read_text())
    assert "killed by SIGKILL" in kept["reason"]
    assert not (block.out / blocks.BLOCK_FILE).exists()


@pytest.mark.slow
def test_a_segment_that_reaches_its_limit_is_a_result(start_block):
    asleep = {"slowdown": {"workers": [0, 1], "factor": 20}}  # most of the time
    for limit_s in LIMITS_S:
        block = start_block(plan_of("ddp", steps=100_000), limit_s=limit_s, ddp=asleep)
        output = block.finish()
        if "no step within" not in output:
            break
    assert block.process.returncode == 0, output
    (segment,) = block.result["segments"]  # the only strategy is out
    assert (segment["status"], segment["mean_step_s"]) == ("timeout", None)
    (found,) = block.records()
    assert found["reason"] == f"the cell's limit of {limit_s:g} s was reached"
    assert (found["block"]["pass"], "steps" in found) == ("burn-in", False)


def test_what_is_no_block_is_named(tmp_path):
    path = tmp_path / "block.json"
    with pytest.raises(blocks.BlockError, match=r"block\.json cannot be read"):
        blocks.read_block(path)
    for text in ("[]", "{", '{"schema_version": 1}', '{"schema_version": 2}'):
        path.write_text(text)
        with pytest.raises(blocks.BlockError, match=r"block\.json"):
            blocks.read_block(path)


def test_a_block_that_waits_leaves_the_log_of_the_one_that_trains():
    check_log_is_appended("verdict", "extensions.verdict.block")
