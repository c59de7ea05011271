"""Supervises the worker jobs of an elastic cell: submits, replaces and cancels them.

Each worker job has a unique number. The cell has `gpus` slots, one per worker that can train at the same
time. A slot has at most one job at a time.
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

#: Minimum and maximum seconds between two polls of the worker jobs. The time doubles while nothing changes.
POLL_S, MAX_POLL_S = 0.5, 30.0
#: Seconds after which the job of a lost worker is cancelled. If the job ends
#: by itself before, SLURM records the reason.
LOST_JOB_GRACE_S = 5.0
#: Number of failed jobs in the same slot after which the cell fails.
MAX_FAILURES = 20
#: The cell fails if SLURM does not know this number of successive jobs in the same slot.
MAX_UNKNOWN = 3
_UNKNOWN = "no longer known"
#: A job that fails within SOON_S seconds is replaced only after a pause in seconds, which doubles up to a
#: maximum.
SOON_S, FIRST_PAUSE_S, MAX_PAUSE_S = 60.0, 5.0, 300.0


class NoWorkersError(RuntimeError):
    """No worker job can be started. The message has the reason."""


class SubmissionRefused(RuntimeError):
    """The scheduler has rejected a worker job. The message has the scheduler's reason.

    Attributes:
        retry_kind: Kind of a temporary rejection, or None if the rejection is permanent.
    """

    def __init__(self, reason: str, passes: submission.Kind | None = None) -> None:
        super().__init__(reason)
        self.retry_kind = passes


@dataclass(frozen=True)
class JobStatus:
    """State of a worker job when the scheduler was polled. Times are seconds since 1970, or None if unknown.

    `reason` says why the job waits, or how it ended. `has_failed` is True if the job ended with an error. It
    is False if the job was preempted, cancelled or reached its time limit.
    """

    state: Literal["queued", "running", "ended"]
    reason: str = ""
    has_failed: bool = False
    started_unix_s: float | None = None
    ended_unix_s: float | None = None


@dataclass(frozen=True)
class WorkerJobEntry:
    """State of a worker job in the supervisor's journal and in the record.

    `reason` says what the job waits for, or how it ended.
    """

    number: int
    slot: int
    id: str
    submitted_unix_s: float
    started_unix_s: float | None = None
    ended_unix_s: float | None = None
    reason: str = ""
    failed: bool = False


class WorkerJobBackend(Protocol):
    """A scheduler that runs worker jobs: SLURM, or processes of this machine."""

    def submit_worker_job(self, worker_number: int, slot: int) -> str:
        """Submit the job of worker `worker_number`, and return the job's id.

        After a temporary rejection, call this method again with the same number. If the earlier call did
        create a job, the id of that job is returned.

        Raises:
            SubmissionRefused: If the scheduler rejects the job.
        """

    def poll_worker_jobs(self, job_ids: Iterable[str]) -> Mapping[str, JobStatus] | None:
        """Return the states of worker jobs by job id. None if the scheduler does not answer.

        Jobs that the scheduler no longer knows are missing.
        """

    def cancel_worker_jobs(self, job_ids: Iterable[str]) -> None:
        """Cancel queued and running worker jobs, without waiting for their end."""


class WorkerJobSupervisor:
    """Context in which a thread submits a worker job per slot, and replaces ended jobs.

    The file `journal` has the submitted jobs, one JSON object per line. If the cell is restarted, the next
    supervisor continues with the jobs that still run. At the end of the context all jobs are cancelled.
    """

    def __init__(self, backend: WorkerJobBackend, slots: int, journal: Path) -> None:
        self._backend, self._slots, self._journal = backend, slots, journal
        self._entries: dict[str, WorkerJobEntry] = {}  # states of all jobs, by job id
        self._live: dict[int, str] = {}  # id of the queued or running job, by slot
        # Earliest time of the next submission by slot, by time.monotonic().
        self._not_before = dict.fromkeys(range(slots), 0.0)
        self._failures = dict.fromkeys(range(slots), 0)
        self._unknown = dict.fromkeys(range(slots), 0)
        # slots with a temporary rejection, whose job is submitted again
        self._postponed = submission.Postponed()
        self._next_number = 0
        #: When to cancel the job of a lost worker, by worker number. Times are by time.monotonic().
        self._cancel_at_s: dict[int, float] = {}
        self._lock = threading.Lock()  # guards `_entries`, which other threads read
        self._wake = threading.Condition()
        self._soon = self._stopped = self._finishing = False
        self._failure_reason: str | None = None
        self._thread = threading.Thread(target=self._supervise_jobs, name="keeper", daemon=True)

    def __enter__(self) -> WorkerJobSupervisor:
        self._load_earlier_jobs()
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
        self._backend.cancel_worker_jobs(self._live.values())
        now = time.time()
        for slot in list(self._live):
            self._record_job_end(
                slot, JobStatus("ended", "cancelled: the cell ended", ended_unix_s=now)
            )

    def stop_submitting_jobs(self) -> None:
        """Submit no more worker jobs, because the training is over. Present workers end by themselves."""
        self._finishing = True

    def cancel_job_of_lost_worker(self, worker: int) -> None:
        """Cancel the job of a lost worker, unless the job ends by itself within LOST_JOB_GRACE_S."""
        self._cancel_at_s[worker] = time.monotonic() + LOST_JOB_GRACE_S
        self.poll_jobs_soon()

    def poll_jobs_soon(self) -> None:
        """Poll the worker jobs at once, because a worker has joined or left."""
        with self._wake:
            self._soon = True
            self._wake.notify()

    def check_can_start_jobs(self) -> None:
        """Raise NoWorkersError if no worker job can be started."""
        if self._failure_reason is not None:
            raise NoWorkersError(self._failure_reason)

    def list_jobs(self) -> list[WorkerJobEntry]:
        """Return the states of all worker jobs so far, sorted by worker number."""
        with self._lock:
            return sorted(self._entries.values(), key=lambda e: e.number)

    # ------------------------------------------------------------ methods of the supervising thread

    def _supervise_jobs(self) -> None:
        pause_s = POLL_S
        while not self._stopped and self._failure_reason is None:
            try:
                changed = self._poll_jobs_and_detect_changes() | self._submit_missing_jobs()
            # Any error ends the cell, which would otherwise wait for workers forever.
            except Exception as error:
                self._failure_reason = (
                    f"worker jobs can no longer be supervised: {type(error).__name__}: {error}"
                )
                return
            pause_s = POLL_S if changed else min(2 * pause_s, MAX_POLL_S)
            with self._wake:
                if not self._soon and not self._stopped:
                    self._wake.wait(self._compute_poll_wait_s(pause_s))
                if self._soon:
                    self._soon, pause_s = False, POLL_S

    def _compute_poll_wait_s(self, poll_interval_s: float) -> float:
        """Return the seconds until the next poll of the worker jobs.

        The result is less than `poll_interval_s` if a job must be submitted or cancelled earlier.
        """
        now = time.monotonic()
        empty = [] if self._finishing else [s for s in range(self._slots) if s not in self._live]
        due = [max(self._not_before[s], self._postponed.next_submission_at_s) - now for s in empty]
        live = {self._entries[id_].number for id_ in self._live.values()}
        due += [t - now for n, t in list(self._cancel_at_s.items()) if n in live]
        return min([poll_interval_s, *(max(x, 0.05) for x in due)])

    def _poll_jobs_and_detect_changes(self) -> bool:
        """Poll all queued and running worker jobs, and return whether any has changed."""
        statuses = self._backend.poll_worker_jobs(list(self._live.values())) if self._live else {}
        if statuses is None:
            return False
        changed = False
        for slot, id_ in list(self._live.items()):
            now = statuses.get(id_, JobStatus("ended", _UNKNOWN))
            before = self._entries[id_]
            if now.state == "ended":
                self._record_job_end(slot, now)
                changed = True
                continue
            if self._cancel_at_s.get(before.number, math.inf) <= time.monotonic():
                del self._cancel_at_s[before.number]
                self._backend.cancel_worker_jobs([id_])
                changed = True
            started = before.started_unix_s or now.started_unix_s
            changed |= started != before.started_unix_s
            self._store_job_entry(replace(before, started_unix_s=started, reason=now.reason))
        return changed

    def _record_job_end(self, slot: int, status: JobStatus) -> None:
        id_ = self._live.pop(slot)
        before = self._entries[id_]
        self._cancel_at_s.pop(before.number, None)
        started = before.started_unix_s or status.started_unix_s
        ended = status.ended_unix_s or time.time()
        entry = replace(
            before,
            started_unix_s=started,
            ended_unix_s=ended,
            reason=status.reason,
            failed=status.has_failed,
        )
        self._store_job_entry(entry)
        print(f"worker {entry.number} (job {id_}) ended: {entry.reason}", flush=True)
        is_unknown = started is None and not before.reason and status.reason == _UNKNOWN
        self._unknown[slot] = self._unknown[slot] + 1 if is_unknown else 0
        if self._unknown[slot] >= MAX_UNKNOWN:
            self._failure_reason = (
                f"SLURM knows none of the last {MAX_UNKNOWN} worker jobs of one place, the last of which was "
                f"job {id_}; check that sbatch prints the job's number as its last line"
            )
        if not status.has_failed:
            return
        self._failures[slot] += 1
        if self._failures[slot] >= MAX_FAILURES:
            self._failure_reason = (
                f"{MAX_FAILURES} worker jobs of one place failed; the last one, worker {entry.number}, "
                f"failed with: {status.reason}; see its log"
            )
        if started is None or ended - started < SOON_S:
            wait_s = min(FIRST_PAUSE_S * 2 ** (self._failures[slot] - 1), MAX_PAUSE_S)
            self._not_before[slot] = time.monotonic() + wait_s

    def _submit_missing_jobs(self) -> bool:
        """Submit a worker job for each slot without one, and return whether any was submitted."""
        submitted = False
        if self._postponed.is_submission_paused(time.monotonic()):
            return submitted
        self._postponed.jobs.clear()
        for slot in range(self._slots):
            if self._stopped or self._finishing or self._failure_reason is not None:
                return submitted
            if slot in self._live or self._not_before[slot] > time.monotonic():
                continue
            number, asked_unix_s = self._next_number, time.time()
            try:
                id_ = self._backend.submit_worker_job(number, slot)
            except SubmissionRefused as refusal:
                if self._postpone_job_if_temporary(slot, refusal):
                    return submitted
                # The next job gets a new number, because sbatch may have accepted this one without an answer.
                self._next_number += 1
                if not self._entries:
                    self._failure_reason = f"no worker job is accepted: {refusal}"
                    return submitted
                print(f"a worker job is not accepted at present: {refusal}", flush=True)
                self._not_before[slot] = time.monotonic() + MAX_POLL_S
                continue
            self._next_number += 1
            self._postponed.end_pause()
            self._live[slot] = id_
            self._store_job_entry(WorkerJobEntry(number, slot, id_, asked_unix_s), is_new=True)
            print(f"worker {number} is job {id_}", flush=True)
            submitted = True
        return submitted

    def _postpone_job_if_temporary(self, slot: int, refusal: SubmissionRefused) -> bool:
        """Postpone the worker job of a slot if its rejection is temporary.

        Return whether the job will be submitted again.
        """
        now, kind = time.monotonic(), refusal.retry_kind
        if kind is None:
            return False
        self._postponed.add_refused_job(slot, kind, now)
        if self._postponed.has_waited_too_long(now):
            return False
        if kind not in self._postponed.reported_refusal_kinds:
            self._postponed.reported_refusal_kinds.add(kind)
            print(
                f"a worker job is not accepted at present, and will be submitted again: {refusal}",
                flush=True,
            )
        return True

    # ------------------------------------------------------------ the journal

    def _store_job_entry(self, entry: WorkerJobEntry, is_new: bool = False) -> None:
        with self._lock:
            before = self._entries.get(entry.id)
            self._entries[entry.id] = entry
        if is_new or (entry.ended_unix_s is not None and before != entry):
            with self._journal.open("a", encoding="utf-8") as file:
                file.write(json.dumps(asdict(entry)) + "\n")

    def _load_earlier_jobs(self) -> None:
        """Read the worker jobs of earlier supervisors of this cell from the journal.

        This supervisor continues with those that have not ended.
        """
        for values in read_json_lines(self._journal):
            entry = WorkerJobEntry(**values)
            self._entries[entry.id] = entry
        self._next_number = max((e.number for e in self._entries.values()), default=-1) + 1
        for entry in self._entries.values():
            if entry.ended_unix_s is None and entry.slot < self._slots:
                self._live[entry.slot] = entry.id
