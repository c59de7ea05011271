"""The agent of a node: it starts, watches and ends a cell's processes there.

If a cell uses one node, its launcher is the agent. Otherwise `srun` starts an agent on each node. A fork
server forks the processes. The agent never imports torch, so that it can act even if the workers hang.
"""

from __future__ import annotations

import argparse
import os
import signal
import socket
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, replace
from multiprocessing.connection import wait
from pathlib import Path
from typing import Any, ClassVar

from stratbench.cell.extensions import import_attribute
from stratbench.cell.run_folder import format_worker_name
from stratbench.telemetry.machine.busy import measure_load_of_other_programs
from stratbench.telemetry.machine.foreign_processes import find_gpu_index_and_uuid
from stratbench.telemetry.machine.nvml import Nvml
from stratbench.telemetry.pauses import PauseWatch
from stratbench.telemetry.sampler import Sampler
from stratbench.train import gpu_locks, standing
from stratbench.train.forkserver import Process, is_shared_server_on_same_gpus, run_fork_server
from stratbench.train.job import Job
from stratbench.train.locks import create_scratch_folder
from stratbench.train.nodes.interface import set_gloo_interface
from stratbench.train.nodes.paused import write_worker_pauses

#: Seconds after a worker's failure until the other workers are killed. They can report errors meanwhile.
GRACE_S = 3.0
#: Seconds between two checks of whether the workers make progress.
CHECK_INTERVAL_S = 60.0


class Stopped(BaseException):
    """Raised when the agent or launcher has received a signal to stop."""

    def __init__(self, signum: int) -> None:
        super().__init__(signal.Signals(signum).name)
        self.signum = signum


@dataclass(frozen=True)
class ProcessExit:
    """How one process ended. The exit code is negative after a signal, and None if the agent killed it."""

    name: str
    exit_code: int | None

    def __str__(self) -> str:
        if self.exit_code is None:
            return f"{self.name}: ended by the launcher"
        if self.exit_code < 0:
            return f"{self.name}: killed by {signal.Signals(-self.exit_code).name}"
        return f"{self.name}: exit code {self.exit_code}"


@dataclass(frozen=True)
class Exits:
    """How all processes of a node or cell ended, and whether the agent ended them."""

    processes: list[ProcessExit]
    #: Whether the agent ended the processes because the cell's time limit was reached.
    reached_time_limit: bool
    #: Whether the agent ended the processes because no worker made progress.
    has_hung: bool = False
    #: Names of processes whose failure the cell tolerates: the others could continue.
    tolerated_processes: frozenset[str] = frozenset()


class NodeProcesses:
    """The processes of a cell on one node. All must succeed, unless a subclass tolerates failures.

    Workers are `Process` objects, or objects with the same attributes.
    """

    #: Seconds between two calls of `list_lost_processes`. None: CHECK_INTERVAL_S.
    poll_s: ClassVar[float | None] = None

    def __init__(self, job: Job, workers: Sequence[Any], others: Sequence[Process] = ()) -> None:
        """Combine the processes of a node. `others`, such as servers, start before the workers."""
        self.job, self.workers = job, workers
        self.processes = [*others, *workers]

    def tolerates_failure(self, name: str) -> bool:
        """Return whether the cell can continue after the process with this name has failed."""
        return False

    def is_success_impossible(self, ended: Mapping[str, int]) -> bool:
        """Return whether the cell can no longer succeed, given the processes that have ended.

        Args:
            ended: Exit codes of the processes that have ended, by name.
        """
        return any(code != 0 and not self.tolerates_failure(name) for name, code in ended.items())

    def are_workers_hung(self, awake_since_s: float) -> bool:
        """Return whether all running workers of this node hang (`standing.are_all_workers_hung`)."""
        return standing.are_all_workers_hung(self.job, self.workers, awake_since_s)

    def list_lost_processes(self) -> set[str]:
        """Return the names of the processes that the other processes have given up as lost.

        The agent kills these processes.
        """
        return set()


@contextmanager
def create_node_processes(job: Job, node: int) -> Iterator[NodeProcesses]:
    """Yield the worker processes of a node without starting them."""
    with start_fork_server(job) as path:
        yield NodeProcesses(job, create_workers(job, node, path))


def start_fork_server(job: Job) -> AbstractContextManager[Path]:
    """Return a context in which a fork server runs for the cell. The context yields its address."""
    return run_fork_server(
        may_share=job.is_in_block or not job.use_cuda or is_shared_server_on_same_gpus()
    )


