"""Starts, watches and ends a cell's command on one node."""

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
from stratbench.extensions.commands.files import (
    get_command_file_stem,
    get_exit_status_path,
    get_output_folder,
    get_report_path,
)
from stratbench.extensions.commands.strategy import (
    fill_placeholders,
    get_command_arguments,
    iter_placeholders,
)
from stratbench.report import VARIABLE
from stratbench.train.agent import NodeProcesses
from stratbench.train.job import Job

#: Environment variable that marks all processes of a command. Marked processes that remain are killed.
MARK = "STRATBENCH_COMMAND"
#: Seconds in which the supervisor must end all processes of the command.
END_S = 20.0
#: Maximum seconds that other nodes wait until node 0 has written the rendezvous address.
MEETING_S = 120.0


class CommandProcess:
    """The command of a job on one node, which a supervisor process starts.

    The class has the interface of `forkserver.Process`.
    """

    starts_others = True

    def __init__(self, job: Job, node: int) -> None:
        self.name = get_command_file_stem(node)
        self.pid: int | None = None
        self.exitcode: int | None = None
        self._job, self._node = job, node
        self._mark = secrets.token_hex(16)
        self._process: subprocess.Popen[bytes] | None = None

    def start(self) -> None:
        """Start the command. If it needs the rendezvous address, wait for that address first."""
        folder = self._job.folder
        arguments = fill_placeholders(
            get_command_arguments(self._job.settings.options),
            make_placeholder_values(self._job, self._node),
        )
        supervisor = [sys.executable, "-m", "stratbench.extensions.commands.supervisor"]
        supervisor += [
            "--logs",
            os.fspath(folder.log_dir),
            "--log",
            os.fspath(folder.get_log_path(self.name)),
        ]
        supervisor += ["--end", os.fspath(get_exit_status_path(folder, self._node))]
        supervisor += ["--origin-s", repr(self._job.origin_s), "--", *arguments]
        # The supervisor has its own session. So signals to the launcher's process group do not reach it.
        self._process = subprocess.Popen(
            supervisor,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            env=make_command_environment(self._job, self._mark),
            start_new_session=True,
        )
        self.pid = self._process.pid

    @property
    def sentinel(self) -> int:
        """File descriptor that becomes readable when the supervisor has ended."""
        return self._process.stdout.fileno()

    def join(self, timeout: float | None = None) -> None:
        """Wait for the end of the command, and set `exitcode`.

        The exit code is negative if a signal killed the command.
        """
        if self._process is None or self.exitcode is not None:
            return
        with contextlib.suppress(subprocess.TimeoutExpired):
            code = self._process.wait(timeout)
            end = get_exit_status_path(self._job.folder, self._node)
            self.exitcode = read_json(end)["exit_code"] if end.exists() else code
            kill_marked_processes(self._mark)

    def is_alive(self) -> bool:
        """Return whether the command still runs."""
        self.join(0)
        return self.exitcode is None

    def kill(self) -> None:
        """Kill all processes of the command through the supervisor.

        The supervisor is killed too if it does not do so within END_S.
        """
        self._process.stdin.close()
        self.join(END_S)
        if self.exitcode is None:
            self._process.kill()
            self.join()


@contextmanager
def make_command_process(job: Job, node: int) -> Iterator[NodeProcesses]:
    """Yield the processes of a node: the command only, which is not started yet."""
    yield NodeProcesses(job, [CommandProcess(job, node)])


def kill_marked_processes(mark: str) -> None:
    """Kill all processes whose environment variable `STRATBENCH_COMMAND` has the value `mark`.

    Such processes remain if the command's supervisor was killed.
    """
    for process in psutil.process_iter():
        with contextlib.suppress(psutil.Error, OSError):
            if process.environ().get(MARK) == mark:
                process.kill()


def make_command_environment(job: Job, mark: str) -> dict[str, str]:
    """Return a command's environment variables, including the report's path and the mark."""
    code = [] if INSTALLED else [os.fspath(PACKAGE.parent)]
    path = [*code, os.environ.get("PYTHONPATH", "")]
    return os.environ | {
        VARIABLE: os.fspath(get_report_path(job.folder)),
        MARK: mark,
        "PYTHONPATH": os.pathsep.join(filter(None, path)),
        # Without buffering, the log is complete even if the command is killed.
        "PYTHONUNBUFFERED": "1",
    }


def make_placeholder_values(job: Job, node: int) -> dict[str, Any]:
    """Return the values that replace placeholders in a command's arguments on a node.

    The rendezvous address is determined only if a placeholder needs it.
    """
    s, folder = job.settings, job.folder
    get_output_folder(folder).mkdir(exist_ok=True)
    values = asdict(s) | {
        "workers": job.world_size,
        "nodes": job.n_nodes,
        "workers_per_node": job.workers_per_node,
        "node": node,
        "total_steps": s.count_steps(job.train_samples),
        "data": job.data_dir,
        "out": get_output_folder(folder),
    }
    if {"host", "port"} & set(iter_placeholders(get_command_arguments(s.options))):
        values["host"], values["port"] = find_rendezvous_address(job, node)
    return values


def find_rendezvous_address(job: Job, node: int) -> tuple[str, int]:
    """Return the rendezvous of the command's processes: node 0's address and a free port there.

    Node 0 writes both to the run folder, where the other nodes read them.
    """
    if job.n_nodes == 1:
        return "127.0.0.1", find_free_port()
    if node == 0:
        job.folder.write_node0_endpoint(os.uname().nodename, find_free_port())
    return job.folder.wait_for_node0_endpoint(MEETING_S)


def find_free_port() -> int:
    """Return a port on which no process listens at present."""
    with socket.socket() as probe:
        probe.bind(("", 0))
        return probe.getsockname()[1]
