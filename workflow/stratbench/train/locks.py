"""Locks that keep cells apart, and this user's own folder on this node."""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import socket
import stat
import tempfile
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import asdict, dataclass
from hashlib import sha256
from pathlib import Path

import psutil

from stratbench.cell.files import write_atomic
from stratbench.cell.locks import NO_LOCKS, held_folder, open_lock, try_lock
from stratbench.study.slurm.commands import may_run

POLL_S = 0.5
#: The same where SLURM may have to be asked, and the age from which an empty claim is nobody's.
CLAIM_POLL_S, HALF_WRITTEN_S = 5.0, 60.0
#: How many names are tried for the folder of a user: strangers may have taken some.
_NAMES = 100
#: Bytes of the longest path that a local socket may have on every system.
_LONGEST_SOCKET_PATH = 103


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
        status = path.lstat()
    except OSError:
        return False
    private = stat.S_IMODE(status.st_mode) & 0o077 == 0
    return stat.S_ISDIR(status.st_mode) and status.st_uid == os.geteuid() and private


@contextmanager
def scratch() -> Iterator[Path]:
    """A folder for sockets and other short-lived files of this process, short enough for their names.

    Also removes the folders that killed processes have left.
    """
    base = own_folder()
    if len(os.fsencode(base)) + len("/job-12345678/12345678-999") > _LONGEST_SOCKET_PATH:
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
    whichever node, and for the workers of one that was killed. On a file system without locks a file says
    who holds the cell, and workers are not waited for.
    """
    logs.mkdir(parents=True, exist_ok=True)
    with ExitStack() as held:
        try:
            descriptor, waited = _wait_for(
                logs / "launcher.lock", "another launcher trains this cell", wait
            )
            held.callback(os.close, descriptor)
            with contextlib.suppress(
                OSError
            ):  # for those who wait; on a full disk they wait unknowing
                os.ftruncate(descriptor, 0)
                os.write(descriptor, Claim.own().who.encode())
            workers, _ = _wait_for(logs / "workers.lock", "workers of a killed launcher still end")
            os.close(workers)
        except OSError as e:
            if e.errno not in NO_LOCKS:
                raise
            path = logs / "launcher.claim"
            print(f"{logs} has no locks ({e.strerror}): {path.name} says who trains the cell")
            text = json.dumps(asdict(Claim.own()))
            waited = _claim(path, text, wait)
            held.callback(_withdraw, path, text)
        yield waited


@dataclass(frozen=True)
class Claim:
    """Who holds a cell where there are no locks."""

    host: str
    pid: int
    #: When the process began, see `_began_s`: numbers of processes come again.
    began_s: float
    job: str | None

    @classmethod
    def own(cls) -> Claim:
        """This process's."""
        me = psutil.Process()
        return cls(socket.gethostname(), me.pid, _began_s(me), os.environ.get("SLURM_JOB_ID"))

    @classmethod
    def parse(cls, text: str) -> Claim | None:
        """The claim that a file has; None where its writing was cut off."""
        try:
            return cls(**json.loads(text))
        except (ValueError, TypeError):
            return None

    @property
    def who(self) -> str:
        """The process, in words."""
        of_job = f", SLURM job {self.job}" if self.job else ""
        return f"process {self.pid} on {self.host}{of_job}"

    @property
    def is_void(self) -> bool:
        """Whether its process has surely ended: as this host says, or SLURM of its job."""
        if self.host == socket.gethostname():
            try:
                process = psutil.Process(self.pid)
                # The start of the system is read in whole seconds, which may be another one each time.
                is_same = abs(_began_s(process) - self.began_s) < 2
                return not is_same or process.status() == psutil.STATUS_ZOMBIE
            except psutil.NoSuchProcess:
                return True
        if self.job is None:
            return False
        # A job that was queued again, as this one then, has left its earlier node.
        return self.job == os.environ.get("SLURM_JOB_ID") or not may_run(self.job)


def _began_s(process: psutil.Process) -> float:
    """Seconds from the start of the system to that of a process. Whoever sets the clock leaves them."""
    return process.create_time() - psutil.boot_time()


def _claim(path: Path, text: str, wait: bool = True) -> bool:
    """Write this process's claim; returns whether another's was waited for, or raises Held."""
    waited = False
    while not _write_new(path, text):
        try:
            other, written_unix_s = path.read_text(encoding="utf-8"), path.stat().st_mtime
        except FileNotFoundError:
            continue
        claim = Claim.parse(other)
        if claim.is_void if claim else time.time() - written_unix_s > HALF_WRITTEN_S:
            if _take_over(path, text, other):
                return waited
            continue
        who = claim.who if claim else "it is about to say which"
        why = f"another launcher trains this cell: {who}; delete {path} if none does"
        if not wait:
            raise Held(why)
        if not waited:
            print(f"waiting: {why}", flush=True)
            waited = True
        time.sleep(CLAIM_POLL_S)
    return waited


def _write_new(path: Path, text: str) -> bool:
    """Write a file; False where there is one of this name."""
    try:
        descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o644)
    except FileExistsError:
        return False
    with open(descriptor, "w", encoding="utf-8") as file:
        file.write(text)
    return True


def _take_over(path: Path, text: str, void: str) -> bool:
    """Put this process's claim in the place of a void one; False where another was quicker.

    Who holds a claim to the void one may do so, one after the other: so none is taken for void that
    has replaced it.
    """
    turn = path.with_name(f"launcher.claim-{sha256((path.name + void).encode()).hexdigest()[:16]}")
    _claim(turn, text)
    try:
        still = _text_of(path) == void
        if still:
            write_atomic(path, text)
        return still
    finally:
        turn.unlink(missing_ok=True)


def _withdraw(path: Path, text: str) -> None:
    """Remove this process's claim; one that was put in its place stays."""
    if _text_of(path) == text:
        path.unlink()


def _text_of(path: Path) -> str | None:
    try:
        return path.read_text(encoding="utf-8")
    except FileNotFoundError:
        return None


def _wait_for(path: Path, why: str, wait: bool = True) -> tuple[int, bool]:
    """A descriptor that holds `path` locked, and whether it had to be waited for; Held without `wait`."""
    waited = False
    while (descriptor := try_lock(path)) is None:
        if not waited:
            who = path.read_text(encoding="utf-8", errors="replace")
            if not wait:
                raise Held(f"{why}: {who or 'it does not say which'}; {path} is locked")
            print(f"waiting: {why}{f' ({who})' if who else ''}; {path} is locked", flush=True)
            waited = True
        time.sleep(POLL_S)
    return descriptor, waited


def hold_as_worker(logs: Path) -> None:
    """Have the next launcher of the cell wait for the end of this process.

    Raises BlockingIOError if one has begun already: the launcher of this process was killed.
    """
    try:
        fcntl.flock(
            open_lock(logs / "workers.lock"), fcntl.LOCK_SH | fcntl.LOCK_NB
        )  # until the end
    except OSError as e:
        if e.errno not in NO_LOCKS:
            raise
