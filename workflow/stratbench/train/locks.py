"""Locks cells against a second launcher, and creates folders that only the user reads."""

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
    FileDescriptor,
    create_temporary_locked_folder,
    lock_file,
    open_lock_file,
    try_to_lock_file,
)

POLL_S = 0.5
#: Number of names that are tried for the user's private folder. Other users may have created folders with
#: some of these names.
_NAMES = 100
#: Largest length in bytes of a local socket's path that every system supports.
_MAX_SOCKET_PATH = 103


def create_private_folder(parent: str | Path | None = None) -> Path:
    """Return a folder below `parent` that no other user can read or write.

    The folder is created if it is missing. All processes of the user get the same folder. Names that other
    users have created are skipped.

    Args:
        parent: Folder that contains the new folder, or None for the folder for temporary files.
    """
    first_path = Path(parent or tempfile.gettempdir()) / f"stratbench-{os.geteuid()}"
    paths = [
        first_path,
        *(first_path.with_name(f"{first_path.name}-{n}") for n in range(1, _NAMES)),
    ]
    # A private folder that exists already is used first. Otherwise this user's cells would use different
    # folders once another user deletes one with an earlier name.
    for path in paths:
        if _is_private_folder(path):
            return path
    for path in paths:
        with contextlib.suppress(FileExistsError):
            path.mkdir(mode=0o700)
        if _is_private_folder(path):
            return path
    raise PermissionError(
        f"another user has created {first_path} and all {_NAMES - 1} folders with the next names; set TMPDIR "
        "to a folder that only you can write"
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


class LockHeld(RuntimeError):
    """Raised if another launcher has locked the cell. The message names that launcher."""


@contextmanager
def lock_cell(logs: Path, wait: bool = True) -> Iterator[bool]:
    """Lock a cell in this context. Yield whether the lock had to wait for another launcher.

    The context waits for a launcher that trains the cell on any node, and for the workers of a killed
    launcher.

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
        # Other launchers print this name while they wait. Without space on the disk, they wait without a
        # name.
        with contextlib.suppress(OSError):
            os.ftruncate(descriptor, 0)
            os.write(descriptor, _format_lock_holder().encode())
        workers, _ = _wait_for_lock(logs / "workers.lock", "workers of a killed launcher still end")
        os.close(workers)
        yield waited
    finally:
        os.close(descriptor)


def _format_lock_holder() -> str:
    """Return text that names this process, for messages of launchers that wait for its lock."""
    job = os.environ.get("SLURM_JOB_ID")
    return f"process {os.getpid()} on {socket.gethostname()}{f', SLURM job {job}' if job else ''}"


def _wait_for_lock(path: Path, reason: str, wait: bool = True) -> tuple[FileDescriptor, bool]:
    """Lock a file, after waiting for the process that holds the lock now.

    Return the file's descriptor, and whether this process had to wait.

    Args:
        path: File to lock.
        reason: Why the file may be locked, for messages.
        wait: Whether to wait. If not, LockHeld is raised.
    """
    waited = False
    while (descriptor := try_to_lock_file(path)) is None:
        if not waited:
            holder = path.read_text(encoding="utf-8", errors="replace")
            if not wait:
                holder_name = holder or "its name is unknown"
                raise LockHeld(f"{reason}: {holder_name}; {path} is locked")
            print(
                f"waiting: {reason}{f' ({holder})' if holder else ''}; {path} is locked", flush=True
            )
            waited = True
        time.sleep(POLL_S)
    return descriptor, waited


def lock_cell_as_worker(logs: Path) -> None:
    """Lock the cell as one of its workers. The next launcher waits until this process has ended.

    Raises:
        BlockingIOError: If the next launcher has started already, because this process's launcher was killed.
    """
    path = logs / "workers.lock"
    # Nothing releases the lock, which ends with the process.
    lock_file(open_lock_file(path), fcntl.LOCK_SH, path)
