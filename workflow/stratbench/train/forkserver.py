"""The fork server: imports PyTorch once and forks the processes of cells for a fast start.

A launcher starts one for its cell. Cells on the CPUs of one machine share the import, whatever their number
of threads. Snakemake starts a server for them and names its folder in STRATBENCH_FORK_SERVER. That server
imports PyTorch when the first cell asks. So do cells in one SLURM job. A cell on GPUs has a server of its
own, started with its choice of GPUs, unless the shared one was started with the same.

Each process has its own connection between its launcher and the server: a socket in a folder that only their
user can open. A line of JSON asks for the process; its pid and, at the end, its exit code come back. If the
launcher's end of the connection closes, the process is killed. If the server dies, its processes die too.
"""

from __future__ import annotations

import signal

if __name__ == "__main__":  # from the start: see _Server
    signal.signal(signal.SIGINT, signal.SIG_IGN)

import atexit
import contextlib
import gc
import json
import os
import selectors
import socket
import struct
import subprocess
import sys
import threading
import time
import traceback
import zlib
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from importlib import import_module
from multiprocessing.connection import wait
from pathlib import Path
from typing import Any

from stratbench.telemetry.heartbeat import STACK_SIGNAL
from stratbench.train.gpu_locks import VARIABLE as VISIBLE_GPUS
from stratbench.train.locks import scratch

#: The folder of the server that the cells of this run share.
FOLDER_VARIABLE = "STRATBENCH_FORK_SERVER"
#: The GPUs that it sees, as CUDA_VISIBLE_DEVICES named them when it started.
GPUS_VARIABLE = "STRATBENCH_FORK_SERVER_GPUS"
_ANSWER = struct.Struct("!i")  # a greeting, a pid or the negative error of the fork, an exit code
_REQUEST_TIMEOUT_S = 10.0
_ACCEPT_AGAIN_S = 0.1


class ForkServer:
    """A fork server of this process.

    When this process ends, the server ends too, after what it has forked.
    """

    def __init__(self, folder: Path) -> None:
        self.path = address(folder)
        with socket.socket(socket.AF_UNIX) as listener:
            listener.bind(os.fspath(self.path))
            listener.listen(128)
            self._process = subprocess.Popen(
                [sys.executable, "-m", "stratbench.train.forkserver", str(listener.fileno())],
                stdin=subprocess.PIPE,  # its end tells the server of ours
                pass_fds=[listener.fileno()],
                env=os.environ
                | {
                    # Read once, when PyTorch is loaded. How many threads a process has it says
                    # itself, by `torch.set_num_threads`.
                    "OMP_NUM_THREADS": "1",
                    # Whether there is a GPU is asked of NVML: asked of CUDA, forks could not use it.
                    "PYTORCH_NVML_BASED_CUDA_CHECK": "1",
                },
            )

    def stop(self) -> None:
        """Kill the server, and with it what it has forked. While it imports PyTorch it hears nothing else."""
        self._process.kill()
        self._process.wait()


class Process:
    """A process that a fork server forks: the function of `entry` (`function_of`), called with `args`.

    It has the environment and the working directory of its launcher. Attributes are those of
    `multiprocessing.Process`.
    """

    #: Whether it starts processes that count as its own.
    starts_others = False

    def __init__(self, server: Path, name: str, entry: str, *args: str | int) -> None:
        self.name = name
        self.pid: int | None = None
        self.exitcode: int | None = None
        self.sentinel = socket.socket(socket.AF_UNIX)
        self._server = server
        self._request = {"entry": entry, "args": args}

    def start(self) -> None:
        """Have the server fork it. Raises OSError if the server cannot be reached or ends before."""
        request = self._request | {"env": dict(os.environ), "cwd": os.getcwd()}
        self.sentinel.connect(os.fspath(self._server))
        greeting = _receive(self.sentinel)
        if greeting is not None:
            self.sentinel.sendall(json.dumps(request).encode() + b"\n")
            self.pid = _receive(self.sentinel)
        if self.pid is not None and self.pid < 0:
            code, self.pid = -self.pid, None
            raise OSError(code, f"{self.name} cannot be forked: {os.strerror(code)}")
        if self.pid is None:
            raise ConnectionError(f"the fork server ended before {self.name} could start")

    def join(self, timeout: float | None = None) -> None:
        """Wait for its end, which sets `exitcode`: negative if a signal killed it."""
        if self.exitcode is None and wait([self.sentinel], timeout):
            code = _receive(self.sentinel)
            self.exitcode = -signal.SIGKILL if code is None else code  # it dies with its server
            self.sentinel.close()

    def is_alive(self) -> bool:
        self.join(0)
        return self.exitcode is None

    def kill(self) -> None:
        """Have the server kill it; returns before it has ended."""
        with contextlib.suppress(OSError):
            self.sentinel.shutdown(socket.SHUT_WR)


