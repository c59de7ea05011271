"""Split synchronous training by real processes: whoever comes and goes, the arithmetic is one worker's."""

from __future__ import annotations

import contextlib
import json
import os
import random
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pandas as pd
import pytest

from launching import FOREVER, LaunchedCell, settings, until
from stratbench.analysis.audit import RULES
from stratbench.analysis.audit.rule import Evidence
from stratbench.analysis.records.columns import COLUMNS, row_of_record
from stratbench.cell import record

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]


def jobs(launched: LaunchedCell) -> dict[int, dict[str, Any]]:
    """The worker jobs by number, each as it was last seen."""
    with contextlib.suppress(FileNotFoundError):
        lines = launched.folder.worker_jobs.read_text().split("\n")[:-1]
        return {entry["number"]: entry for entry in map(json.loads, lines)}
    return {}


def inside(launched: LaunchedCell) -> list[int]:
    """The numbers of the workers that run and have trained."""
    alive = [n for n, entry in jobs(launched).items() if entry["ended_unix_s"] is None]
    phases = {n: launched.folder.phases(n) for n in alive}
    return [n for n, path in phases.items() if path.exists() and '"join"' in path.read_text()]


def losses(launched: LaunchedCell) -> list[float]:
    """The test losses after each epoch, which tell the weights."""
    return [entry["test_loss"] for entry in launched.read_record()["score"]["per_epoch"]]


#: What the machine and its load are to blame for, and not the record.
OF_THE_MACHINE = {"busy-machine", "loaded-machine", "steps-uneven", "workers-are-processes"}
OF_THE_MACHINE |= {"processes-share-cores"}


def found_in(record_: dict[str, Any]) -> set[str]:
    """The rules of the audit that find something in a record by itself."""
    row = record_["cell"] | row_of_record(record_, Path("no timeline"))
    evidence = Evidence(pd.DataFrame([row], columns=list(COLUMNS)), [record_])
    return {rule.id for rule in RULES if any(rule.check(evidence))} - OF_THE_MACHINE


#: fp64, with all that an update may have: momentum, decay, a schedule, clipping; slow enough to be disturbed.
EXACT: dict[str, Any] = {
    "precision": "fp64", "momentum": 0.9, "weight_decay": 1e-3, "nesterov": True, "schedule": "cosine",
    "clip_norm": 0.5, "lr": 0.02, "global_batch": 15, "warmup_steps": 1, "epochs": 25,
}  # fmt: skip


def disturb(launched: LaunchedCell, changes: int, seed: int) -> list[str]:
    """Have workers leave by SIGTERM and be lost by SIGKILL, each time that a new one has come.

    At first whoever is there; then one of three, so that two of them share a batch that is odd.
    """
    chance, done = random.Random(seed), []
    known, chosen = set(), set()

    def new() -> list[int] | None:
        assert launched.process.poll() is None, launched.process.communicate()[0]
        now = [n for n in inside(launched) if n not in chosen]
        enough = len(now) >= (1 if len(done) < 2 else 3)
        return now if enough and set(now) - known else None

    while len(done) < changes:
        now = until(new)
        known.update(now)
        number = chance.choice(now)
        chosen.add(number)
        how = chance.choice((signal.SIGTERM, signal.SIGKILL))
        with contextlib.suppress(ProcessLookupError):
            os.kill(int(jobs(launched)[number]["id"]), how)
            done.append(f"{how.name} to worker {number} of {now}")
    return done


def test_any_history_of_joins_and_leaves_gives_the_weights_of_one_process(
    start_cell: Callable[..., LaunchedCell], warm: dict[str, str]
) -> None:
    alone = start_cell(settings("single", gpus=1, per_worker_batch=15, **EXACT), env=warm)
    assert alone.finish()[0] == 0
    slow = {"workers": [0, 1, 2], "factor": 8}
    s = settings("ddp", gpus=3, per_worker_batch=5, elastic=True, slowdown=slow, **EXACT)
    launched = start_cell(s, env=warm)
    history = disturb(launched, changes=5, seed=random.randrange(1 << 30))
    code, output = launched.finish()
    assert code == 0, output
    found = launched.read_record()
    assert losses(launched) == pytest.approx(losses(alone), rel=1e-12), history
    told = found["elastic"]
    assert told["joins"] >= 3 + 1
    assert any(
        len(g["members"]) == 2 and g["to_step"] > g["from_step"] for g in told["generations"]
    )
    assert told["losses"] + told["leaves"] >= len(history)
    assert told["pauses"]["count"] >= 1
    record.validate(found)
    assert found_in(found) == set()
    for name, plant in PLANTED.items():
        copy = json.loads(json.dumps(found))
        plant(copy["elastic"], copy)
        assert "contradictory-elastic" in found_in(copy), name


