"""The command of a cell on one node, as its agent starts, watches and ends it."""

from __future__ import annotations

import contextlib
import os
import secrets
import socket
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict
from typing import Any

import psutil

from stratbench.cell.files import read_json
from stratbench.cell.installation import INSTALLED, PACKAGE
from stratbench.extensions.commands.files import command_name, end_path, out_path, report_path
from stratbench.extensions.commands.strategy import arguments_of, filled, placeholders
from stratbench.report import VARIABLE
from stratbench.train.agent import NodeProcesses
from stratbench.train.job import Job

#: In the environment of all that belongs to a command: what is found with it after the end is killed.
MARK = "STRATBENCH_COMMAND"
#: How long the supervisor may take to end what the command has started, in seconds.
END_S = 20.0
#: How long other nodes wait for node 0 to say where all meet, in seconds.
MEETING_S = 120.0


class CommandProcess:
    """The command of a job on a node, below a supervisor. Attributes as those of `forkserver.Process`."""

    starts_others = True

    def __init__(self, job: Job, node: int) -> None:
        self.name = command_name(node)
        self.pid: int | None = None
        self.exitcode: int | None = None
        self._job, self._node = job, node
        self._mark = secrets.token_hex(16)
        self._process: subprocess.Popen[bytes] | None = None

    def start(self) -> None:
        """Start it, once it is known where the processes of all nodes meet."""
        folder = self._job.folder
        arguments = filled(
            arguments_of(self._job.settings.options), values_of(self._job, self._node)
        )
        supervisor = [sys.executable, "-m", "stratbench.extensions.commands.supervisor"]
        supervisor += ["--logs", os.fspath(folder.logs), "--log", os.fspath(folder.log(self.name))]
        supervisor += ["--end", os.fspath(end_path(folder, self._node))]
        supervisor += ["--origin-s", repr(self._job.origin_s), "--", *arguments]
        # A session of its own: a signal to the launcher's group must not reach it.
        self._process = subprocess.Popen(
            supervisor,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            env=environment_of(self._job, self._mark),
            start_new_session=True,
        )
        self.pid = self._process.pid

    @property
    def sentinel(self) -> int:
        """A descriptor that can be read once the supervisor has ended."""
        return self._process.stdout.fileno()

    def join(self, timeout: float | None = None) -> None:
        """Wait for the end, which sets `exitcode`: negative if a signal killed the command."""
        if self._process is None or self.exitcode is not None:
            return
        with contextlib.suppress(subprocess.TimeoutExpired):
            code = self._process.wait(timeout)
            end = end_path(self._job.folder, self._node)
            self.exitcode = read_json(end)["exit_code"] if end.exists() else code
            end_marked(self._mark)

    def is_alive(self) -> bool:
        self.join(0)
        return self.exitcode is None

    def kill(self) -> None:
        """Have the supervisor kill all that the command has started.

        Kill it where it does not.
        """
        self._process.stdin.close()
        self.join(END_S)
        if self.exitcode is None:
            self._process.kill()
            self.join()


@contextmanager
def processes_of(job: Job, node: int) -> Iterator[NodeProcesses]:
    """Yield the process of a node in place of workers, not yet started."""
    yield NodeProcesses(job, [CommandProcess(job, node)])


def end_marked(mark: str) -> None:
    """Kill what a command has left, if its supervisor was killed before it could."""
    for process in psutil.process_iter():
        with contextlib.suppress(psutil.Error, OSError):
            if process.environ().get(MARK) == mark:
                process.kill()


def environment_of(job: Job, mark: str) -> dict[str, str]:
    """Return the environment of a command, with its devices, threads and report file."""
    code = [] if INSTALLED else [os.fspath(PACKAGE.parent)]
    path = [*code, os.environ.get("PYTHONPATH", "")]
    return os.environ | {
        VARIABLE: os.fspath(report_path(job.folder)),
        MARK: mark,
        "PYTHONPATH": os.pathsep.join(filter(None, path)),
        "PYTHONUNBUFFERED": "1",  # so that its log is whole when it is killed
    }


def values_of(job: Job, node: int) -> dict[str, Any]:
    """Return the values of the names in braces on a node.

    The rendezvous address is determined only if a name needs it.
    """
    s, folder = job.settings, job.folder
    out_path(folder).mkdir(exist_ok=True)
    values = asdict(s) | {
        "workers": job.world_size,
        "nodes": job.n_nodes,
        "workers_per_node": job.workers_per_node,
        "node": node,
        "total_steps": s.total_steps(job.train_samples),
        "data": job.data_dir,
        "out": out_path(folder),
    }
    if {"host", "port"} & set(placeholders(arguments_of(s.options))):
        values["host"], values["port"] = meeting_place(job, node)
    return values


def meeting_place(job: Job, node: int) -> tuple[str, int]:
    """Return a name of node 0, and a port that was free there.

    Other nodes read it in the run folder.
    """
    if job.n_nodes == 1:
        return "127.0.0.1", free_port()
    if node == 0:
        job.folder.write_endpoint(os.uname().nodename, free_port())
    return job.folder.wait_for_endpoint(MEETING_S)


def free_port() -> int:
    """Return a port on which no process listens now."""
    with socket.socket() as probe:
        probe.bind(("", 0))
        return probe.getsockname()[1]