@contextmanager
def fork_server(may_share: bool) -> Iterator[Path]:
    """Yield the address of the fork server that this run's cells share, or of one for this block."""
    shared = _shared() if may_share else None
    if shared is not None:
        print("PyTorch is imported already: this run's cells share a fork server", flush=True)
        yield shared
        return
    with scratch() as folder:
        server = ForkServer(folder)
        try:
            yield server.path
        finally:
            server.stop()


@contextmanager
def shared_server() -> Iterator[None]:
    """Let the launchers that this process starts share a fork server."""
    with scratch() as folder:
        server = ForkServer(folder)
        os.environ[FOLDER_VARIABLE] = str(folder)
        os.environ[GPUS_VARIABLE] = os.environ.get(VISIBLE_GPUS, "")
        try:
            yield
        finally:
            os.environ.pop(FOLDER_VARIABLE, None)
            os.environ.pop(GPUS_VARIABLE, None)
            server.stop()


def shares_gpus() -> bool:
    """Return whether the shared server was started with a choice of GPUs, and with this process's."""
    chosen = os.environ.get(VISIBLE_GPUS, "")
    return chosen != "" and chosen == os.environ.get(GPUS_VARIABLE)


def share_until_exit() -> None:
    """`shared_server` until this process ends; if there can be none, cells start their own."""
    stack = contextlib.ExitStack()
    try:
        stack.enter_context(shared_server())
    except OSError as e:
        print(f"no fork server, so that each cell imports PyTorch itself: {e}", file=sys.stderr)
    atexit.register(stack.close)


def address(folder: str | Path) -> Path:
    """Return where the server listens. Each Python environment has an address of its own."""
    return Path(folder) / f"{zlib.crc32(sys.prefix.encode()):08x}"


def _shared() -> Path | None:
    """Return the shared server, if there is one that has imported what it needs."""
    folder = os.environ.get(FOLDER_VARIABLE)
    if folder is None:
        return None
    path = address(folder)
    with socket.socket(socket.AF_UNIX) as probe:
        try:
            probe.connect(os.fspath(path))
        except OSError:
            return None
        return path if _receive(probe) is not None else None


def _receive(connection: socket.socket) -> int | None:
    """Return the next answer, or None where the other side has ended."""
    try:
        answer = connection.recv(_ANSWER.size, socket.MSG_WAITALL)
    except ConnectionError:
        return None
    return _ANSWER.unpack(answer)[0] if len(answer) == _ANSWER.size else None


