"""Snakemake for tests, imported once: each run is a fork, with an environment and a folder of its own.

As a program: it reads a run as a line of JSON, and answers with the exit code. A run that is started, and
not waited for, is in a session of its own, and tells its pid and exit code itself.
"""

from __future__ import annotations

import atexit
import contextlib
import gc
import json
import os
import select
import signal
import subprocess
import sys
import tempfile
import time
from functools import cache
from pathlib import Path
from typing import IO

#: What each run would import: Snakemake by itself, or for what this workflow has.
IMPORTED = ("snakemake.cli", "snakemake.report.html_reporter", "pandas", "jsonschema", "smart_open")
#: Seconds between two looks at a cluster's jobs, where they are not to become ever more.
LOOK_VARIABLE = "STRATBENCH_TESTS_LOOK_S"
#: As many bytes have a pid and an exit code on their way.
NUMBER_BYTES = 12


def run_snakemake(
    args: list[str], cwd: Path, env: dict[str, str], timeout_s: float
) -> tuple[int, str]:
    """Run `python -m snakemake` with `args` to its end; exit code, and output and errors together."""
    with tempfile.TemporaryDirectory() as folder:
        printed = Path(folder, "printed")
        printed.touch()
        process = _ask(args, cwd, env, str(printed))
        if not select.select([process.stdout], [], [], timeout_s)[0]:
            _end(process)
            _process.cache_clear()
            raise TimeoutError(f"snakemake takes over {timeout_s} s:\n{printed.read_text()}")
        return int(process.stdout.readline()), printed.read_text()


class StartedSnakemake:
    """A `python -m snakemake` at work, to be asked and waited for as a `subprocess.Popen` in text mode.

    A fork as well, but nobody's child: in a session of its own, and with Ctrl-C working, wherever the
    tests run. `stdout`, errors included, is a pipe if no file is given for it.
    """

    def __init__(
        self, args: list[str], cwd: Path, env: dict[str, str], output: IO[str] | None = None
    ) -> None:
        self.returncode: int | None = None
        self.stdout: IO[bytes] | None = None
        self._printed = b""
        self._told, ends = os.pipe()
        opened = [ends]
        if output is None:
            read, write = os.pipe()
            opened.append(write)
            self.stdout = os.fdopen(read, "rb", buffering=0)
        here = f"/proc/{os.getpid()}/fd"
        printed = f"{here}/{opened[-1] if output is None else output.fileno()}"
        _ask(args, cwd, env, printed, ends=f"{here}/{ends}")
        self.pid = self._next_told(None)  # by then it has opened both
        for fd in opened:
            os.close(fd)

    def poll(self) -> int | None:
        try:
            return self.wait(0)
        except subprocess.TimeoutExpired:
            return None

    def wait(self, timeout: float | None = None) -> int:
        if self.returncode is None:
            self.returncode = self._next_told(timeout)
            os.close(self._told)
        return self.returncode

    def communicate(self, timeout: float | None = None) -> tuple[str | None, None]:
        deadline = None if timeout is None else time.monotonic() + timeout
        left_s = None
        while self.stdout is not None:
            if deadline is not None:
                left_s = max(0.0, deadline - time.monotonic())
            self._await(self.stdout.fileno(), left_s)
            if not (printed := self.stdout.read(1 << 16)):
                break
            self._printed += printed
        code_within_s = None if deadline is None else max(0.0, deadline - time.monotonic())
        self.wait(code_within_s)
        return None if self.stdout is None else self._printed.decode(), None

    def kill(self) -> None:
        if self.poll() is None:
            os.kill(self.pid, signal.SIGKILL)

    def _next_told(self, timeout: float | None) -> int:
        self._await(self._told, timeout)
        return int(os.read(self._told, NUMBER_BYTES))

    def _await(self, fd: int, timeout: float | None) -> None:
        if not select.select([fd], [], [], timeout)[0]:
            raise subprocess.TimeoutExpired("snakemake", timeout, self._printed.decode())


def _ask(
    args: list[str], cwd: Path, env: dict[str, str], output: str, ends: str | None = None
) -> subprocess.Popen[str]:
    """Have the process that forks begin a run; returns that process."""
    process = _process()
    given = {"args": args, "cwd": str(cwd), "env": env, "output": output, "ends": ends}
    process.stdin.write(json.dumps(given) + "\n")
    process.stdin.flush()
    return process


@cache
def _process() -> subprocess.Popen[str]:
    """The process that forks, in a session of its own: it ends with the tests."""
    process = subprocess.Popen(
        [sys.executable, __file__],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        # Nothing that a run finds by its own environment is already found.
        env={name: value for name, value in os.environ.items() if name != "PYTHONPATH"},
        start_new_session=True,
    )
    atexit.register(_end, process)
    return process


def _end(process: subprocess.Popen[str]) -> None:
    """Kill it, and a run that it has forked."""
    if process.poll() is None:
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()


def _become(args: list[str], cwd: str, env: dict[str, str], output: str, ends: str | None) -> None:
    """Make a fork what `python -m snakemake` starts as."""
    null = os.open(os.devnull, os.O_RDONLY)
    file = os.open(output, os.O_WRONLY | os.O_APPEND)
    told = _fork_again(ends) if ends else None
    for fd, source in enumerate((null, file, file)):
        os.dup2(source, fd)
    os.close(null)
    os.close(file)
    os.environ.clear()
    os.environ.update(env)
    if LOOK_VARIABLE in env:
        _look_every(float(env[LOOK_VARIABLE]))
    os.chdir(cwd)
    sys.path[0] = cwd
    sys.argv = ["snakemake", *args]
    if told is not None:
        _tell(told, os.getpid())
        os.close(told)


def _look_every(seconds: float) -> None:
    """Have Snakemake look at a cluster's jobs so often, once it follows them, whatever it wants."""
    from snakemake_interface_executor_plugins.executors.remote import RemoteExecutor

    RemoteExecutor.next_seconds_between_status_checks = property(
        lambda executor: seconds if hasattr(executor, "followed") else 1, lambda _, wanted: None
    )


def _fork_again(ends: str) -> int:
    """Go on as a fork in a session of its own; this process waits, and writes its exit code to `ends`."""
    told = os.open(ends, os.O_WRONLY)
    os.setpgrp()  # `_end` kills the run that is waited for, and none that is not
    if pid := os.fork():
        os.closerange(0, told)
        _tell(told, os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]))
        os._exit(0)
    os.setsid()
    signal.signal(signal.SIGINT, signal.default_int_handler)
    return told


def _tell(told: int, number: int) -> None:
    with contextlib.suppress(BrokenPipeError):  # the tests have ended
        os.write(told, str(number).encode().rjust(NUMBER_BYTES))


if __name__ == "__main__":
    for name in IMPORTED:
        __import__(name)
    gc.freeze()
    for line in sys.stdin:
        given = json.loads(line)
        pid = os.fork()
        if pid == 0:
            _become(**given)
            sys.exit(sys.modules["snakemake.cli"].main())
        if given["ends"] is None:
            print(os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]), flush=True)
