"""Locks files, and creates folders that are removed when no process holds them.

All locks are flocks, which the kernel releases when the process ends in any way.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import glob
import os
import secrets
import shutil
import stat
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from stratbench.cell.text.help_page import format_help_address

#: Errors of a file system without locks.
_NO_LOCKS = (errno.ENOLCK, errno.EOPNOTSUPP, errno.ENOSYS)
#: Name of the file that is locked in place of its folder, because NFS cannot lock a folder.
_LOCK_FILE_NAME = "lock"

#: Number by which the operating system knows an open file.
FileDescriptor = int


class NoLocks(OSError):
    """The file system has no locks; the message names the folder and the remedy."""


def lock_file(descriptor: FileDescriptor, lock_type: int, path: Path) -> None:
    """Lock an open file without waiting.

    Args:
        descriptor: The open file.
        lock_type: `fcntl.LOCK_EX` or `fcntl.LOCK_SH`.
        path: Path of the file, for the error message.

    Raises:
        BlockingIOError: Another process holds the file.
        NoLocks: The file system has no locks.
    """
    try:
        fcntl.flock(descriptor, lock_type | fcntl.LOCK_NB)
    except OSError as e:
        if e.errno not in _NO_LOCKS:
            raise
        raise NoLocks(
            f"{path.parent}: its file system has no locks ({e.strerror}), so that a cell could be trained "
            "twice at once; mount it with locks (Lustre: -o flock; NFS: version 4, or rpc.statd on client "
            "and server), or choose another folder (results in config.yaml, or TMPDIR) "
            f"{format_help_address('its file system has no locks')}"
        ) from e


def try_to_lock_file(path: Path) -> FileDescriptor | None:
    """Lock a file, and return its descriptor. The lock lasts until the descriptor is closed.

    The file is created if it does not exist. Links are never followed and content is never changed.

    Returns:
        The descriptor, or None if another process holds the lock.

    Raises:
        OSError: The file cannot be opened; NoLocks if its file system has no locks.
    """
    while True:
        descriptor = open_lock_file(path)
        try:
            lock_file(descriptor, fcntl.LOCK_EX, path)
            if os.path.samestat(os.fstat(descriptor), path.lstat()):
                return descriptor
        except BlockingIOError:
            os.close(descriptor)
            return None
        except FileNotFoundError:
            pass
        except BaseException:
            os.close(descriptor)
            raise
        # The locked file was deleted meanwhile. The next pass locks the new file.
        os.close(descriptor)


def open_lock_file(path: Path) -> FileDescriptor:
    """Open or create a file to be locked, and return its descriptor.

    Every process that can read a file can lock it, so only users who may write to its folder may open it.

    Raises:
        OSError: The file belongs to another user and cannot be opened; the message has the remedy.
    """
    folder = path.parent.stat()
    # Whoever may write to the folder (bits 0o022) may read and write the lock file (0o066).
    mode = 0o600 | (folder.st_mode & 0o022) * 3
    try:
        descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC, mode)
    except PermissionError as e:
        raise PermissionError(
            e.errno,
            "cannot be opened by you; to train in the same `results`, give the folder to a common group "
            "(chmod -R g+rwX, chgrp -R) and set umask 002, or choose another folder as `results`",
            str(path),
        ) from e
    status = os.fstat(descriptor)
    if status.st_uid == os.geteuid() and stat.S_IMODE(status.st_mode) != mode:
        if mode & 0o060 and status.st_gid != folder.st_gid:
            try:
                os.fchown(descriptor, -1, folder.st_gid)
            except OSError:
                mode &= ~0o060  # the file still has another group, whose members must not open it
        with contextlib.suppress(OSError):
            os.fchmod(descriptor, mode)
    return descriptor


@contextmanager
def create_temporary_locked_folder(parent: Path, prefix: str, suffix: str = "") -> Iterator[Path]:
    """Yield a new locked folder, which is removed at the end of the block.

    Also remove unlocked folders with such names, which killed processes have left.

    Args:
        parent: Folder in which the new folder is created.
        prefix: Start of the new folder's name.
        suffix: End of the new folder's name.
    """
    for abandoned in parent.glob(f"{glob.escape(prefix)}*{glob.escape(suffix)}"):
        # Another process may have removed the folder, or the folder may belong to another user.
        with contextlib.suppress(OSError):
            remove_abandoned_folder(abandoned, prefix, suffix)
    folder, descriptor = create_locked_folder(parent, prefix, suffix)
    try:
        yield folder
    finally:
        os.close(descriptor)  # NFS cannot delete a file that is open
        shutil.rmtree(folder, ignore_errors=True)


def create_locked_folder(parent: Path, prefix: str, suffix: str) -> tuple[Path, FileDescriptor]:
    """Create a folder, lock it, and return its path and the lock's descriptor."""
    while True:
        folder = Path(tempfile.mkdtemp(suffix, prefix, parent))
        try:
            if (descriptor := try_to_lock_file(folder / _LOCK_FILE_NAME)) is not None:
                return folder, descriptor
        except FileNotFoundError:
            continue  # another process took the new folder for an abandoned one and removed it
        except OSError:
            shutil.rmtree(folder, ignore_errors=True)
            raise


def remove_abandoned_folder(folder: Path, prefix: str, suffix: str) -> None:
    """Remove a folder that a killed process has left, unless it is locked."""
    descriptor = try_to_lock_file(folder / _LOCK_FILE_NAME)
    if descriptor is None:
        return
    try:
        # After the renaming no other process can use the folder during its removal.
        folder = folder.rename(folder.with_name(f"{prefix}{secrets.token_hex(8)}{suffix}"))
    finally:
        os.close(descriptor)
    shutil.rmtree(folder, ignore_errors=True)