def create_workers(job: Job, node: int, fork_server: Path) -> list[Process]:
    """Create the worker processes of a node, without starting them."""
    text = job.to_json()
    return [
        Process(fork_server, format_worker_name(rank), "worker", text, rank, local_rank)
        for local_rank, rank in enumerate(job.list_ranks_on_node(node))
    ]


def run_node_processes(
    job: Job, node: int, factory_path: str = f"{__name__}:create_node_processes"
) -> Exits:
    """Start the processes of a cell on one node, and return their exits.

    The call waits for the end of the processes.

    Args:
        job: Job of the cell.
        node: Number of the node.
        factory_path: Path, as "module:function", of the context manager that creates the processes, such as
            `create_node_processes`.
    """
    set_process_environment(job, job.n_nodes == 1)
    with import_attribute(factory_path)(job, node) as group:
        processes = group.processes
        gpus = assign_gpus_to_workers(job, node)
        job.folder.write_process_locations(
            node, locate_processes([p.name for p in processes], gpus)
        )
        sampler = Sampler(
            job.folder.get_timeline_samples_path(node),
            job.folder.get_pid_list_path(node),
            job.origin_s,
            foreign_processes=job.folder.get_foreign_processes_path(node),
            gpus=list(gpus.values()),
        )
        watch = PauseWatch()
        try:
            # The load of other programs is measured before the training. Only the cell's fork server may run
            # already.
            job.folder.write_load_of_other_processes(node, measure_load_of_other_programs())
            for p in processes:
                p.start()
                sampler.watch_process(p.name, p.pid, with_descendants=p.starts_others)
            exits = wait_for_exits(group, watch)
            failed = (
                exits.reached_time_limit
                or exits.has_hung
                or any(p.exit_code for p in exits.processes)
            )
            if failed:
                watch.wait_for_latest_reading()
                late, since_s = exits.reached_time_limit, watch.awake_since_s
                standing.write_worker_states(job, node, processes, late, since_s)
            failed_names = (p.name for p in exits.processes if p.exit_code != 0)
            return replace(
                exits, tolerated_processes=frozenset(filter(group.tolerates_failure, failed_names))
            )
        finally:
            kill_processes(processes)
            sampler.stop()
            watch.stop()
            write_worker_pauses(job, node, watch)


def set_process_environment(job: Job, on_one_host: bool) -> None:
    """Set the environment variables that all processes of a cell inherit.

    Args:
        job: Job of the cell.
        on_one_host: Whether all processes of the cell run on this host.
    """
    # Libraries that are loaded after PyTorch read this variable. PyTorch's own threads are set by the
    # workers.
    os.environ["OMP_NUM_THREADS"] = str(job.threads)
    if on_one_host and not job.use_cuda:
        # Without this variable gloo would look up this host's own name, which not every machine can resolve.
        os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo" if sys.platform == "linux" else "lo0")
    elif not on_one_host:
        set_gloo_interface()
    # Before NCCL's watchdog ends a hung worker, it waits for a debugging dump, four times as long as this.
    os.environ.setdefault("TORCH_NCCL_WAIT_TIMEOUT_DUMP_MILSEC", "1000")
    # CUDA must number GPUs as NVML does: by the PCI bus. By default CUDA orders them by speed.
    os.environ["CUDA_DEVICE_ORDER"] = "PCI_BUS_ID"
    if not job.use_cuda:
        # GPUs are hidden because init_device_mesh would create a second process group for them.
        gpu_locks.set_visible_gpus([])


def assign_gpus_to_workers(job: Job, node: int) -> dict[str, str]:
    """Return the GPU of each worker on this node as a dict by worker name.

    The GPUs are named as in CUDA_VISIBLE_DEVICES.
    """
    if not job.use_cuda:
        return {}
    names = map(format_worker_name, job.list_ranks_on_node(node))
    return dict(zip(names, gpu_locks.list_visible_gpus(), strict=False))


def locate_processes(names: list[str], gpus: dict[str, str]) -> dict[str, dict[str, Any]]:
    """Return the host and the GPU of each process as a dict by process name."""
    host = {"host": socket.gethostname()}
    nvml = Nvml() if gpus else None
    return {
        name: host | ({"gpu": find_gpu_index_and_uuid(nvml, gpus[name])} if name in gpus else {})
        for name in dict.fromkeys([*names, *gpus])
    }


