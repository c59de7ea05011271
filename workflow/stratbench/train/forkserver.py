"""The fork server: it imports PyTorch once, and forks the processes of cells.

Cells on the CPUs of one machine, or in one SLURM job, share a fork server. Snakemake starts it and names its
folder in STRATBENCH_FORK_SERVER. It imports PyTorch when the first cell connects. A cell on GPUs has a server
of its own, started with the cell's GPUs, unless the shared server was started with the same GPUs.

Each process has a connection between its launcher and the server: a socket in a folder that only the user can
open. The launcher sends a line of JSON, and receives the pid and later the exit code. If the launcher closes
the connection, the process is killed. If the server ends, its processes end too.
"""

from __future__ import annotations

import signal

# The imports below take long, and Ctrl-C must not end the server during them.
if __name__ == "__main__":
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
from stratbench.train.locks import create_scratch_folder

#: Name of the environment variable with the folder of the fork server that this run's cells share.
FOLDER_VARIABLE = "STRATBENCH_FORK_SERVER"
#: Name of the environment variable with the value that CUDA_VISIBLE_DEVICES had when the shared server
#: started.
GPUS_VARIABLE = "STRATBENCH_FORK_SERVER_GPUS"
#: Layout of an answer of the server, which is one number. A launcher gets three answers: 0 as a greeting, the
#: pid of the forked process, and its exit code at the end. If the fork fails, a negative error number
#: replaces the pid.
_ANSWER = struct.Struct("!i")
_REQUEST_TIMEOUT_S = 10.0
_ACCEPT_AGAIN_S = 0.1


class ForkServer:
    """A fork server that this process has started.

    When this process ends, the server waits for the processes that it has forked, and ends too.
    """

    def __init__(self, folder: Path) -> None:
        self.path = build_socket_path(folder)
        with socket.socket(socket.AF_UNIX) as listener:
            listener.bind(os.fspath(self.path))
            listener.listen(128)
            self._process = subprocess.Popen(
                [sys.executable, "-m", "stratbench.train.forkserver", str(listener.fileno())],
                # The pipe is closed when this process ends, which tells the server to end.
                stdin=subprocess.PIPE,
                pass_fds=[listener.fileno()],
                env=os.environ
                | {
                    # PyTorch reads this variable when it is loaded. Each forked process later sets its own
                    # number of threads by `torch.set_num_threads`.
                    "OMP_NUM_THREADS": "1",
                    # PyTorch then asks NVML whether there is a GPU, instead of initialising CUDA. After an
                    # initialisation, forked processes could not use CUDA.
                    "PYTORCH_NVML_BASED_CUDA_CHECK": "1",
                },
            )

    def stop(self) -> None:
        """Kill the server, even while it imports PyTorch. All processes that it has forked end, too."""
        self._process.kill()
        self._process.wait()


class Process:
    """A process that a fork server forks. It calls the function of `entry` with `args`.

    `find_entry_function` finds the function.

    The process has the environment and the working directory of its launcher. Its attributes are those of
    `multiprocessing.Process`.
    """

    #: Whether the process starts further processes, whose CPU time and memory count as its own.
    starts_others = False

    def __init__(self, server: Path, name: str, entry: str, *args: str | int) -> None:
        self.name = name
        self.pid: int | None = None
        self.exitcode: int | None = None
        self.sentinel = socket.socket(socket.AF_UNIX)
        self._server = server
        self._request = {"entry": entry, "args": args}

    def start(self) -> None:
        """Make the fork server fork the process.

        Raises:
            OSError: If the server cannot be reached, cannot fork, or ends before it has forked.
        """
        request = self._request | {"env": dict(os.environ), "cwd": os.getcwd()}
        self.sentinel.connect(os.fspath(self._server))
        greeting = _receive_server_answer_number(self.sentinel)
        if greeting is not None:
            self.sentinel.sendall(json.dumps(request).encode() + b"\n")
            self.pid = _receive_server_answer_number(self.sentinel)
        if self.pid is not None and self.pid < 0:
            code, self.pid = -self.pid, None
            raise OSError(code, f"{self.name} cannot be forked: {os.strerror(code)}")
        if self.pid is None:
            raise ConnectionError(
                f"the fork server ended before it could start the process {self.name}"
            )

    def join(self, timeout: float | None = None) -> None:
        """Wait for the end of the process, and set `exitcode`.

        The code is negative if a signal has killed the process.
        """
        if self.exitcode is None and wait([self.sentinel], timeout):
            code = _receive_server_answer_number(self.sentinel)
            # No answer means that the server was killed, and the process with it.
            self.exitcode = -signal.SIGKILL if code is None else code
            self.sentinel.close()

    def is_alive(self) -> bool:
        self.join(0)
        return self.exitcode is None

    def kill(self) -> None:
        """Make the fork server kill the process, without waiting for the process to end."""
        with contextlib.suppress(OSError):
            self.sentinel.shutdown(socket.SHUT_WR)


