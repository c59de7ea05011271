"""Supervises the worker jobs of an elastic cell: submits, replaces and cancels them.

Each job has a unique number. At any time there is at most one job for each slot, from 0 to the cell's `gpus`
- 1, until the block ends.
"""

from __future__ import annotations

import json
import math
import threading
import time
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from types import TracebackType
from typing import Literal, Protocol

from stratbench.cell.files import read_json_lines
from stratbench.study.slurm import submission

#: The shortest and the longest time between two looks at the jobs, in seconds: it doubles while nothing
#: changes.
LOOK_S, MAX_LOOK_S = 0.5, 30.0
#: How long the job of a worker that is lost may take to end by itself: then its reason is known.
PARTING_S = 5.0
#: Failures of a slot's jobs after which the cell is given up.
MAX_FAILURES = 20
#: The same of jobs in a row that were submitted, and that nobody knew when they were looked for.
MAX_UNKNOWN = 3
_UNKNOWN = "no longer known"
#: A job that fails within so many seconds after its start is replaced later: after 5 s, 10 s, ... 5 minutes.
SOON_S, FIRST_PAUSE_S, MAX_PAUSE_S = 60.0, 5.0, 300.0


class GaveUp(RuntimeError):
    """No worker job can be started; the text has the reason."""


class SubmissionRefused(RuntimeError):
    """A job was rejected; the text is the reason.

    Attributes:
        passes: Why it may be accepted later; None if the rejection is permanent.
    """

    def __init__(self, reason: str, passes: submission.Kind | None = None) -> None:
        super().__init__(reason)
        self.passes = passes


@dataclass(frozen=True)
class Seen:
    """A job as it was seen. Dates are seconds since 1970, None where unknown.

    `failed`: it ended, and neither in order nor because it was taken back.
    """

    state: Literal["queued", "running", "ended"]
    reason: str = ""
    failed: bool = False
    started_unix_s: float | None = None
    ended_unix_s: float | None = None


@dataclass(frozen=True)
class WorkerJobEntry:
    """Data on a worker job, for the record. `reason`: how it ended, or why it waits."""

    number: int
    slot: int
    id: str
    submitted_unix_s: float
    started_unix_s: float | None = None
    ended_unix_s: float | None = None
    reason: str = ""
    failed: bool = False


class Backend(Protocol):
    """Scheduler of worker jobs: SLURM, or this machine."""

    def submit(self, number: int, slot: int) -> str:
        """Start or queue worker `number`; returns the job's id. Raises `SubmissionRefused`.

        A number whose refusal may pass is tried again: where there is a job of it all the same, that is it.
        """

    def look(self, ids: Iterable[str]) -> Mapping[str, Seen] | None:
        """Return the jobs by id, without ended ones.

        Return None if the scheduler does not answer.
        """

    def cancel(self, ids: Iterable[str]) -> None:
        """Request the end of queued and running jobs, without waiting for it."""