def longest(told: dict[str, Any]) -> dict[str, Any]:
    """The generation that took most steps."""
    return max(told["generations"], key=lambda g: (g["to_step"] or 0) - g["from_step"])


#: Lies that the audit finds in a record: of the block `elastic`, and of the whole.
PLANTED: dict[str, Callable[[dict[str, Any], dict[str, Any]], Any]] = {
    "a job that trained has gone": lambda e, r: e["jobs"].remove(
        next(j for j in e["jobs"] if j["first_step_s"] is not None)
    ),
    "a pause is left out": lambda e, r: e["pauses"].update(count=e["pauses"]["count"] - 1),
    "pauses are half as long": lambda e, r: e["pauses"].update(total_s=e["pauses"]["total_s"] / 2),
    "GPUs were held for less": lambda e, r: e.update(allocated_s=e["allocated_s"] / 2),
    "nobody was idle": lambda e, r: e.update(idle_s=0.0),
    "steps are missing": lambda e, r: longest(e).update(from_step=longest(e)["from_step"] + 5),
    "nothing was repeated": lambda e, r: e.update(steps_repeated=e["steps_repeated"] + 3),
    "a member twice": lambda e, r: longest(e)["members"].append(longest(e)["members"][0]),
    "a stranger": lambda e, r: longest(e)["members"].append(99),
    "it ended before it started": lambda e, r: e["jobs"][-1].update(ended_s=-5.0),
    "one slot too many": lambda e, r: e["jobs"][-1].update(slot=3),
    "fewer came": lambda e, r: e.update(joins=e["joins"] - 1),
    "a worker did more": lambda e, r: r["workers"][-1].update(steps=10**6),
    "it is not elastic": lambda e, r: r.pop("elastic"),
}


def generations(launched: LaunchedCell) -> list[dict[str, Any]]:
    """Who has trained together so far."""
    return [
        g for path in launched.folder.lives() for g in json.loads(path.read_text())["generations"]
    ]


def together(launched: LaunchedCell, members: int) -> bool:
    """Whether so many train now."""
    assert launched.process.poll() is None, launched.process.communicate()[0]
    last = generations(launched)[-1:]
    return any(len(g["members"]) == members and g["began_unix_s"] is not None for g in last)


def test_a_member_that_falls_silent_is_parted_from_and_the_others_go_on(
    start_cell: Callable[..., LaunchedCell], warm: dict[str, str]
) -> None:
    """A stopped process stands for a node that is gone: its connections stay open, and no collective ends."""
    slow = {"workers": [0, 1], "factor": 5}
    s = settings("ddp", gpus=2, elastic=True, epochs=FOREVER, lr=1e-6, slowdown=slow)
    launched = start_cell(s, env=warm)
    until(lambda: together(launched, 2))
    silent = generations(launched)[-1]["members"][1]
    os.kill(int(jobs(launched)[silent]["id"]), signal.SIGSTOP)
    began = len(generations(launched))
    until(lambda: any(silent not in g["members"] for g in generations(launched)[began:]))
    until(lambda: together(launched, 2))  # another has come in its place
    lost = json.loads(launched.folder.lives()[-1].read_text())["lost"]
    assert silent in lost
    # All are asked to leave at once, as where all are preempted: the state is kept, and gone on with.
    here = generations(launched)[-1]["members"]
    for number in (signal.SIGSTOP, signal.SIGTERM, signal.SIGCONT):
        for worker in here:
            os.kill(int(jobs(launched)[worker]["id"]), number)
    began = len(generations(launched))
    until(lambda: any(not {*here} & {*g["members"]} for g in generations(launched)[began:]))
    back = next(g for g in generations(launched) if g["from_checkpoint"])
    assert back["from_step"] == generations(launched)[back["number"] - 1]["to_step"] > 0
    launched.process.terminate()
    assert launched.finish()[0] == 128 + signal.SIGTERM
