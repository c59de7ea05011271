"""The supervisor: one process per node that starts a cell's command and ends all its processes.

python -m stratbench.extensions.commands.supervisor --logs DIR ... -- PROGRAM ARGUMENT...

Processes of the command stay below this one, even in a session of their own. They are killed when the command
has ended, and when this process's input ends. So its agent stops it, and it ends with a killed agent. Finally
it writes how the command ended, and the kernel's counts of all its processes.
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

from stratbench.cell.files import write_atomic
from stratbench.train.locks import hold_as_worker

#: Of prctl(2): who is orphaned below this process becomes its child; a child dies with its parent.
_SET_CHILD_SUBREAPER, _SET_PDEATHSIG = 36, 1
_POLL_S = 0.02


def main() -> None:
    """Run the command to its end, or until the agent ends it."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--logs", type=Path, required=True, help="the cell's log folder")
    parser.add_argument("--log", type=Path, required=True, help="where the command's output goes")
    parser.add_argument("--end", type=Path, required=True, help="where to write how it ended")
    parser.add_argument("--origin-s", type=float, required=True, help="that the cell counts from")
    parser.add_argument("program", nargs="+", help="the command, with its arguments")
    args = parser.parse_args()
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)  # its agent says when to stop
    hold_as_worker(args.logs)
    prctl(_SET_CHILD_SUBREAPER, 1)
    begun_s = time.monotonic()
    with args.log.open("ab") as log:
        try:
            child = subprocess.Popen(
                args.program, stdin=subprocess.DEVNULL, stdout=log, stderr=log, preexec_fn=_begin
            )
        except OSError as e:
            log.write(f"{args.program[0]}: {e.strerror}\n".encode())
            os._exit(127)
    threading.Thread(target=end_when_left, daemon=True).start()
    code = child.wait()
    ended_s = time.monotonic()
    end_descendants()
    write_atomic(
        args.end, json.dumps({"origin_s": args.origin_s} | figures(code, begun_s, ended_s))
    )
    sys.stdout.flush()
    os._exit(0)


def figures(code: int, begun_s: float, ended_s: float) -> dict[str, Any]:
    """Return how the command ended, and what it used.

    Times are in seconds and memory is in bytes. `max_rss_bytes` is the high-water mark of the largest
    process. All processes have ended and were waited for, so that the kernel's counts include all of them
    (getrusage(2), RUSAGE_CHILDREN).

    Args:
        code: Exit code.
        begun_s: Start on this node's monotonic clock.
        ended_s: End on it.
    """
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    kib = 1 if sys.platform == "darwin" else 1024
    return {
        "exit_code": code,
        "begun_s": begun_s,
        "ended_s": ended_s,
        "cpu_time_s": used.ru_utime + used.ru_stime,
        "max_rss_bytes": used.ru_maxrss * kib,
    }


def end_when_left() -> None:
    """Wait for the end of the input, then end all, and this process."""
    while sys.stdin.buffer.read(1):
        pass
    end_descendants()
    os._exit(1)


def end_descendants() -> None:
    """Kill all that is below this process, until nothing is left."""
    me = psutil.Process()
    while below := me.children(recursive=True):
        for process in below:
            try:
                process.kill()
            except psutil.NoSuchProcess:
                continue
        reap()
        time.sleep(_POLL_S)


def reap() -> None:
    """Take note of the children that have ended."""
    try:
        while os.waitpid(-1, os.WNOHANG)[0]:
            pass
    except ChildProcessError:
        return


def prctl(option: int, value: int) -> None:
    """Set an attribute of this process; nothing where the system knows no such call."""
    if sys.platform == "linux":
        ctypes.CDLL(None, use_errno=True).prctl(option, value, 0, 0, 0)


def _begin() -> None:
    """Prepare the child, before it becomes the command: end it with its parent, and unblock signals."""
    os.setsid()
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.SIG_DFL)
    prctl(_SET_PDEATHSIG, signal.SIGKILL)


if __name__ == "__main__":
    main()
