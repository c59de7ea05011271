"""The agent of one node: starts the node's processes, watches them, and ends them.

On one node the launcher is the agent; on several, `srun` starts one on each. The processes come from
a fork server. The agent itself never imports torch, so that it can act whatever the workers do.
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

from stratbench.cell.extensions import resolve
from stratbench.cell.run_folder import worker_name
from stratbench.telemetry.machine.busy import busy_check
from stratbench.telemetry.machine.foreign_processes import gpu_place
from stratbench.telemetry.machine.nvml import Nvml
from stratbench.telemetry.pauses import PauseWatch
from stratbench.telemetry.sampler import Sampler
from stratbench.train import gpu_locks, standing
from stratbench.train.forkserver import Process, fork_server, shares_gpus
from stratbench.train.job import Job
from stratbench.train.locks import scratch
from stratbench.train.nodes.interface import set_gloo_interface
from stratbench.train.nodes.paused import keep_pauses

#: How long the peers of a failed worker may take to report before they are ended, in seconds.
GRACE_S = 3.0
#: How often an agent looks whether its workers get on, in seconds.
LOOK_S = 60.0


class Stopped(BaseException):
    """A signal asked the agent to stop."""

    def __init__(self, signum: int) -> None:
        super().__init__(signal.Signals(signum).name)
        self.signum = signum


@dataclass(frozen=True)
class ProcessExit:
    """Exit of one process of a cell. `exit_code` is negative for a signal, and None if the agent ended it."""

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
    """Exits of a node's or a cell's processes, and whether the time limit caused them.

    `hung`: they were ended because none made progress. `tolerated`: processes without which the others
    went on.
    """

    processes: list[ProcessExit]
    timed_out: bool
    hung: bool = False
    tolerated: frozenset[str] = frozenset()


class NodeProcesses:
    """The processes of a node, which depend on each other. Others override what differs.

    What trains in a worker's place has the attributes of `Process`.
    """

    #: How often it is asked for abandoned processes, in seconds; None: with every look.
    poll_s: ClassVar[float | None] = None

    def __init__(self, job: Job, workers: Sequence[Any], others: Sequence[Process] = ()) -> None:
        """`others`: processes that start before the workers."""
        self.job, self.workers = job, workers
        self.processes = [*others, *workers]

    def tolerates(self, name: str) -> bool:
        """Return whether the others go on without a process that has failed."""
        return False

    def stuck(self, ended: Mapping[str, int]) -> bool:
        """Return whether the processes that still run can no longer reach an orderly end.

        `ended`: exit codes of ended processes, by name.
        """
        return any(code != 0 and not self.tolerates(name) for name, code in ended.items())

    def hangs(self, awake_since_s: float) -> bool:
        """Return whether none makes progress (`standing.hung_for_good`)."""
        return standing.hung_for_good(self.job, self.workers, awake_since_s)

    def abandoned(self) -> set[str]:
        """Return names of the processes that the others gave up, and that are to be killed."""
        return set()


@contextmanager
def processes_of(job: Job, node: int) -> Iterator[NodeProcesses]:
    """Yield the workers of this node, not yet started."""
    with forking(job) as path:
        yield NodeProcesses(job, workers_of(job, node, path))


def forking(job: Job) -> AbstractContextManager[Path]:
    """Return the context of the fork server of a cell's processes."""
    return fork_server(may_share=job.in_block or not job.use_cuda or shares_gpus())


def workers_of(job: Job, node: int, fork_server: Path) -> list[Process]:
    """Return the workers of a node, not yet started."""
    text = job.to_json()
    return [
        Process(fork_server, worker_name(rank), "worker", text, rank, local_rank)
        for local_rank, rank in enumerate(job.ranks_of(node))
    ]


def run_node(job: Job, node: int, making: str = f"{__name__}:processes_of") -> Exits:
    """Start this node's processes and wait for their end or the deadline.

    Return how they exited.

    Args:
        job: The cell's.
        node: The node's number.
        making: What makes them, as `processes_of` does: "module:function".
    """
    set_environment(job, job.n_nodes == 1)
    with resolve(making)(job, node) as group:
        processes = group.processes
        gpus = gpus_of(job, node)
        job.folder.write_places(node, places_of([p.name for p in processes], gpus))
        sampler = Sampler(
            job.folder.samples(node),
            job.folder.pids(node),
            job.origin_s,
            foreign_processes=job.folder.foreign_processes(node),
            gpus=list(gpus.values()),
        )
        watch = PauseWatch()
        try:
            # While nothing trains yet: a fork server of this cell's own is importing PyTorch meanwhile.
            job.folder.write_busy(node, busy_check())
            for p in processes:
                p.start()
                sampler.watch(p.name, p.pid, below=p.starts_others)
            exits = supervise(group, watch)
            failed = exits.timed_out or exits.hung or any(p.exit_code for p in exits.processes)
            if failed:
                watch.look()
                late, since_s = exits.timed_out, watch.awake_since_s
                standing.note_standing(job, node, processes, late, since_s)
            failed_names = (p.name for p in exits.processes if p.exit_code != 0)
            return replace(exits, tolerated=frozenset(filter(group.tolerates, failed_names)))
        finally:
            end_all(processes)
            sampler.stop()
            watch.stop()
            keep_pauses(job, node, watch)


