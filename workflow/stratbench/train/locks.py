"""Locks that keep cells apart, and this user's own folder on this node.

All are flocks: the kernel releases them when their holder has ended, however it ended.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import os
import shutil
import socket
import stat
import tempfile
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

POLL_S = 0.5
FILE, FOLDER = os.O_RDWR | os.O_CREAT, os.O_RDONLY | os.O_DIRECTORY
#: How many names are tried for the folder of a user: strangers may have taken some.
_NAMES = 100
#: What a file system without locks answers.
_NO_LOCKS = (errno.ENOLCK, errno.EOPNOTSUPP, errno.ENOSYS)
#: Bytes of the longest path that a local socket may have on every system.
_LONGEST_SOCKET_PATH = 103


def try_lock(path: Path, kind: int = FILE) -> int | None:
    """A descriptor that holds `path` locked until it is closed; None where another process holds it.

    `kind` is FILE, which is made if there is none, or FOLDER. Never follows a link and never changes
    content. Raises OSError.
    """
    descriptor = _open(path, kind)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        os.close(descriptor)
        return None
    except BaseException:
        os.close(descriptor)
        raise
    return descriptor


def _open(path: Path, kind: int = FILE) -> int:
    return os.open(path, kind | os.O_NOFOLLOW | os.O_CLOEXEC, 0o666)


# ---------------------------------------------------------------- this node


def own_folder(parent: str | Path | None = None) -> Path:
    """A folder below `parent` (default: the temporary folder) that no other user can read or write.

    It is the same one for all of the user's processes. Names that others have taken are skipped.
    """
    stem = Path(parent or tempfile.gettempdir()) / f"stratbench-{os.geteuid()}"
    paths = [stem, *(stem.with_name(f"{stem.name}-{n}") for n in range(1, _NAMES))]
    # One that is there already comes first: a stranger who gives up a name must not part our cells.
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
        found = path.lstat()
    except OSError:
        return False
    private = stat.S_IMODE(found.st_mode) & 0o077 == 0
    return stat.S_ISDIR(found.st_mode) and found.st_uid == os.geteuid() and private


@contextmanager
def scratch() -> Iterator[Path]:
    """A folder for sockets and other short-lived files of this process, short enough for their names.

    Also removes the folders that killed processes have left.
    """
    base = own_folder()
    if len(os.fsencode(base)) + len("/run-12345678/12345678-999") > _LONGEST_SOCKET_PATH:
        base = own_folder("/tmp")
    with ExitStack() as held:
        with _locked(base):
            for left in base.glob("run-*"):
                with contextlib.suppress(FileNotFoundError):  # its owner was quicker
                    if (descriptor := try_lock(left, FOLDER)) is not None:
                        shutil.rmtree(left, ignore_errors=True)
                        os.close(descriptor)
            folder = Path(tempfile.mkdtemp(prefix="run-", dir=base))
            held.callback(os.close, try_lock(folder, FOLDER))
            held.callback(shutil.rmtree, folder, ignore_errors=True)
        yield folder


@contextmanager
def _locked(path: Path) -> Iterator[None]:
    """Hold the folder `path` locked in the block, as soon as nobody else does."""
    descriptor = _open(path, FOLDER)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX)
        yield
    finally:
        os.close(descriptor)


# ---------------------------------------------------------------- a cell


@contextmanager
def hold_cell(logs: Path) -> Iterator[bool]:
    """Hold the cell with this log folder; yields whether another launcher was waited for.

    Waits for the launcher that trains it, on whichever node, and for the workers of one that was
    killed. On a file system without locks it says so and waits for nothing.
    """
    logs.mkdir(parents=True, exist_ok=True)
    with ExitStack() as held:
        try:
            descriptor, waited = _wait_for(
                logs / "launcher.lock", "another launcher trains this cell"
            )
            held.callback(os.close, descriptor)
            with contextlib.suppress(
                OSError
            ):  # for those who wait; on a full disk they wait unknowing
                os.ftruncate(descriptor, 0)
                os.write(descriptor, f"process {os.getpid()} on {socket.gethostname()}".encode())
            workers, _ = _wait_for(logs / "workers.lock", "workers of a killed launcher still end")
            os.close(workers)
        except OSError as e:
            if e.errno not in _NO_LOCKS:
                raise
            print(f"{logs} has no locks ({e.strerror}): never train this cell twice at a time")
            waited = False
        yield waited


def _wait_for(path: Path, why: str) -> tuple[int, bool]:
    """A descriptor that holds `path` locked, and whether it had to be waited for.

    Where the file was deleted meanwhile, its successor is the one that counts.
    """
    waited = False
    while True:
        descriptor = try_lock(path)
        if descriptor is not None:
            with contextlib.suppress(FileNotFoundError):
                if os.path.samestat(os.fstat(descriptor), path.stat()):
                    return descriptor, waited
            os.close(descriptor)
            continue
        if not waited:
            who = path.read_text(encoding="utf-8", errors="replace")
            print(f"waiting: {why}{f' ({who})' if who else ''}; {path} is locked", flush=True)
            waited = True
        time.sleep(POLL_S)


def hold_as_worker(logs: Path) -> None:
    """Have the next launcher of the cell wait for the end of this process.

    Raises BlockingIOError if one has begun already: the launcher of this process was killed.
    """
    try:
        fcntl.flock(_open(logs / "workers.lock"), fcntl.LOCK_SH | fcntl.LOCK_NB)  # until the end
    except OSError as e:
        if e.errno not in _NO_LOCKS:
            raise
