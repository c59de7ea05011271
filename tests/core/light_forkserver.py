"""A fork server without PyTorch, for tests: what its processes do is told by their arguments.

python light_forkserver.py FD [cannot-fork]
"""

from __future__ import annotations

import errno
import json
import os
import signal
import socket
import sys
import time
from pathlib import Path

from stratbench.train import forkserver


def leave(code: int) -> None:
    os._exit(code)


def kill_itself(signum: int) -> None:
    os.kill(os.getpid(), signum)
    time.sleep(600)


def show(path: str) -> None:
    """What a process finds, as JSON."""
    found = {
        "env": dict(os.environ),
        "cwd": os.getcwd(),
        "sigint": signal.getsignal(signal.SIGINT) == signal.SIG_IGN,
        "sockets": [
            fd
            for fd in os.listdir("/proc/self/fd")
            if os.path.exists(link := f"/proc/self/fd/{fd}") and "socket" in os.readlink(link)
        ],
    }
    Path(path).write_text(json.dumps(found))


def refuse() -> int:
    raise BlockingIOError(errno.EAGAIN, os.strerror(errno.EAGAIN))


ENTRIES = {"leave": leave, "kill": kill_itself, "sleep": time.sleep, "show": show}

if __name__ == "__main__":
    forkserver.import_entry_functions = lambda: ENTRIES
    if "cannot-fork" in sys.argv:
        os.fork = refuse
    forkserver._Server(socket.socket(fileno=int(sys.argv[1]))).handle_events()