def set_environment(job: Job, on_one_host: bool) -> None:
    """Set what all processes of a cell inherit.

    `on_one_host`: all of them run on this one.
    """
    os.environ["OMP_NUM_THREADS"] = str(job.threads)  # for what they load after PyTorch
    if on_one_host and not job.use_cuda:
        # gloo would look up this host's name, which not every machine can resolve.
        os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo" if sys.platform == "linux" else "lo0")
    elif not on_one_host:
        set_gloo_interface()
    # Before NCCL's watchdog ends a worker it waits four times this long for a dump that nobody reads.
    os.environ.setdefault("TORCH_NCCL_WAIT_TIMEOUT_DUMP_MILSEC", "1000")
    # GPUs were chosen by NVML's numbers, which follow the PCI bus. CUDA's would follow speed.
    os.environ["CUDA_DEVICE_ORDER"] = "PCI_BUS_ID"
    if not job.use_cuda:
        gpu_locks.show_only([])  # seeing some, init_device_mesh would make FSDP a second group


def gpus_of(job: Job, node: int) -> dict[str, str]:
    """Return the GPU of each worker on this node by name, as in CUDA_VISIBLE_DEVICES."""
    if not job.use_cuda:
        return {}
    names = map(worker_name, job.ranks_of(node))
    return dict(zip(names, gpu_locks.visible_gpus(), strict=False))


def places_of(names: list[str], gpus: dict[str, str]) -> dict[str, dict[str, Any]]:
    """Return where processes run, by name: this host, and the GPU of those that have one."""
    host = {"host": socket.gethostname()}
    nvml = Nvml() if gpus else None
    return {
        name: host | ({"gpu": gpu_place(nvml, gpus[name])} if name in gpus else {})
        for name in dict.fromkeys([*names, *gpus])
    }


def supervise(group: NodeProcesses, watch: PauseWatch) -> Exits:
    """Wait for the end of the processes or the deadline; return how they exited.

    Once the rest cannot continue, they have GRACE_S to end.

    Args:
        group: The processes.
        watch: Detects pauses, which count towards no limit.
    """
    job, processes = group.job, group.processes
    ended: dict[str, int] = {}
    grace_ends: float | None = None
    next_look = time.monotonic() + LOOK_S
    while len(ended) < len(processes):
        now = time.monotonic()
        if (deadline_s := extended_deadline_s(job, watch)) is not None and now >= deadline_s:
            return Exits(_exits(processes, ended), timed_out=True)
        if grace_ends is not None and now >= grace_ends:
            break
        if now >= next_look:
            watch.look()
            if group.hangs(watch.awake_since_s):
                return Exits(_exits(processes, ended), timed_out=False, hung=True)
            next_look = now + LOOK_S
        until = min(
            t for t in (deadline_s, grace_ends, now + (group.poll_s or LOOK_S)) if t is not None
        )
        running = {p.sentinel: p for p in processes if p.name not in ended}
        for sentinel in wait(list(running), timeout=max(until - now, 0)):
            process = running[sentinel]
            process.join()
            ended[process.name] = process.exitcode
        abandoned = group.abandoned()
        for p in running.values():
            if p.name not in ended and p.name in abandoned:
                p.kill()
        if grace_ends is None and group.stuck(ended):
            grace_ends = time.monotonic() + GRACE_S
    return Exits(_exits(processes, ended), timed_out=False)


def extended_deadline_s(job: Job, watch: PauseWatch) -> float | None:
    """Return the deadline on this node's monotonic clock, extended by pauses.

    Return None without a limit.
    """
    if job.deadline_s is None:
        return None
    if time.monotonic() >= job.deadline_s + watch.stopped_s:
        watch.look()  # one may have ended just now
    return job.deadline_s + watch.stopped_s


def _exits(processes: Sequence[Process], ended: dict[str, int]) -> list[ProcessExit]:
    return [ProcessExit(p.name, ended.get(p.name)) for p in processes]


def end_all(processes: Sequence[Process]) -> None:
    """Kill what still runs; training processes have nothing to save."""
    for p in processes:
        if p.pid is not None and p.is_alive():
            p.kill()
    for p in processes:
        if p.pid is not None:
            p.join(timeout=5)


def on_signals(action: Callable[[int], None]) -> None:
    """Call `action` when the process is asked to stop, except for signals that `nohup` ignores."""
    for signum in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        if signum != signal.SIGHUP or signal.getsignal(signum) != signal.SIG_IGN:
            signal.signal(signum, lambda number, frame: action(number))


def raise_stopped(signum: int) -> None:
    """Signal action: raise Stopped, once. Later signals must not interrupt the clean-up."""
    on_signals(lambda _: None)
    raise Stopped(signum)


def main() -> None:
    """Agent of one node of several; started by `srun` with the job's file as argument."""
    parser = argparse.ArgumentParser(description=main.__doc__)
    parser.add_argument("job", type=Path, help="JSON file written by the launcher")
    parser.add_argument("spent_s", type=float, help="of the cell's time, when srun was called")
    parser.add_argument("processes", help="what makes the node's processes, as module:function")
    args = parser.parse_args()
    job = Job.from_json(args.job.read_text(encoding="utf-8"))
    on_signals(raise_stopped)
    node = int(os.environ["SLURM_NODEID"])
    try:
        with scratch() as local:
            exits = run_node(job.on_another_node(args.spent_s, local), node, args.processes)
    except Stopped as stopped:
        sys.exit(128 + stopped.signum)
    for p in exits.processes:
        print(f"node {node}: {p}", flush=True)
    failed = any(p.exit_code != 0 and p.name not in exits.tolerated for p in exits.processes)
    sys.exit(1 if exits.timed_out or exits.hung or failed else 0)


if __name__ == "__main__":
    main()