@contextmanager
def run_fork_server(may_share: bool) -> Iterator[Path]:
    """Yield the socket path of the shared fork server, or of a new one.

    A new server is started if there is no shared one, or if `may_share` is false. It ends with this context.
    """
    shared = _find_shared_server_address() if may_share else None
    if shared is not None:
        print("PyTorch is imported already: this run's cells share a fork server", flush=True)
        yield shared
        return
    with create_scratch_folder() as folder:
        server = ForkServer(folder)
        try:
            yield server.path
        finally:
            server.stop()


@contextmanager
def run_shared_fork_server() -> Iterator[None]:
    """Run a fork server for all launchers that this process starts in the context."""
    with create_scratch_folder() as folder:
        server = ForkServer(folder)
        os.environ[FOLDER_VARIABLE] = str(folder)
        os.environ[GPUS_VARIABLE] = os.environ.get(VISIBLE_GPUS, "")
        try:
            yield
        finally:
            os.environ.pop(FOLDER_VARIABLE, None)
            os.environ.pop(GPUS_VARIABLE, None)
            server.stop()


def is_shared_server_on_same_gpus() -> bool:
    """Return whether the shared fork server was started with this process's visible GPUs."""
    chosen = os.environ.get(VISIBLE_GPUS, "")
    return chosen != "" and chosen == os.environ.get(GPUS_VARIABLE)


def share_fork_server_until_exit() -> None:
    """Start a shared fork server that runs until this process ends.

    If the server cannot start, each cell starts its own.
    """
    stack = contextlib.ExitStack()
    try:
        stack.enter_context(run_shared_fork_server())
    except OSError as e:
        print(f"no fork server, so that each cell imports PyTorch itself: {e}", file=sys.stderr)
    atexit.register(stack.close)


def build_socket_path(folder: str | Path) -> Path:
    """Return the path of the fork server's socket in a folder. Each Python environment has its own."""
    return Path(folder) / f"{zlib.crc32(sys.prefix.encode()):08x}"


def _find_shared_server_address() -> Path | None:
    """Return the socket path of the shared fork server, after it has imported PyTorch.

    The result is None if there is no such server.
    """
    folder = os.environ.get(FOLDER_VARIABLE)
    if folder is None:
        return None
    path = build_socket_path(folder)
    with socket.socket(socket.AF_UNIX) as probe:
        try:
            probe.connect(os.fspath(path))
        except OSError:
            return None
        return path if _receive_server_answer_number(probe) is not None else None


def _receive_server_answer_number(connection: socket.socket) -> int | None:
    """Return the number in the fork server's next answer, or None if it has ended."""
    try:
        answer = connection.recv(_ANSWER.size, socket.MSG_WAITALL)
    except ConnectionError:
        return None
    return _ANSWER.unpack(answer)[0] if len(answer) == _ANSWER.size else None


