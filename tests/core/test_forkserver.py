"""Processes forked by a server of another process: their ends are told, and none outlives what it serves."""

from __future__ import annotations

import fcntl
import json
import os
import resource
import signal
import socket
import subprocess
import sys
import termios
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import psutil
import pytest

from launching import (
    FOREVER,
    LIMIT_S,
    WORKFLOW,
    assert_gone,
    settings,
    sharing,
    train_one_epoch,
    until,
)
from stratbench.train.forkserver import (
    FOLDER_VARIABLE,
    Process,
    build_socket_path,
    is_shared_server_on_same_gpus,
    run_shared_fork_server,
)

LIGHT = Path(__file__).with_name("light_forkserver.py")
pytestmark = pytest.mark.timeout(300)


@dataclass
class Light:
    """A light server, and what owns it: the process at the other end of its stdin."""

    path: Path
    process: subprocess.Popen[bytes]


@pytest.fixture
def light(tmp_path_factory, request) -> Iterator[Light]:
    """`request.param`: further arguments, and how many files it may have open."""
    arguments, n_files = getattr(request, "param", ((), 1024))
    path = tmp_path_factory.mktemp("s") / "here"
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(str(path))
        listener.listen(128)
        process = subprocess.Popen(
            [sys.executable, str(LIGHT), str(listener.fileno()), *arguments],
            stdin=subprocess.PIPE,
            pass_fds=[listener.fileno()],
            env=os.environ | {"PYTHONPATH": str(WORKFLOW)},
            preexec_fn=lambda: resource.setrlimit(resource.RLIMIT_NOFILE, (n_files, n_files)),
        )
    yield Light(path, process)
    process.kill()
    process.wait()


def started(server: Light, entry: str, *args: str | int) -> Process:
    process = Process(server.path, entry, entry, *args)
    process.start()
    return process


@pytest.mark.parametrize(
    ("entry", "argument", "expected"),
    [
        ("leave", 0, 0),
        ("leave", 3, 3),
        ("kill", signal.SIGTERM, -signal.SIGTERM),
        ("kill", signal.SIGKILL, -signal.SIGKILL),
        ("sleep", "a word", 1),  # a TypeError
        ("no such entry", 0, 1),
    ],
)
def test_the_exit_code_is_told(light, entry, argument, expected):
    process = started(light, entry, argument)
    process.join(LIMIT_S)
    assert process.exitcode == expected
    assert not process.is_alive()
    process.kill()  # does nothing to what has ended


def test_many_at_once_are_told_apart(light):
    processes = [started(light, "leave", code) for code in range(40)]
    assert len({p.pid for p in processes}) == 40
    for p in processes:
        p.join(LIMIT_S)
    assert [p.exitcode for p in processes] == list(range(40))


def test_a_process_is_its_launchers_but_for_its_own_files(light, tmp_path, monkeypatch):
    """Environment and folder are those of who asked, though the server was started elsewhere."""
    out = tmp_path / "found.json"
    other = started(light, "sleep", 600)
    monkeypatch.setenv("GIVEN", "as asked")
    monkeypatch.delenv("HOME")
    monkeypatch.chdir(tmp_path)
    started(light, "show", str(out)).join(LIMIT_S)
    found = json.loads(out.read_text())
    assert found["env"] == dict(os.environ)
    assert found["cwd"] == str(tmp_path)
    assert found["sigint"], "Ctrl-C is the launcher's to handle"
    assert found["sockets"] == [], "it holds connections of others"
    other.kill()


@pytest.mark.parametrize("first", [None, signal.SIGSTOP])
def test_killed_on_request(light, first):
    process = started(light, "sleep", 600)
    if first:
        os.kill(process.pid, first)
    assert process.is_alive()
    process.kill()
    process.join(LIMIT_S)
    assert process.exitcode == -signal.SIGKILL
    assert not psutil.pid_exists(process.pid)


def test_a_launchers_end_is_its_processes_end(light):
    process = started(light, "sleep", 600)
    bystander = started(light, "sleep", 600)
    process.sentinel.close()  # as the kernel does for one that was killed
    until(lambda: not psutil.pid_exists(process.pid))
    assert bystander.is_alive()
    bystander.kill()


def n_unread(sender: socket.socket) -> int:
    """How many bytes the other end has not read yet."""
    return int.from_bytes(fcntl.ioctl(sender, termios.TIOCOUTQ, bytes(4)), sys.byteorder)


def test_an_end_and_its_launchers_end_that_are_heard_at_once_harm_nobody(light):
    """A server that is busy hears of both in one look: first of the process's end, then of its launcher's."""
    process, bystander = started(light, "sleep", 600), started(light, "sleep", 600)
    server = psutil.Process(light.process.pid)
    with socket.socket(socket.AF_UNIX) as stranger:
        stranger.connect(str(light.path))
        stranger.sendall(b"half a request")  # the server waits for the rest
        until(lambda: n_unread(stranger) == 0 and server.status() == psutil.STATUS_SLEEPING)
        slept = server.num_ctx_switches().voluntary
        os.kill(process.pid, signal.SIGTERM)
        until(
            lambda: server.num_ctx_switches().voluntary > slept
        )  # it has been told, and waits again
        process.kill()
    process.join(LIMIT_S)
    assert process.exitcode == -signal.SIGTERM
    later = started(light, "leave", 7)
    later.join(LIMIT_S)
    assert later.exitcode == 7
    assert bystander.is_alive()
    bystander.kill()


