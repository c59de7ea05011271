"""Runs worker jobs of an elastic cell as processes of this machine, without SLURM."""

from __future__ import annotations

import signal
import time
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path

from stratbench.cell.run_folder import format_worker_name
from stratbench.extensions.elastic.jobs.keeper import JobStatus, SubmissionRefused, WorkerJobBackend
from stratbench.train.forkserver import Process

WORKER = "stratbench.extensions.elastic.worker:main"


class LocalJobs(WorkerJobBackend):
    """A scheduler that runs worker jobs as processes of this machine.

    A job's id is a process id, and its slot is a GPU's number.
    """

    def __init__(self, server: Path, job: Path, watch: Callable[[str, int], None]) -> None:
        """Prepare to start worker processes by a fork server.

        Args:
            server: Address of the fork server.
            job: Path of the job's file, which workers read.
            watch: Called with the name and process id of each started worker.
        """
        self._server, self._job, self._watch = server, job, watch
        # By job id: the job's process, and its start time in seconds since 1970.
        self._running: dict[str, tuple[Process, float]] = {}

    def submit_worker_job(self, worker_number: int, slot: int) -> str:
        name = format_worker_name(worker_number)
        process = Process(self._server, name, WORKER, str(self._job), worker_number, slot)
        try:
            process.start()
        except OSError as error:
            raise SubmissionRefused(str(error)) from error
        self._running[str(process.pid)] = process, time.time()
        self._watch(name, process.pid)
        return str(process.pid)

    def poll_worker_jobs(self, job_ids: Iterable[str]) -> Mapping[str, JobStatus]:
        return {id_: self._get_job_status(id_) for id_ in job_ids if id_ in self._running}

    def _get_job_status(self, job_id: str) -> JobStatus:
        process, started = self._running[job_id]
        if process.is_alive():
            return JobStatus("running", started_unix_s=started)
        del self._running[job_id]
        code = process.exitcode
        reason = f"killed by {signal.Signals(-code).name}" if code < 0 else f"exit code {code}"
        return JobStatus("ended", reason, code > 0, started, time.time())

    def cancel_worker_jobs(self, job_ids: Iterable[str]) -> None:
        ended = [self._running.pop(id_)[0] for id_ in list(job_ids) if id_ in self._running]
        for process in ended:
            process.kill()
        for process in ended:
            process.join(timeout=5)
