"""Locks that keep cells apart, and this user's own folder on this node."""

from __future__ import annotations

import contextlib
import fcntl
import os
import socket
import stat
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from stratbench.cell.locks import held_folder, lock, open_lock, try_lock

POLL_S = 0.5
#: How many names are tried for the folder of a user: other users may have taken some.
_NAMES = 100
#: Bytes of the longest path that a local socket may have on every system.
_MAX_SOCKET_PATH = 103


# ---------------------------------------------------------------- this node


def own_folder(parent: str | Path | None = None) -> Path:
    """Return a folder below `parent` that no other user can read or write.

    The default parent is the temporary folder. It is the same one for all of the user's processes. Names that
    other users have taken are skipped.
    """
    stem = Path(parent or tempfile.gettempdir()) / f"stratbench-{os.geteuid()}"
    paths = [stem, *(stem.with_name(f"{stem.name}-{n}") for n in range(1, _NAMES))]
    # One that is there already comes first: another user who gives up a name must not part our cells.
    for path in paths:
        if _is_own(path):
            return path
    for path in paths:
        with contextlib.suppress(FileExistsError):
            path.mkdir(mode=0o700)
        if _is_own(path):
            return path
    raise PermissionError(
        f"another user has taken {stem} and all {_NAMES - 1} names after it; set TMPDIR to a folder "
        "that only you can write"
    )


def _is_own(path: Path) -> bool:
    try:
        status = path.lstat()
    except OSError:
        return False
    private = stat.S_IMODE(status.st_mode) & 0o077 == 0
    return stat.S_ISDIR(status.st_mode) and status.st_uid == os.geteuid() and private


@contextmanager
def scratch() -> Iterator[Path]:
    """Yield a folder for sockets and other short-lived files of this process.

    Its path is short enough for the names of sockets. Also remove the folders that killed processes have
    left.
    """
    base = own_folder()
    if len(os.fsencode(base)) + len("/job-12345678/12345678-999") > _MAX_SOCKET_PATH:
        base = own_folder("/tmp")
    with held_folder(base, "job-") as folder:
        yield folder


# ---------------------------------------------------------------- a cell


class Held(RuntimeError):
    """Another launcher holds the cell; the text names it."""


@contextmanager
def hold_cell(logs: Path, wait: bool = True) -> Iterator[bool]:
    """Hold the cell with this log folder; yields whether another launcher was waited for.

    Without `wait`, raises Held where there is one. Else it waits for the launcher that trains it, on
    whichever node, and for the workers of one that was killed. Raises NoLocks on a file system without locks.
    """
    logs.mkdir(parents=True, exist_ok=True)
    reason = "another launcher trains this cell"
    descriptor, waited = _wait_for(logs / "launcher.lock", reason, wait)
    try:
        # For launchers that wait; on a full disk they wait unknowing.
        with contextlib.suppress(OSError):
            os.ftruncate(descriptor, 0)
            os.write(descriptor, _own_name().encode())
        workers, _ = _wait_for(logs / "workers.lock", "workers of a killed launcher still end")
        os.close(workers)
        yield waited
    finally:
        os.close(descriptor)


def _own_name() -> str:
    """Return a text on this process for launchers that wait for it."""
    job = os.environ.get("SLURM_JOB_ID")
    return f"process {os.getpid()} on {socket.gethostname()}{f', SLURM job {job}' if job else ''}"


def _wait_for(path: Path, reason: str, wait: bool = True) -> tuple[int, bool]:
    """A descriptor that holds `path` locked, and whether it had to be waited for.

    Held without `wait`.
    """
    waited = False
    while (descriptor := try_lock(path)) is None:
        if not waited:
            holder = path.read_text(encoding="utf-8", errors="replace")
            if not wait:
                raise Held(f"{reason}: {holder or 'it does not say which'}; {path} is locked")
            print(
                f"waiting: {reason}{f' ({holder})' if holder else ''}; {path} is locked", flush=True
            )
            waited = True
        time.sleep(POLL_S)
    return descriptor, waited


def hold_as_worker(logs: Path) -> None:
    """Have the next launcher of the cell wait for the end of this process.

    Raises BlockingIOError if one has begun already: the launcher of this process was killed.
    """
    path = logs / "workers.lock"
    lock(open_lock(path), fcntl.LOCK_SH, path)  # until the end