class WorkerJobSupervisor:
    """A context in which a thread maintains `slots` worker jobs.

    `journal`: a file with the submitted jobs, one JSON object per line. A later supervisor of the same cell
    takes over those that still run. At the end all jobs are cancelled.
    """

    def __init__(self, backend: Backend, slots: int, journal: Path) -> None:
        self._backend, self._slots, self._journal = backend, slots, journal
        self._entries: dict[str, WorkerJobEntry] = {}  # by id
        self._live: dict[int, str] = {}  # id by slot
        self._not_before = dict.fromkeys(range(slots), 0.0)  # by time.monotonic
        self._failures = dict.fromkeys(range(slots), 0)
        self._unknown = dict.fromkeys(range(slots), 0)
        self._postponed = submission.Postponed()  # its jobs are slots
        self._next_number = 0
        #: When the jobs of lost workers are cancelled, by number.
        self._parting: dict[int, float] = {}
        self._lock = threading.Lock()  # guards the entries
        self._wake = threading.Condition()
        self._soon = self._stopped = self._finishing = False
        self._gave_up: str | None = None
        self._thread = threading.Thread(target=self._run, name="keeper", daemon=True)

    def __enter__(self) -> WorkerJobSupervisor:
        self._take_over()
        self._thread.start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        with self._wake:
            self._stopped = True
            self._wake.notify()
        self._thread.join()
        self._backend.cancel(self._live.values())
        now = time.time()
        for slot in list(self._live):
            self._end(slot, Seen("ended", "cancelled: the cell ended", ended_unix_s=now))

    def finish(self) -> None:
        """Submit no more jobs: the training is over, and present workers may end in order."""
        self._finishing = True

    def give_up(self, number: int) -> None:
        """Cancel an unresponsive worker's job unless it ends by itself."""
        self._parting[number] = time.monotonic() + PARTING_S
        self.look_soon()

    def look_soon(self) -> None:
        """Look at the jobs at once: a worker has come or gone."""
        with self._wake:
            self._soon = True
            self._wake.notify()

    def check(self) -> None:
        """Raise GaveUp where no worker can be had."""
        if self._gave_up is not None:
            raise GaveUp(self._gave_up)

    def jobs(self) -> list[WorkerJobEntry]:
        """Return all jobs so far, by number."""
        with self._lock:
            return sorted(self._entries.values(), key=lambda e: e.number)

    # ------------------------------------------------------------ the thread

    def _run(self) -> None:
        pause_s = LOOK_S
        while not self._stopped and self._gave_up is None:
            try:
                changed = self._look() | self._submit()
            except Exception as error:  # the cell would wait for workers that nobody submits
                self._gave_up = f"worker jobs cannot be kept: {type(error).__name__}: {error}"
                return
            pause_s = LOOK_S if changed else min(2 * pause_s, MAX_LOOK_S)
            with self._wake:
                if not self._soon and not self._stopped:
                    self._wake.wait(self._until_next(pause_s))
                if self._soon:
                    self._soon, pause_s = False, LOOK_S

    def _until_next(self, pause_s: float) -> float:
        """Return seconds until the next poll, which is sooner if a slot's job is due."""
        now = time.monotonic()
        empty = [] if self._finishing else [s for s in range(self._slots) if s not in self._live]
        due = [max(self._not_before[s], self._postponed.not_before) - now for s in empty]
        live = {self._entries[id_].number for id_ in self._live.values()}
        due += [t - now for n, t in list(self._parting.items()) if n in live]
        return min([pause_s, *(max(x, 0.05) for x in due)])

    def _look(self) -> bool:
        """Look at all live jobs; returns whether any has changed."""
        seen = self._backend.look(list(self._live.values())) if self._live else {}
        if seen is None:
            return False
        changed = False
        for slot, id_ in list(self._live.items()):
            now = seen.get(id_, Seen("ended", _UNKNOWN))
            before = self._entries[id_]
            if now.state == "ended":
                self._end(slot, now)
                changed = True
                continue
            if self._parting.get(before.number, math.inf) <= time.monotonic():
                del self._parting[before.number]
                self._backend.cancel([id_])
                changed = True
            started = before.started_unix_s or now.started_unix_s
            changed |= started != before.started_unix_s
            self._keep(replace(before, started_unix_s=started, reason=now.reason))
        return changed

    def _end(self, slot: int, seen: Seen) -> None:
        id_ = self._live.pop(slot)
        before = self._entries[id_]
        self._parting.pop(before.number, None)
        started = before.started_unix_s or seen.started_unix_s
        ended = seen.ended_unix_s or time.time()
        entry = replace(
            before,
            started_unix_s=started,
            ended_unix_s=ended,
            reason=seen.reason,
            failed=seen.failed,
        )
        self._keep(entry)
        print(f"worker {entry.number} (job {id_}) ended: {entry.reason}", flush=True)
        is_unknown = started is None and not before.reason and seen.reason == _UNKNOWN
        self._unknown[slot] = self._unknown[slot] + 1 if is_unknown else 0
        if self._unknown[slot] >= MAX_UNKNOWN:
            self._gave_up = (
                f"{MAX_UNKNOWN} worker jobs of one place were submitted, and SLURM knows none of them, the "
                f"last one, job {id_}; see whether sbatch prints a job's number as its last line"
            )
        if not seen.failed:
            return
        self._failures[slot] += 1
        if self._failures[slot] >= MAX_FAILURES:
            self._gave_up = (
                f"{MAX_FAILURES} worker jobs of one place failed, the last one, worker {entry.number}, "
                f"with: {seen.reason}; its log says more"
            )
        if started is None or ended - started < SOON_S:
            wait_s = min(FIRST_PAUSE_S * 2 ** (self._failures[slot] - 1), MAX_PAUSE_S)
            self._not_before[slot] = time.monotonic() + wait_s

    def _submit(self) -> bool:
        """Submit a job for each slot without one; returns whether any was submitted."""
        submitted = False
        if self._postponed.waits(time.monotonic()):
            return submitted
        self._postponed.jobs.clear()
        for slot in range(self._slots):
            if self._stopped or self._finishing or self._gave_up is not None:
                return submitted
            if slot in self._live or self._not_before[slot] > time.monotonic():
                continue
            number, asked_unix_s = self._next_number, time.time()
            try:
                id_ = self._backend.submit(number, slot)
            except SubmissionRefused as refused:
                if self._postpone(slot, refused):
                    return submitted
                self._next_number += 1  # there may be a job all the same, where the answer was lost
                if not self._entries:
                    self._gave_up = f"no worker job is accepted: {refused}"
                    return submitted
                print(f"a worker job is not accepted now: {refused}", flush=True)
                self._not_before[slot] = time.monotonic() + MAX_LOOK_S
                continue
            self._next_number += 1
            self._postponed.hurry()
            self._live[slot] = id_
            self._keep(WorkerJobEntry(number, slot, id_, asked_unix_s), new=True)
            print(f"worker {number} is job {id_}", flush=True)
            submitted = True
        return submitted

    def _postpone(self, slot: int, refused: SubmissionRefused) -> bool:
        """Try again later, where the refusal may pass; returns whether it may."""
        now, kind = time.monotonic(), refused.passes
        if kind is None:
            return False
        self._postponed.add(slot, kind, now)
        if self._postponed.is_over(now):
            return False
        if kind not in self._postponed.told:
            self._postponed.told.add(kind)
            print(f"a worker job is not accepted now, and tried again: {refused}", flush=True)
        return True

    # ------------------------------------------------------------ the journal

    def _keep(self, entry: WorkerJobEntry, new: bool = False) -> None:
        with self._lock:
            before = self._entries.get(entry.id)
            self._entries[entry.id] = entry
        if new or (entry.ended_unix_s is not None and before != entry):
            with self._journal.open("a", encoding="utf-8") as file:
                file.write(json.dumps(asdict(entry)) + "\n")

    def _take_over(self) -> None:
        """Go on with the jobs that an earlier keeper of this cell has left."""
        for values in read_json_lines(self._journal):
            entry = WorkerJobEntry(**values)
            self._entries[entry.id] = entry
        self._next_number = max((e.number for e in self._entries.values()), default=-1) + 1
        for entry in self._entries.values():
            if entry.ended_unix_s is None and entry.slot < self._slots:
                self._live[entry.slot] = entry.id