class _Server:
    """The server's own process: one loop over requests, ends of launchers and ends of children."""

    def __init__(self, listener: socket.socket) -> None:
        self._listener = listener
        self._entries: dict[str, Callable[..., Any]] = {}
        self._children: dict[int, socket.socket] = {}  # by pid
        self._has_owner = True
        self._alive, self._alive_here = os.pipe()  # the other end's end is this process's
        self._wake, wake = socket.socketpair()
        wake.setblocking(False)
        signal.set_wakeup_fd(wake.fileno(), warn_on_full_buffer=False)
        signal.signal(signal.SIGCHLD, lambda *_: None)
        signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is the launchers' business
        signal.signal(STACK_SIGNAL, signal.SIG_IGN)  # what it forks begins so
        self._selector = selectors.DefaultSelector()
        for source, action in (
            (listener, self._accept),
            (sys.stdin.buffer.raw, self._owner_ended),
            (self._wake, self._reap),
        ):
            self._selector.register(source, selectors.EVENT_READ, action)
        self._wake_sender = wake

    def run(self) -> None:
        """Serve until the owner has ended and all children have."""
        while self._has_owner or self._children:
            for key, _ in self._selector.select():
                key.data(key.fileobj)

    def _owner_ended(self, stdin: Any) -> None:
        self._selector.unregister(stdin)
        self._selector.unregister(self._listener)
        path = Path(self._listener.getsockname())
        self._listener.close()
        self._has_owner = False
        with contextlib.suppress(OSError):  # an owner that was killed has left its folder
            path.unlink()
            path.parent.rmdir()

    def _accept(self, listener: socket.socket) -> None:
        try:
            connection, _ = listener.accept()
        except OSError:  # no descriptor is free: the next one to end gives some back
            time.sleep(_ACCEPT_AGAIN_S)
            return
        if not self._entries:
            self._entries = entries()
        connection.settimeout(_REQUEST_TIMEOUT_S)
        self._answer(connection, 0)
        self._selector.register(connection, selectors.EVENT_READ, self._request)

    def _request(self, connection: socket.socket) -> None:
        self._selector.unregister(connection)
        try:
            with connection.makefile("rb") as stream:
                request = json.loads(stream.readline())
        except (OSError, ValueError):
            connection.close()
            return
        try:
            pid = os.fork()
        except OSError as e:
            self._answer(connection, -e.errno)
            connection.close()
            return
        if pid == 0:
            connection.close()
            self._be_child(request)
        self._children[pid] = connection
        self._selector.register(
            connection, selectors.EVENT_READ, lambda c: self._launcher_ended(c, pid)
        )
        self._answer(connection, pid)

    def _launcher_ended(self, connection: socket.socket, pid: int) -> None:
        if self._children.get(pid) is not connection:  # reaped since the look that heard of both
            return
        self._selector.unregister(connection)
        os.kill(pid, signal.SIGKILL)  # not reaped yet, so it is still this child's

    def _reap(self, wake: socket.socket) -> None:
        wake.recv(4096)
        while self._children:
            pid, status = os.waitpid(-1, os.WNOHANG)
            if pid == 0:
                return
            connection = self._children.pop(pid)
            with contextlib.suppress(KeyError):
                self._selector.unregister(connection)
            self._answer(connection, os.waitstatus_to_exitcode(status))
            connection.close()

    @staticmethod
    def _answer(connection: socket.socket, number: int) -> None:
        with contextlib.suppress(OSError):  # its launcher has ended
            connection.sendall(_ANSWER.pack(number))

    def _be_child(self, request: dict[str, Any]) -> None:
        """Become the requested process. Never returns."""
        try:
            signal.set_wakeup_fd(-1)
            signal.signal(signal.SIGCHLD, signal.SIG_DFL)
            os.close(self._alive_here)
            for key in list(self._selector.get_map().values()):
                if isinstance(key.fileobj, socket.socket):
                    key.fileobj.close()
            for connection in self._children.values():
                connection.close()
            self._wake_sender.close()
            self._selector.close()
            os.environ.clear()
            os.environ.update(request["env"])
            os.chdir(request["cwd"])
            threading.Thread(target=self._die_with_server, daemon=True).start()
            function_of(request["entry"], self._entries)(*request["args"])
        except BaseException:
            traceback.print_exc()
            os._exit(1)
        os._exit(0)

    def _die_with_server(self) -> None:
        os.read(self._alive, 1)
        os.kill(os.getpid(), signal.SIGKILL)


def entries() -> dict[str, Callable[..., Any]]:
    """Return the functions that a process can run, by name. Imports PyTorch."""
    import stratbench.workload.with_torch  # noqa: F401
    from stratbench.train import worker

    gc.freeze()  # else every full collection in a child would look at these objects
    return {"worker": worker.main, "server": worker.serve_parameters}


def function_of(entry: str, listed: Mapping[str, Callable[..., Any]]) -> Callable[..., Any]:
    """Return the function of an entry: a listed one, or `module:name`, which is imported."""
    module, _, name = entry.partition(":")
    return listed[entry] if entry in listed else getattr(import_module(module), name)


if __name__ == "__main__":
    _Server(socket.socket(fileno=int(sys.argv[1]))).run()
    os._exit(0)  # at once: to clear away what was imported would take 0.5 s
