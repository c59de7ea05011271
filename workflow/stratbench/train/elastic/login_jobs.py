"""Worker jobs where only the login node may submit: the cell's job asks for them through its run folder.

    python -m stratbench.train.elastic.login_jobs < CELLS.json

`LoginJobs` leaves requests there. This program answers them beside the Snakemake that has started it, and
ends with it: then it cancels the worker jobs that it has seen to. A request names no command: what is
submitted follows from the config, and only a number is taken from the request.
"""

from __future__ import annotations

import json
import os
import re
import select
import signal
import stat
import subprocess
import sys
import threading
import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from stratbench.cell.files import write_atomic
from stratbench.cell.run_folder import RunFolder
from stratbench.study.slurm.commands import RUNNING, ask_slurm
from stratbench.study.slurm.worker_job import WorkerJob
from stratbench.train.elastic.keeper import Backend, Refused, Seen
from stratbench.train.elastic.slurm_jobs import JOB_NAME, QUEUED, SlurmJobs, comment_of_worker

#: How often either side looks for the other's files, in seconds.
LOOK_S = 0.5
#: How long an answer may take: file systems of clusters show a new file only after a while. In seconds.
ANSWER_S = 180.0
#: The same where the cell's own job ends: SLURM soon kills it.
LAST_ANSWER_S = 3.0
#: The longest request, in bytes, and the highest number of a worker.
_MOST_BYTES, _MOST_NUMBER = 1 << 16, 10**6
#: How often jobs are tried to be cancelled at the end, where SLURM does not answer, and seconds in between.
_TRIES, _TRY_S = 10, 3.0


# ---------------------------------------------------------------- in the cell's own job


class LoginJobs(Backend):
    """The login node as a `keeper.Backend`: each call is a request in a folder of mode 0700."""

    def __init__(self, folder: Path) -> None:
        """`folder`: `RunFolder.requests`; what an earlier launcher has left there is deleted."""
        self._folder, self._asked, self._closing = folder, 0, threading.Event()
        folder.mkdir(mode=0o700, exist_ok=True)
        for old in folder.iterdir():
            old.unlink(missing_ok=True)

    def submit(self, number: int, slot: int) -> str:
        answer = self._ask(call="submit", number=number)
        if answer is None:
            raise Refused(
                f"nobody on the login node has answered for {ANSWER_S:g} s; snakemake must run there for as "
                "long as the cell trains (cluster.submit_workers: login)"
            )
        if "refused" in answer:
            raise Refused(answer["refused"])
        if self._closing.is_set():  # it was under way when the cell ended
            self.cancel([answer["id"]])
        return answer["id"]

    def look(self, ids: Iterable[str]) -> Mapping[str, Seen] | None:
        answer = self._ask(call="look", ids=list(ids))
        if answer is None or "jobs" not in answer:
            return None
        return {id_: Seen(**seen) for id_, seen in answer["jobs"].items()}

    def cancel(self, ids: Iterable[str]) -> None:
        if ids := list(ids):
            self._ask(call="cancel", ids=ids)

    def close(self) -> None:
        self._closing.set()

    def _ask(self, **request: Any) -> dict[str, Any] | None:
        """The answer to a request; None where none comes. One that nobody has taken is withdrawn."""
        self._asked += 1
        asked = self._folder / f"{os.getpid()}-{self._asked}.request"
        answer = asked.with_suffix(".answer")
        write_atomic(asked, json.dumps(request | {"job": os.environ.get("SLURM_JOB_ID")}))
        since = time.monotonic()
        while time.monotonic() - since < (LAST_ANSWER_S if self._closing.is_set() else ANSWER_S):
            try:
                content = json.loads(answer.read_text(encoding="utf-8"))
            except FileNotFoundError:
                time.sleep(LOOK_S)
                continue
            answer.unlink()
            return content
        if request["call"] != "cancel":  # that may still be done when this process has ended
            asked.unlink(missing_ok=True)
        return None


# ---------------------------------------------------------------- on the login node