def wait_for_exits(group: NodeProcesses, watch: PauseWatch) -> Exits:
    """Wait for the end of all processes, and return how they ended.

    The wait also ends at the time limit. Running processes that can no longer succeed get GRACE_S seconds to
    end.

    Args:
        group: Processes of the node.
        watch: Detector of pauses. Pauses do not count towards the time limit.
    """
    job, processes = group.job, group.processes
    ended: dict[str, int] = {}
    grace_ends: float | None = None
    next_check_s = time.monotonic() + CHECK_INTERVAL_S
    while len(ended) < len(processes):
        now = time.monotonic()
        if (
            deadline_s := compute_extended_deadline_s(job, watch)
        ) is not None and now >= deadline_s:
            return Exits(_list_process_exits(processes, ended), reached_time_limit=True)
        if grace_ends is not None and now >= grace_ends:
            break
        if now >= next_check_s:
            watch.wait_for_latest_reading()
            if group.are_workers_hung(watch.awake_since_s):
                return Exits(
                    _list_process_exits(processes, ended), reached_time_limit=False, has_hung=True
                )
            next_check_s = now + CHECK_INTERVAL_S
        until = min(
            t
            for t in (deadline_s, grace_ends, now + (group.poll_s or CHECK_INTERVAL_S))
            if t is not None
        )
        running = {p.sentinel: p for p in processes if p.name not in ended}
        for sentinel in wait(list(running), timeout=max(until - now, 0)):
            process = running[sentinel]
            process.join()
            ended[process.name] = process.exitcode
        abandoned = group.list_lost_processes()
        for p in running.values():
            if p.name not in ended and p.name in abandoned:
                p.kill()
        if grace_ends is None and group.is_success_impossible(ended):
            grace_ends = time.monotonic() + GRACE_S
    return Exits(_list_process_exits(processes, ended), reached_time_limit=False)


def compute_extended_deadline_s(job: Job, watch: PauseWatch) -> float | None:
    """Return when the time limit ends on this node's monotonic clock, extended by pauses.

    The result is None if there is no limit.
    """
    if job.deadline_s is None:
        return None
    if time.monotonic() >= job.deadline_s + watch.total_pause_s:
        # A pause that has just ended must be included, since it extends the time limit.
        watch.wait_for_latest_reading()
    return job.deadline_s + watch.total_pause_s


def _list_process_exits(
    processes: Sequence[Process], exit_codes: dict[str, int]
) -> list[ProcessExit]:
    return [ProcessExit(p.name, exit_codes.get(p.name)) for p in processes]


def kill_processes(processes: Sequence[Process]) -> None:
    """Kill all processes that still run; they have nothing to save."""
    for p in processes:
        if p.pid is not None and p.is_alive():
            p.kill()
    for p in processes:
        if p.pid is not None:
            p.join(timeout=5)


def handle_stop_signals(action: Callable[[int], None]) -> None:
    """Call a function with the signal number on SIGINT, SIGTERM and, without `nohup`, SIGHUP."""
    for signum in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        if signum != signal.SIGHUP or signal.getsignal(signum) != signal.SIG_IGN:
            signal.signal(signum, lambda number, frame: action(number))


def raise_stopped_error(signum: int) -> None:
    """Raise Stopped, and ignore later signals, which must not interrupt the clean-up."""
    handle_stop_signals(lambda _: None)
    raise Stopped(signum)


def main() -> None:
    """Run the agent of one node of several. `srun` starts it with the path of the job's file."""
    parser = argparse.ArgumentParser(description=main.__doc__)
    parser.add_argument(
        "job", type=Path, help="JSON file with the job, which the launcher has written"
    )
    parser.add_argument(
        "spent_s", type=float, help="seconds from the start of the cell until srun was called"
    )
    parser.add_argument(
        "processes", help="function that creates the node's processes, as module:function"
    )
    args = parser.parse_args()
    job = Job.from_json(args.job.read_text(encoding="utf-8"))
    handle_stop_signals(raise_stopped_error)
    node = int(os.environ["SLURM_NODEID"])
    try:
        with create_scratch_folder() as local:
            exits = run_node_processes(
                job.make_copy_for_node(args.spent_s, local), node, args.processes
            )
    except Stopped as stopped:
        sys.exit(128 + stopped.signum)
    for p in exits.processes:
        print(f"node {node}: {p}", flush=True)
    failed = any(
        p.exit_code != 0 and p.name not in exits.tolerated_processes for p in exits.processes
    )
    sys.exit(1 if exits.reached_time_limit or exits.has_hung or failed else 0)


if __name__ == "__main__":
    main()
