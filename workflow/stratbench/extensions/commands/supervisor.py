"""Process that starts a cell's command on one node, and ends all processes of the command.

python -m stratbench.extensions.commands.supervisor --logs DIR ... -- PROGRAM ARGUMENT...

All processes of the command remain descendants of this one, even in a session of their own. They are killed
when the command has ended. They are also killed when the node's agent closes the standard input of this
process or is killed. Finally the supervisor writes how the command ended, and the kernel's counts of all its
processes.
"""

from __future__ import annotations

import argparse
import ctypes
import json
import os
import resource
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Any

import psutil

from stratbench.cell.files import write_text_atomically
from stratbench.train.locks import lock_cell_as_worker

#: Options of prctl(2). The first makes orphaned descendants children of this process. The second kills a
#: child when its parent ends.
_SET_CHILD_SUBREAPER, _SET_PDEATHSIG = 36, 1
_POLL_S = 0.02


def main() -> None:
    """Run the command until it ends, or until the node's agent ends it."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--logs", type=Path, required=True, help="log folder of the cell")
    parser.add_argument("--log", type=Path, required=True, help="file for the command's output")
    parser.add_argument(
        "--end", type=Path, required=True, help="file in which to write how the command ended"
    )
    parser.add_argument(
        "--origin-s",
        type=float,
        required=True,
        help="time on the monotonic clock at which the times of the cell are 0",
    )
    parser.add_argument("program", nargs="+", help="program and arguments of the command")
    args = parser.parse_args()
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        # Only the node's agent may stop this process, by closing its standard input.
        signal.signal(number, signal.SIG_IGN)
    lock_cell_as_worker(args.logs)
    call_prctl(_SET_CHILD_SUBREAPER, 1)
    begun_s = time.monotonic()
    with args.log.open("ab") as log:
        try:
            child = subprocess.Popen(
                args.program,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                preexec_fn=_prepare_child_process,
            )
        except OSError as e:
            log.write(f"{args.program[0]}: {e.strerror}\n".encode())
            os._exit(127)
    threading.Thread(target=exit_when_stdin_closes, daemon=True).start()
    exit_code = child.wait()
    ended_s = time.monotonic()
    kill_descendants()
    write_text_atomically(
        args.end,
        json.dumps(
            {"origin_s": args.origin_s} | make_exit_status_entry(exit_code, begun_s, ended_s)
        ),
    )
    sys.stdout.flush()
    os._exit(0)


def make_exit_status_entry(exit_code: int, begun_s: float, ended_s: float) -> dict[str, Any]:
    """Return how the command ended, and the CPU time and memory that it used.

    Times are in seconds and memory is in bytes. `max_rss_bytes` is the high-water mark of the largest
    process. All processes have ended and were waited for, so that the kernel's counts include all of them
    (getrusage(2), RUSAGE_CHILDREN).

    Args:
        exit_code: Exit code of the command.
        begun_s: Start of the command on this node's monotonic clock.
        ended_s: End of the command on that clock.
    """
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    kib = 1 if sys.platform == "darwin" else 1024
    return {
        "exit_code": exit_code,
        "begun_s": begun_s,
        "ended_s": ended_s,
        "cpu_time_s": used.ru_utime + used.ru_stime,
        "max_rss_bytes": used.ru_maxrss * kib,
    }


def exit_when_stdin_closes() -> None:
    """Wait for the end of standard input, then kill all descendants and end this process."""
    while sys.stdin.buffer.read(1):
        pass
    kill_descendants()
    os._exit(1)


def kill_descendants() -> None:
    """Kill all descendants of this process, until none is left."""
    me = psutil.Process()
    while below := me.children(recursive=True):
        for process in below:
            try:
                process.kill()
            except psutil.NoSuchProcess:
                continue
        reap_ended_children()
        time.sleep(_POLL_S)


def reap_ended_children() -> None:
    """Wait for children that have ended, so that they do not remain as zombies."""
    try:
        while os.waitpid(-1, os.WNOHANG)[0]:
            pass
    except ChildProcessError:
        return


def call_prctl(option: int, value: int) -> None:
    """Set an attribute of this process by prctl(2), which only Linux has."""
    if sys.platform == "linux":
        ctypes.CDLL(None, use_errno=True).prctl(option, value, 0, 0, 0)


def _prepare_child_process() -> None:
    """Prepare the child process before it executes the command.

    The child ends with its parent, and handles signals.
    """
    os.setsid()
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.SIG_DFL)
    call_prctl(_SET_PDEATHSIG, signal.SIGKILL)


if __name__ == "__main__":
    main()