@dataclass(frozen=True)
class ServedCell:
    """An elastic cell, as the Snakemake that has submitted it knows it."""

    #: Its path among the results, which its worker jobs name.
    cell: str
    #: The comment of its own SLURM job.
    comment: str
    #: Its log folder.
    logs: str
    #: The most worker jobs at a time.
    workers: int
    worker_job: WorkerJob

    @classmethod
    def from_dict(cls, fields: dict[str, Any]) -> ServedCell:
        """The cell of which `asdict` made these fields."""
        asked = WorkerJob.from_json(json.dumps(fields["worker_job"]))
        return cls(**fields | {"worker_job": asked})


@dataclass(frozen=True)
class _Listed:
    """One of the user's jobs that was submitted from this folder, as squeue lists it."""

    state: str
    name: str
    comment: str

    @property
    def is_live(self) -> bool:
        return self.state in QUEUED | RUNNING


class Desk:
    """Answers the requests of some cells' own jobs. A context: at its end all worker jobs are cancelled."""

    def __init__(self, cells: Sequence[ServedCell], first: str = "") -> None:
        """`first`: what each job runs before its worker, in sh."""
        self._cells = list(cells)
        self._first = first
        #: The worker jobs that this process has submitted, or looks after.
        self._mine: set[str] = set()

    def __enter__(self) -> Desk:
        return self

    def __exit__(self, *of_error: object) -> None:
        for _ in range(_TRIES if self._mine else 0):
            listed = listed_jobs()
            if listed is not None:
                live = [i for i in sorted(self._mine) if i in listed and listed[i].is_live]
                if not live:
                    return
                print(
                    f"snakemake has ended: its worker jobs are cancelled: {' '.join(live)}",
                    flush=True,
                )
                ask_slurm(["scancel", "--quiet", *live])
            time.sleep(_TRY_S)
        if self._mine:
            ids = " ".join(sorted(self._mine))
            print(f"SLURM has not said that these worker jobs have ended: {ids}", flush=True)

    def answer_all(self) -> None:
        """Answer the requests that are there now."""
        waiting = [(cell, path) for cell in self._cells for path in requests_of(cell)]
        if not waiting or (listed := listed_jobs()) is None:
            return
        for cell, path in waiting:
            taken = path.with_suffix(".taken")
            try:
                path.rename(taken)  # who succeeds in it answers, if several could
                answer = self._answer(cell, read_request(taken), listed)
                write_atomic(path.with_suffix(".answer"), json.dumps(answer))
                taken.unlink()
            except FileNotFoundError:  # withdrawn, or the run folder is made anew
                continue
            except OSError as error:
                print(f"{path}: {error}", flush=True)

    def _answer(
        self, cell: ServedCell, request: dict[str, Any], listed: dict[str, _Listed]
    ) -> dict[str, Any]:
        folder = RunFolder.of_logs(Path(cell.logs))
        jobs = SlurmJobs(cell.worker_job, folder, cell.cell, self._first, remedy="")
        ours = {i: job for i, job in listed.items() if is_worker_of(cell, job)}
        named = request.get("ids")
        ids = [i for i in named if i in ours] if isinstance(named, list) else []
        if request.get("call") == "cancel":
            jobs.cancel(ids)
            return {}
        own = listed.get(str(request.get("job")))
        if own is None or own.comment != cell.comment or own.state not in RUNNING:
            return _refused(cell, f"it is not of a job that trains {cell.cell}")
        if request.get("call") == "look":
            self._mine.update(ids)
            seen = jobs.look(ids) if ids else {}
            return {} if seen is None else {"jobs": {i: asdict(s) for i, s in seen.items()}}
        number = request.get("number")
        if (
            request.get("call") != "submit"
            or type(number) is not int
            or not 0 <= number <= _MOST_NUMBER
        ):
            return _refused(cell, "it is none that a cell's own job makes")
        return self._submit(cell, jobs, number, ours)

    def _submit(
        self, cell: ServedCell, jobs: SlurmJobs, number: int, ours: dict[str, _Listed]
    ) -> dict[str, Any]:
        live = {i: job.comment for i, job in ours.items() if job.is_live}
        # One whose id was never told, as the one who submitted it was killed.
        same = [i for i, c in live.items() if c == comment_of_worker(number, cell.cell)]
        if not same and len(live) >= cell.workers:
            return _refused(cell, f"it has {len(live)} worker jobs, and {cell.workers} workers")
        try:
            id_ = same[0] if same else jobs.submit(number, 0)
        except Refused as refused:
            return {"refused": str(refused)}
        self._mine.add(id_)
        print(f"job {id_}: {comment_of_worker(number, cell.cell)}", flush=True)
        return {"id": id_}


