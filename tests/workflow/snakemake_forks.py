"""Snakemake for tests, imported once: each run is a fork, with an environment and a folder of its own.

As a program: it reads a run as a line of JSON, and answers with the exit code.
"""

from __future__ import annotations

import atexit
import json
import os
import select
import signal
import subprocess
import sys
import tempfile
from functools import cache
from pathlib import Path

#: What each run would import: Snakemake by itself, or for what this workflow has.
IMPORTED = ("snakemake.cli", "snakemake.report.html_reporter", "pandas", "jsonschema", "smart_open")


def run_snakemake(
    args: list[str], cwd: Path, env: dict[str, str], timeout_s: float
) -> tuple[int, str]:
    """Run `python -m snakemake` with `args` to its end; exit code, and output and errors together."""
    process = _process()
    with tempfile.TemporaryDirectory() as folder:
        printed = Path(folder, "printed")
        printed.touch()
        given = {"args": args, "cwd": str(cwd), "env": env, "output": str(printed)}
        process.stdin.write(json.dumps(given) + "\n")
        process.stdin.flush()
        if not select.select([process.stdout], [], [], timeout_s)[0]:
            _end(process)
            _process.cache_clear()
            raise TimeoutError(f"snakemake takes over {timeout_s} s:\n{printed.read_text()}")
        return int(process.stdout.readline()), printed.read_text()


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


def _become(args: list[str], cwd: str, env: dict[str, str], output: str) -> None:
    """Make a fork what `python -m snakemake` starts as."""
    null = os.open(os.devnull, os.O_RDONLY)
    file = os.open(output, os.O_WRONLY | os.O_APPEND)
    for fd, source in enumerate((null, file, file)):
        os.dup2(source, fd)
    os.close(null)
    os.close(file)
    os.environ.clear()
    os.environ.update(env)
    os.chdir(cwd)
    sys.path[0] = cwd
    sys.argv = ["snakemake", *args]


if __name__ == "__main__":
    for name in IMPORTED:
        __import__(name)
    for line in sys.stdin:
        pid = os.fork()
        if pid == 0:
            _become(**json.loads(line))
            sys.exit(sys.modules["snakemake.cli"].main())
        print(os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]), flush=True)
