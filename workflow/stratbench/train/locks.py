"""Locks that prevent two launchers from training one cell, and the user's own folder on this node."""

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

from stratbench.cell.locks import (
    create_temporary_locked_folder,
    lock_file,
    open_lock_file,
    try_lock,
)

POLL_S = 0.5
#: Number of names that are tried for the user's folder. Other users may have created some of them.
_NAMES = 100
#: Maximum length of a local socket's path, in bytes, that every system supports.
_MAX_SOCKET_PATH = 103


# ---------------------------------------------------------------- this node


def create_private_folder(parent: str | Path | None = None) -> Path:
    """Return a folder below `parent` that no other user can read or write.

    The folder is created if it is missing. All processes of the user get the same folder. Names that other
    users have created are skipped.

    Args:
        parent: Folder that contains the new folder, or None for the folder for temporary files.
    """
    stem = Path(parent or tempfile.gettempdir()) / f"stratbench-{os.geteuid()}"
    paths = [stem, *(stem.with_name(f"{stem.name}-{n}") for n in range(1, _NAMES))]
    # A folder that exists already comes first. Otherwise our cells would use different folders once another
    # user gives up a name.
    for path in paths:
        if _is_private_folder(path):
            return path
    for path in paths:
        with contextlib.suppress(FileExistsError):
            path.mkdir(mode=0o700)
        if _is_private_folder(path):
            return path
    raise PermissionError(
        f"another user has taken {stem} and all {_NAMES - 1} names after it; set TMPDIR to a folder "
        "that only you can write"
    )


def _is_private_folder(path: Path) -> bool:
    try:
        status = path.lstat()
    except OSError:
        return False
    private = stat.S_IMODE(status.st_mode) & 0o077 == 0
    return stat.S_ISDIR(status.st_mode) and status.st_uid == os.geteuid() and private


@contextmanager
def create_scratch_folder() -> Iterator[Path]:
    """Yield a folder for sockets and other temporary files of this process.

    Its path is short enough for sockets. The function also removes folders that killed processes have left.
    """
    base = create_private_folder()
    if len(os.fsencode(base)) + len("/job-12345678/12345678-999") > _MAX_SOCKET_PATH:
        base = create_private_folder("/tmp")
    with create_temporary_locked_folder(base, "job-") as folder:
        yield folder


# ---------------------------------------------------------------- a cell


class Held(RuntimeError):
    """Another launcher has locked the cell; the message names that launcher."""


@contextmanager
def lock_cell(logs: Path, wait: bool = True) -> Iterator[bool]:
    """Lock a cell by its log folder. Yield whether another launcher held the lock before.

    The function waits for a launcher that trains the cell on any node, and for the workers of a killed one.

    Args:
        logs: Log folder of the cell.
        wait: Whether to wait for another launcher.

    Raises:
        Held: If another launcher has locked the cell and `wait` is False.
        NoLocks: If the file system has no locks.
    """
    logs.mkdir(parents=True, exist_ok=True)
    reason = "another launcher trains this cell"
    descriptor, waited = _wait_for_lock(logs / "launcher.lock", reason, wait)
    try:
        # Launchers that wait print this name. On a full disk they wait without it.
        with contextlib.suppress(OSError):
            os.ftruncate(descriptor, 0)
            os.write(descriptor, _format_own_name().encode())
        workers, _ = _wait_for_lock(logs / "workers.lock", "workers of a killed launcher still end")
        os.close(workers)
        yield waited
    finally:
        os.close(descriptor)


def _format_own_name() -> str:
    """Return the name of this process for the messages of launchers that wait for it."""
    job = os.environ.get("SLURM_JOB_ID")
    return f"process {os.getpid()} on {socket.gethostname()}{f', SLURM job {job}' if job else ''}"


def _wait_for_lock(path: Path, reason: str, wait: bool = True) -> tuple[int, bool]:
    """Lock a file, after waiting for the process that holds the lock at present.

    Args:
        path: File to lock.
        reason: Why the file may be locked, for messages.
        wait: Whether to wait. If not, Held is raised.

    Returns:
        The descriptor of the locked file, and whether the function has waited.
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


def lock_cell_as_worker(logs: Path) -> None:
    """Make the next launcher of the cell wait until this process has ended.

    Raises:
        BlockingIOError: If the next launcher has started already, because this process's launcher was killed.
    """
    path = logs / "workers.lock"
    lock_file(open_lock_file(path), fcntl.LOCK_SH, path)  # the lock ends with the process