def _refused(cell: ServedCell, why: str) -> dict[str, Any]:
    print(f"a request in the run folder of {cell.cell} is refused: {why}", flush=True)
    return {"refused": f"the login node refuses the request: {why}"}


def is_worker_of(cell: ServedCell, job: _Listed) -> bool:
    """Whether a job is that of a worker of the cell, as SLURM has it."""
    pattern = comment_of_worker(r"\d+", re.escape(cell.cell))
    return job.name == JOB_NAME and re.fullmatch(pattern, job.comment) is not None


def listed_jobs() -> dict[str, _Listed] | None:
    """The user's jobs that were submitted from this folder, by id; None where SLURM does not answer."""
    form = "--format=%i|%T|%j|%Z|%k"
    done = ask_slurm(["squeue", "--me", "--noheader", "--states=all", form])
    if done is None or done.returncode != 0:
        return None
    rows = [line.split("|", 4) for line in done.stdout.splitlines() if line.count("|") >= 4]
    here = Path.cwd().resolve()
    return {
        id_: _Listed(state.partition(" ")[0], name, comment)
        for id_, state, name, folder, comment in rows
        if Path(folder).resolve() == here
    }


def requests_of(cell: ServedCell) -> list[Path]:
    """The cell's requests, in order; none from a folder that others could write in."""
    folder = RunFolder.of_logs(Path(cell.logs)).requests
    try:
        status = folder.lstat()
        private = status.st_uid == os.geteuid() and status.st_mode & 0o022 == 0
        if not stat.S_ISDIR(status.st_mode) or not private:
            return []
        # Not those that are just being written, whose names begin with a dot.
        whole = [path for path in folder.iterdir() if re.fullmatch(r"\d+-\d+\.request", path.name)]
        return sorted(whole, key=lambda path: (len(path.name), path.name))
    except OSError:
        return []


def read_request(path: Path) -> dict[str, Any]:
    """What a request asks for; empty where it is no plain file of this user with a JSON object."""
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
    except OSError:
        return {}
    with open(descriptor, "rb") as file:
        status = os.fstat(descriptor)
        if not stat.S_ISREG(status.st_mode) or status.st_uid != os.geteuid():
            return {}
        text = file.read(_MOST_BYTES + 1)
    try:
        request = json.loads(text) if len(text) <= _MOST_BYTES else None
    except (ValueError, RecursionError):
        return {}
    return request if isinstance(request, dict) else {}


#: The program that this process has started: its standard input must stay open.
_started: list[subprocess.Popen[bytes]] = []


def start_desk(cells: Sequence[ServedCell], first: str, log: Path) -> None:
    """Start the program beside this process, with which it ends; what it does is in `log`."""
    log.parent.mkdir(parents=True, exist_ok=True)
    with log.open("ab") as output:
        process = subprocess.Popen(
            [sys.executable, "-m", "stratbench.train.elastic.login_jobs"],
            stdin=subprocess.PIPE, stdout=output, stderr=output,
            start_new_session=True,  # Ctrl-C is Snakemake's: it has jobs to cancel after that
        )  # fmt: skip
    line = json.dumps({"first": first, "cells": [asdict(cell) for cell in cells]})
    process.stdin.write(line.encode() + b"\n")
    process.stdin.flush()
    _started.append(process)


def main() -> int:
    """Answer until the process that holds the other end of standard input has ended."""
    stopped = threading.Event()
    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
        signal.signal(number, lambda *_: stopped.set())
    asked = json.loads(sys.stdin.buffer.readline())
    parent = os.getppid()
    with Desk([ServedCell.from_dict(cell) for cell in asked["cells"]], asked["first"]) as desk:
        while not stopped.is_set() and os.getppid() == parent:
            desk.answer_all()
            if select.select([sys.stdin], [], [], LOOK_S)[0]:
                break
    return 0


if __name__ == "__main__":
    sys.exit(main())
