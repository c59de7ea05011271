"""Worker jobs of an elastic cell as processes of this machine, without SLURM."""

from __future__ import annotations

import signal
import time
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path

from stratbench.cell.run_folder import worker_name
from stratbench.extensions.elastic.jobs.keeper import Backend, Seen, SubmissionRefused
from stratbench.train.forkserver import Process

WORKER = "stratbench.extensions.elastic.worker:main"


class LocalJobs(Backend):
    """This machine as a `keeper.Backend`. A job's id is its process id; slots are its GPUs' numbers."""

    def __init__(self, server: Path, job: Path, watch: Callable[[str, int], None]) -> None:
        """`server`: a fork server's address; `job`: the file that workers read.

        `watch` is called with a worker's name and process id.
        """
        self._server, self._job, self._watch = server, job, watch
        self._running: dict[str, tuple[Process, float]] = {}  # with its start, by id

    def submit(self, number: int, slot: int) -> str:
        name = worker_name(number)
        process = Process(self._server, name, WORKER, str(self._job), number, slot)
        try:
            process.start()
        except OSError as error:
            raise SubmissionRefused(str(error)) from error
        self._running[str(process.pid)] = process, time.time()
        self._watch(name, process.pid)
        return str(process.pid)

    def look(self, ids: Iterable[str]) -> Mapping[str, Seen]:
        return {id_: self._seen(id_) for id_ in ids if id_ in self._running}

    def _seen(self, id_: str) -> Seen:
        process, started = self._running[id_]
        if process.is_alive():
            return Seen("running", started_unix_s=started)
        del self._running[id_]
        code = process.exitcode
        reason = f"killed by {signal.Signals(-code).name}" if code < 0 else f"exit code {code}"
        return Seen("ended", reason, code > 0, started, time.time())

    def cancel(self, ids: Iterable[str]) -> None:
        ended = [self._running.pop(id_)[0] for id_ in list(ids) if id_ in self._running]
        for process in ended:
            process.kill()
        for process in ended:
            process.join(timeout=5)
