"""Locks on files, and folders that are removed once nobody holds them.

All are flocks: the kernel releases them when their holder has ended, however it ended.
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

from stratbench.cell.text.help_page import help_address

#: Errors of a file system without locks.
_NO_LOCKS = (errno.ENOLCK, errno.EOPNOTSUPP, errno.ENOSYS)
#: The file in a folder by which the folder is held: NFS locks no folders.
_HELD_BY = "lock"


class NoLocks(OSError):
    """The file system has no locks; the text names the folder and the remedy."""


def lock(descriptor: int, how: int, path: Path) -> None:
    """Lock an open file without waiting.

    Args:
        descriptor: The open file.
        how: `fcntl.LOCK_EX` or `fcntl.LOCK_SH`.
        path: The file's path, for a message.

    Raises:
        BlockingIOError: Another process holds the file.
        NoLocks: The file system has no locks.
    """
    try:
        fcntl.flock(descriptor, how | fcntl.LOCK_NB)
    except OSError as e:
        if e.errno not in _NO_LOCKS:
            raise
        raise NoLocks(
            f"{path.parent}: its file system has no locks ({e.strerror}), which keep a cell from being "
            "trained twice at a time; mount it with locks (Lustre: -o flock; NFS: version 4, or rpc.statd on "
            "client and server), or use a folder elsewhere (results in config.yaml; TMPDIR) "
            f"{help_address('its file system has no locks')}"
        ) from e


def try_lock(path: Path) -> int | None:
    """Return a descriptor that holds the file `path` locked until it is closed.

    Return None if another process holds it. The file is created if there is none. Links are never followed
    and content is never changed.

    Raises:
        OSError: NoLocks on a file system without locks.
    """
    while True:
        descriptor = open_lock(path)
        try:
            lock(descriptor, fcntl.LOCK_EX, path)
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
        os.close(descriptor)  # the file was deleted meanwhile: its successor is the one that counts


def open_lock(path: Path) -> int:
    """Return a descriptor of a file to be locked, creating the file if there is none.

    A process that can read a file can lock it, so only users who may write its folder may open it.

    Raises:
        OSError: If the file belongs to another user and is closed to us; the message has the remedy.
    """
    folder = path.parent.stat()
    mode = 0o600 | (folder.st_mode & 0o022) * 3  # users who may write may read
    try:
        descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC, mode)
    except PermissionError as e:
        raise PermissionError(
            e.errno,
            "is closed to you; to train in the same `results`, give them to a common group "
            "(chmod -R g+rwX, chgrp -R) and set umask 002, or choose other `results`",
            str(path),
        ) from e
    status = os.fstat(descriptor)
    if status.st_uid == os.geteuid() and stat.S_IMODE(status.st_mode) != mode:
        if mode & 0o060 and status.st_gid != folder.st_gid:
            try:
                os.fchown(descriptor, -1, folder.st_gid)
            except OSError:
                mode &= ~0o060  # it would be open to another group
        with contextlib.suppress(OSError):
            os.fchmod(descriptor, mode)
    return descriptor


@contextmanager
def held_folder(parent: Path, prefix: str, suffix: str = "") -> Iterator[Path]:
    """Yield a new folder in `parent`, removed at the end of the block.

    Also remove folders with these names that killed processes have left and that are not locked any more.

    Args:
        parent: Folder to create it in.
        prefix: Start of its name.
        suffix: End of its name.
    """
    for left in parent.glob(f"{glob.escape(prefix)}*{glob.escape(suffix)}"):
        with contextlib.suppress(OSError):  # another was quicker, or it is another user's
            remove_abandoned_folder(left, prefix, suffix)
    folder, descriptor = create_locked_folder(parent, prefix, suffix)
    try:
        yield folder
    finally:
        os.close(descriptor)  # NFS keeps the name of a file that is open
        shutil.rmtree(folder, ignore_errors=True)


def create_locked_folder(parent: Path, prefix: str, suffix: str) -> tuple[Path, int]:
    """Return a new folder, and the descriptor that holds it."""
    while True:
        folder = Path(tempfile.mkdtemp(suffix, prefix, parent))
        try:
            if (descriptor := try_lock(folder / _HELD_BY)) is not None:
                return folder, descriptor
        except FileNotFoundError:
            continue  # another process has taken it for one that was left
        except OSError:
            shutil.rmtree(folder, ignore_errors=True)
            raise


def remove_abandoned_folder(left: Path, prefix: str, suffix: str) -> None:
    descriptor = try_lock(left / _HELD_BY)
    if descriptor is None:
        return
    try:
        # Rename first: a process that looks for the folder then makes another.
        left = left.rename(left.with_name(f"{prefix}{secrets.token_hex(8)}{suffix}"))
    finally:
        os.close(descriptor)
    shutil.rmtree(left, ignore_errors=True)
