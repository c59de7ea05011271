"""Locks and folders of this user: no other user can harm or stop a cell, and no kill leaves one held."""

from __future__ import annotations

import contextlib
import errno
import fcntl
import json
import os
import re
import signal
import socket
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from unittest import mock

import pytest

from launching import WORKFLOW, until
from stratbench.cell.coordinates import Cell
from stratbench.cell.locks import NoLocks
from stratbench.study import program
from stratbench.train import agent, gpu_locks, launch, locks

pytestmark = pytest.mark.timeout(300)
STRANGER = 65534  # nobody


@pytest.fixture
def shared_tmp(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A temporary folder as all users of a machine share it; pytest's own is made elsewhere before."""
    with tempfile.TemporaryDirectory(dir="/tmp") as folder:
        Path(folder).chmod(0o1777)
        monkeypatch.setattr("tempfile.tempdir", folder)
        yield Path(folder)


def as_stranger(action: Callable[[], object]) -> None:
    """Have another user do it; skips where the tests may not."""
    if os.geteuid() != 0:
        pytest.skip("only root can act as another user")
    pid = os.fork()
    if pid == 0:
        code = 1
        with contextlib.suppress(BaseException):
            os.setgid(STRANGER)
            os.setuid(STRANGER)
            action()
            code = 0
        os._exit(code)
    assert os.waitpid(pid, 0)[1] == 0


def test_another_users_folder_and_lock_harm_no_file_and_stop_no_cell(shared_tmp, tmp_path):
    victim = tmp_path / "thesis.tex"
    victim.write_text("years of work")
    for name in (f"stratbench-{os.geteuid()}", f"stratbench-gpus-{os.geteuid()}"):

        def plant(folder: Path = shared_tmp / name) -> None:
            folder.mkdir(mode=0o777)
            folder.chmod(0o777)
            for link in ("0", "gpu-0"):
                (folder / link).symlink_to(victim)

        as_stranger(plant)
    with gpu_locks.reserve_gpus(["0"], 1) as mine:
        assert mine == ["0"]
        ours = (p for p in shared_tmp.glob("stratbench-*") if p.stat().st_uid == os.geteuid())
        used = {path.name for path in ours}
        assert used == {f"stratbench-{os.geteuid()}-1"}
    assert victim.read_text() == "years of work"


def test_a_name_that_a_stranger_gives_up_parts_no_cells(shared_tmp):
    first = shared_tmp / f"stratbench-{os.geteuid()}"
    as_stranger(first.mkdir)
    ours = locks.create_private_folder()
    as_stranger(first.rmdir)
    assert locks.create_private_folder() == ours != first


@pytest.mark.parametrize("plant", ["link", "file", "open folder"])
def test_what_is_no_folder_of_our_own_is_passed_over(tmp_path, plant):
    taken = tmp_path / f"stratbench-{os.geteuid()}"
    (tmp_path / "elsewhere").mkdir(mode=0o700)
    if plant == "link":
        taken.symlink_to(tmp_path / "elsewhere")
    elif plant == "file":
        taken.write_text("")
    else:
        taken.mkdir()
        taken.chmod(0o777)
    found = locks.create_private_folder(tmp_path)
    assert found.name == f"stratbench-{os.geteuid()}-1"
    assert found.stat().st_mode & 0o777 == 0o700
    assert locks.create_private_folder(tmp_path) == found


def test_all_names_taken_is_told_with_a_remedy(tmp_path, monkeypatch):
    monkeypatch.setattr(locks, "_NAMES", 2)
    for name in (f"stratbench-{os.geteuid()}", f"stratbench-{os.geteuid()}-1"):
        (tmp_path / name).write_text("")
    with pytest.raises(PermissionError, match="set TMPDIR to a folder that only you can write"):
        locks.create_private_folder(tmp_path)


def test_a_lock_follows_no_link_and_empties_no_file(tmp_path):
    (tmp_path / "file").write_text("content")
    (tmp_path / "link").symlink_to(tmp_path / "file")
    with pytest.raises(OSError, match="symbolic"):
        locks.try_to_lock_file(tmp_path / "link")
    os.close(locks.try_to_lock_file(tmp_path / "file"))
    assert (tmp_path / "file").read_text() == "content"


def mode_of(path: Path) -> int:
    return path.stat().st_mode & 0o777


@pytest.mark.parametrize("umask", [0o077, 0o022, 0o002, 0])
@pytest.mark.parametrize(("folder", "lock"), [(0o755, 0o600), (0o775, 0o660), (0o777, 0o666)])
def test_a_lock_is_open_to_those_alone_who_may_write_its_folder(tmp_path, umask, folder, lock):
    logs = tmp_path / "logs"
    logs.mkdir()
    logs.chmod(folder)
    (logs / "workers.lock").touch(0o644)  # as it was made once
    before = os.umask(umask)
    try:
        with locks.lock_cell(logs):
            assert mode_of(logs / "launcher.lock") == lock
            assert mode_of(logs / "workers.lock") == lock
    finally:
        os.umask(before)


def test_who_can_only_read_results_stops_no_cell(shared_tmp):
    """Who can open a file for reading can hold it locked."""
    logs = shared_tmp / "logs"
    with locks.lock_cell(logs):
        pass
    logs.chmod(0o755)  # whatever the umask is

    def hold() -> None:
        assert os.listdir(logs)
        for name in ("launcher.lock", "workers.lock"):
            for how in (os.O_RDONLY, os.O_RDWR):
                with pytest.raises(PermissionError):
                    os.open(logs / name, how)

    as_stranger(hold)


def test_a_group_that_shares_results_trains_in_turn(shared_tmp):
    """Each waits for the other's cell, whatever the umask says; a folder that is closed is told."""
    logs = shared_tmp / "logs"

    def hold() -> None:
        with locks.lock_cell(logs) as waited:
            assert not waited

    logs.mkdir()
    if os.geteuid() == 0:
        os.chown(logs, 0, STRANGER)
    logs.chmod(0o2770)
    with locks.lock_cell(logs):
        as_stranger(lambda: locks.try_to_lock_file(logs / "launcher.lock") is None or os.abort())
    as_stranger(hold)
    with locks.lock_cell(logs) as waited:
        assert not waited
    (logs / "launcher.lock").chmod(0o600)

    def told() -> None:
        with pytest.raises(PermissionError, match=r"chmod -R g\+rwX.*launcher\.lock"):
            locks.try_to_lock_file(logs / "launcher.lock")

    as_stranger(told)


# ---------------------------------------------------------------- what is held by whom


HOLDER = """
import sys
from pathlib import Path
from stratbench.train import locks
locks.POLL_S = 0.05
how, folder = sys.argv[1], Path(sys.argv[2])
if how == "worker":
    locks.lock_cell_as_worker(folder)
    print("holds", flush=True)
    sys.stdin.readline()
elif how == "launcher":
    with locks.lock_cell(folder) as waited:
        print("waited" if waited else "holds", flush=True)
        sys.stdin.readline()
else:
    with locks.create_scratch_folder() as mine:
        print(mine, flush=True)
        sys.stdin.readline()
"""


@pytest.fixture
def start(tmp_path: Path) -> Iterator[Callable[..., subprocess.Popen[str]]]:
    started: list[subprocess.Popen[str]] = []

    def holder(how: str, folder: Path = tmp_path) -> subprocess.Popen[str]:
        process = subprocess.Popen(
            [sys.executable, "-c", HOLDER, how, str(folder)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            env=os.environ | {"PYTHONPATH": str(WORKFLOW), "TMPDIR": str(tmp_path)},
        )
        started.append(process)
        return process

    yield holder
    for process in started:
        process.kill()
        process.communicate()


@pytest.mark.parametrize("by", [signal.SIGKILL, None])
def test_a_cell_is_held_by_one_launcher_at_a_time(start, by):
    first = start("launcher")
    assert first.stdout.readline() == "holds\n"
    second = start("launcher")
    told = second.stdout.readline()
    assert told.startswith("waiting: another launcher trains this cell")
    assert f"process {first.pid} on {socket.gethostname()}" in told
    first.send_signal(by) if by else first.communicate("\n")
    assert second.stdout.readline() == "waited\n"


def test_workers_of_a_killed_launcher_are_waited_for(start, tmp_path):
    worker = start("worker")
    assert worker.stdout.readline() == "holds\n"
    launcher = start("launcher")
    assert "workers of a killed launcher still end" in launcher.stdout.readline()
    worker.kill()
    assert launcher.stdout.readline() == "holds\n"


def test_a_worker_of_a_killed_launcher_begins_nothing(tmp_path):
    """The next launcher has begun to wait for the ends of all of them."""
    held = locks.try_to_lock_file(tmp_path / "workers.lock")
    with pytest.raises(BlockingIOError):
        locks.lock_cell_as_worker(tmp_path)
    os.close(held)


def test_a_lock_that_is_held_for_ever_can_be_deleted(start, tmp_path):
    """A node that is gone for good may leave its lock on a shared file system."""
    assert start("launcher").stdout.readline() == "holds\n"
    second = start("launcher")
    assert str(tmp_path / "launcher.lock") in second.stdout.readline()
    (tmp_path / "launcher.lock").unlink()
    assert second.stdout.readline() == "waited\n"


@pytest.fixture
def without_locks(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object) -> None:
        raise OSError(errno.ENOLCK, os.strerror(errno.ENOLCK))

    monkeypatch.setattr(fcntl, "flock", refuse)


def test_a_file_system_without_locks_is_refused_with_the_mount_option(
    tmp_path, monkeypatch, without_locks, capsys
):
    sentence = r": its file system has no locks \(No locks available\).*-o flock.*results in"
    refused = rf"{tmp_path}.*{sentence}"
    with pytest.raises(NoLocks, match=refused):
        locks.lock_cell_as_worker(tmp_path)
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    # A folder whose name is too long for sockets gives way to one in /tmp.
    with pytest.raises(NoLocks, match=sentence), locks.create_scratch_folder():
        pass
    assert list(tmp_path.glob("stratbench-*/*")) == []
    # The whole way of a launcher: one line, and the evidence of the failure.
    cell = Cell("s", "e", "ddp", "net", "digits", 1, 0)
    logs = tmp_path / "logs"
    with mock.patch.object(agent, "handle_stop_signals"):
        code = launch.run_launcher(
            cell,
            "begins",
            None,
            lambda held: held.enter_context(locks.lock_cell(logs)),
            lambda: logs,
        )
    assert code == 1
    (line,) = [x for x in capsys.readouterr().out.splitlines() if "its file system" in x]
    assert re.search(f"FAILED: {refused}", line)
    assert (
        "its file system has no locks" in json.loads((logs / "failure.json").read_text())["reason"]
    )


def test_programs_write_a_folder_without_locks(tmp_path, without_locks):
    """They can be repeated: tables and reports of results that lie on whatever file system."""
    with program.lock_folder(tmp_path):
        pass


def test_what_a_killed_process_leaves_is_removed_by_the_next(start, tmp_path):
    living, killed = start("scratch"), start("scratch")
    folders = {p: Path(p.stdout.readline().strip()) for p in (living, killed)}
    (folders[killed] / "store").write_text("x")
    killed.kill()
    killed.wait()
    ended = start("scratch")
    mine = Path(ended.stdout.readline().strip())
    assert not folders[killed].exists()
    assert folders[living].exists()
    ended.communicate("\n")
    until(lambda: not mine.exists())


def test_a_long_temporary_folder_has_short_sockets(tmp_path, monkeypatch):
    deep = tmp_path / ("d" * 100)
    deep.mkdir()
    monkeypatch.setattr("tempfile.tempdir", str(deep))
    with locks.create_scratch_folder() as folder, socket.socket(socket.AF_UNIX) as listener:
        listener.bind(str(folder / "01234567-128"))
    assert not folder.exists()