class _Server:
    """The fork server's process. A loop handles requests, launchers that end and children that exit."""

    def __init__(self, listener: socket.socket) -> None:
        self._listener = listener
        self._entries: dict[str, Callable[..., Any]] = {}
        # Connections to the launchers that requested the running children, by the child's pid.
        self._children: dict[int, socket.socket] = {}
        self._has_owner = True
        # A thread in each child reads from this pipe. It gets the end of file when this process ends, and
        # then kills the child.
        self._alive, self._alive_here = os.pipe()
        self._wake, wake = socket.socketpair()
        wake.setblocking(False)
        signal.set_wakeup_fd(wake.fileno(), warn_on_full_buffer=False)
        signal.signal(signal.SIGCHLD, lambda *_: None)
        # Ctrl-C is ignored here, because the launchers handle it.
        signal.signal(signal.SIGINT, signal.SIG_IGN)
        # Forked processes inherit that the signal is ignored, until they set a handler.
        signal.signal(STACK_SIGNAL, signal.SIG_IGN)
        self._selector = selectors.DefaultSelector()
        for source, action in (
            (listener, self._accept_connection),
            (sys.stdin.buffer.raw, self._handle_owner_end),
            (self._wake, self._reap_children),
        ):
            self._selector.register(source, selectors.EVENT_READ, action)
        self._wake_sender = wake

    def handle_events(self) -> None:
        """Handle events until the process that started this server and all children have ended."""
        while self._has_owner or self._children:
            for key, _ in self._selector.select():
                key.data(key.fileobj)

    def _handle_owner_end(self, stdin: Any) -> None:
        self._selector.unregister(stdin)
        self._selector.unregister(self._listener)
        path = Path(self._listener.getsockname())
        self._listener.close()
        self._has_owner = False
        # The process that started this server removes the socket's folder, unless it was killed.
        with contextlib.suppress(OSError):
            path.unlink()
            path.parent.rmdir()

    def _accept_connection(self, listener: socket.socket) -> None:
        try:
            connection, _ = listener.accept()
        except OSError:
            # No file descriptor is free now. One may be free later, when a connection ends.
            time.sleep(_ACCEPT_AGAIN_S)
            return
        if not self._entries:
            self._entries = import_entry_functions()
        connection.settimeout(_REQUEST_TIMEOUT_S)
        self._send_answer(connection, 0)
        self._selector.register(connection, selectors.EVENT_READ, self._handle_request)

    def _handle_request(self, connection: socket.socket) -> None:
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
            self._send_answer(connection, -e.errno)
            connection.close()
            return
        if pid == 0:
            connection.close()
            self._run_child(request)
        self._children[pid] = connection
        self._selector.register(
            connection, selectors.EVENT_READ, lambda c: self._handle_launcher_end(c, pid)
        )
        self._send_answer(connection, pid)

    def _handle_launcher_end(self, connection: socket.socket, pid: int) -> None:
        # The child has already exited: `_reap_children` has handled it before, in this iteration of the loop.
        if self._children.get(pid) is not connection:
            return
        self._selector.unregister(connection)
        # The pid is still the child's own, because the child was not reaped yet.
        os.kill(pid, signal.SIGKILL)

    def _reap_children(self, wake: socket.socket) -> None:
        wake.recv(4096)
        while self._children:
            pid, status = os.waitpid(-1, os.WNOHANG)
            if pid == 0:
                return
            connection = self._children.pop(pid)
            with contextlib.suppress(KeyError):
                self._selector.unregister(connection)
            self._send_answer(connection, os.waitstatus_to_exitcode(status))
            connection.close()

    @staticmethod
    def _send_answer(connection: socket.socket, answer: int) -> None:
        # If the launcher has ended, nobody receives the answer.
        with contextlib.suppress(OSError):
            connection.sendall(_ANSWER.pack(answer))

    def _run_child(self, request: dict[str, Any]) -> None:
        """Run the requested function in the forked process, and exit."""
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
            threading.Thread(target=self._kill_self_when_server_ends, daemon=True).start()
            find_entry_function(request["entry"], self._entries)(*request["args"])
        except BaseException:
            traceback.print_exc()
            os._exit(1)
        os._exit(0)

    def _kill_self_when_server_ends(self) -> None:
        os.read(self._alive, 1)
        os.kill(os.getpid(), signal.SIGKILL)


def import_entry_functions() -> dict[str, Callable[..., Any]]:
    """Import PyTorch. Return, by name, the functions that forked processes can run."""
    import stratbench.workload.with_torch  # noqa: F401
    from stratbench.train import worker

    # Garbage collections in children then skip the objects that exist now.
    gc.freeze()
    return {"worker": worker.main}


def find_entry_function(
    entry: str, entry_functions: Mapping[str, Callable[..., Any]]
) -> Callable[..., Any]:
    """Return the function that an entry names: a name in `entry_functions`, or `module:name`."""
    module, _, name = entry.partition(":")
    return (
        entry_functions[entry] if entry in entry_functions else getattr(import_module(module), name)
    )


if __name__ == "__main__":
    _Server(socket.socket(fileno=int(sys.argv[1]))).handle_events()
    # A normal exit would spend 0.5 s on the clean-up of imported modules.
    os._exit(0)