def test_the_servers_end_is_its_processes_end(light):
    processes = [started(light, "sleep", 600) for _ in range(3)]
    known = [psutil.Process(p.pid) for p in processes]
    light.process.kill()
    for process in processes:
        process.join(LIMIT_S)
        assert process.exitcode == -signal.SIGKILL
    assert_gone(known)
    with pytest.raises(ConnectionError):
        started(light, "leave", 0)


def test_a_server_without_owner_ends_after_its_last_process(light):
    process = started(light, "sleep", 600)
    light.process.stdin.close()
    until(lambda: not light.path.parent.exists())  # its socket goes first, then the folder
    assert light.process.poll() is None
    assert process.is_alive()
    os.kill(process.pid, signal.SIGTERM)
    process.join(LIMIT_S)
    assert process.exitcode == -signal.SIGTERM
    assert light.process.wait(LIMIT_S) == 0


@pytest.mark.parametrize("sent", [b"", b"\x00\xff" * 1000, b"noise\n", b'{"entry": "lea', b"[]\n"])
def test_what_is_no_request_harms_nobody(light, sent):
    with socket.socket(socket.AF_UNIX) as stranger:
        stranger.connect(str(light.path))
        stranger.sendall(sent)
        stranger.shutdown(socket.SHUT_WR)
        while stranger.recv(64):
            pass
    process = started(light, "leave", 7)
    process.join(LIMIT_S)
    assert process.exitcode == 7


@pytest.mark.slow
@pytest.mark.parametrize("light", [((), 40)], indirect=True)
def test_a_server_out_of_descriptors_keeps_what_it_has_forked_and_comes_round(light):
    kept = started(light, "sleep", 600)
    server, idle = psutil.Process(light.process.pid), []
    for _ in range(60):  # some are not accepted
        idle.append(socket.socket(socket.AF_UNIX))
        idle[-1].connect(str(light.path))
    until(lambda: server.num_fds() >= 40)
    used_s = server.cpu_times().user
    time.sleep(0.5)
    assert server.cpu_times().user - used_s < 0.25, "it spins"
    assert kept.is_alive()
    for connection in idle:
        connection.close()
    process = started(light, "leave", 7)
    process.join(LIMIT_S)
    assert process.exitcode == 7
    assert kept.is_alive()
    kept.kill()


@pytest.mark.parametrize("light", [(("cannot-fork",), 1024)], indirect=True)
def test_a_failed_fork_is_its_launchers_error_alone(light):
    for _ in range(2):
        with pytest.raises(BlockingIOError, match="leave cannot be forked: Resource temporarily"):
            started(light, "leave", 0)
    assert light.process.poll() is None


# ---------------------------------------------------------------- cells that share a server


@pytest.fixture(scope="module")
def shared() -> Iterator[psutil.Process]:
    with sharing() as server:
        yield server


@pytest.mark.slow
def test_cells_share_a_server(shared, start_cell):
    for strategy in ("ddp", "ps-async"):
        launched = start_cell(settings(strategy))
        output = launched.finish_with(0)
        assert "share a fork server" in output
        assert any("libtorch" in mapped.path for mapped in shared.memory_maps())  # once for all
    assert not shared.children()


def test_a_shared_server_leaves_nothing_behind(monkeypatch):
    """Nor does it import PyTorch before a cell asks."""
    monkeypatch.setenv("PYTHONPATH", str(WORKFLOW))
    monkeypatch.delenv(FOLDER_VARIABLE, raising=False)  # and put back for the tests after this one
    with run_shared_fork_server():
        folder = Path(os.environ[FOLDER_VARIABLE])
        assert {*folder.iterdir()} == {build_socket_path(folder), folder / "lock"}
    assert not folder.exists()


@pytest.mark.slow
def test_cells_that_share_a_server_have_their_own_numbers_of_threads(shared, start_cell):
    """OpenMP has read another one when PyTorch was imported."""
    launched = start_cell(settings("ddp", threads=3))
    output = launched.finish_with(0)
    assert "share a fork server" in output
    workers = launched.read_record()["workers"]
    assert [w["provenance"]["host"]["threads"] for w in workers] == [3, 3]


@pytest.mark.slow
def test_a_killed_launcher_takes_its_processes_but_not_the_server(shared, start_cell):
    launched = start_cell(settings("ddp", epochs=FOREVER, lr=1e-6))
    train_one_epoch(launched)
    processes = shared.children()
    assert len(processes) == 2
    launched.process.kill()
    assert_gone(processes)
    launched = start_cell(settings("ddp"))
    output = launched.finish_with(0)
    assert "share a fork server" in output


@pytest.mark.slow
def test_cells_go_on_without_a_server_that_was_killed(shared, start_cell):
    """The last test of the server that cells share here."""
    launched = start_cell(settings("ddp", epochs=FOREVER, lr=1e-6))
    train_one_epoch(launched)
    processes = shared.children()
    shared.kill()
    output = launched.finish_with(1)
    assert "rank0: killed by SIGKILL" in output
    assert_gone(processes)
    launched = start_cell(settings("ddp"))
    output = launched.finish_with(0)
    assert "share a fork server" not in output


@pytest.mark.parametrize(
    ("at_start", "now", "shares"),
    [
        ("0,1", "0,1", True),
        ("0,1", "1", False),
        ("0", "1", False),
        (None, "0", False),
        (None, None, False),
        ("", "", False),
    ],
)
def test_gpu_cells_share_a_server_that_was_started_with_their_gpus(
    monkeypatch, at_start, now, shares
):
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    if at_start is not None:
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", at_start)
    with run_shared_fork_server():
        if now is not None:
            monkeypatch.setenv("CUDA_VISIBLE_DEVICES", now)
        assert is_shared_server_on_same_gpus() is shares
    assert not is_shared_server_on_same_gpus()
