"""Classifies how a cell ended: with a result, such as ok, or an error."""

from __future__ import annotations

import re
import signal
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from stratbench.cell.files import read_last_lines
from stratbench.cell.run_folder import format_worker_name
from stratbench.cell.text.words import format_bytes
from stratbench.telemetry.machine.foreign_processes import describe_gpu
from stratbench.train.agent import Exits, ProcessExit
from stratbench.train.job import Job
from stratbench.train.standing import (
    failure_at_time_limit_reason,
    find_first_step_with_unequal_calls,
    hang_reason,
    read_worker_states,
)
from stratbench.workload.users_code import describe_different_group_calls


@dataclass(frozen=True)
class CellEnding:
    """How a cell ended: the record's status, or `error`; and the reason. None if `ok`."""

    status: str
    reason: str | None


#: Results of workers by rank.
Workers = Mapping[int, Mapping[str, Any]]
KILLED_FOR_MEMORY = CellEnding(
    "oom", "the kernel killed a process because the host had no memory left"
)


def classify_ending(
    job: Job,
    exits: Exits,
    oom_kills_before: int | None = None,
    classify_without_oom: Callable[[Job, Exits, Workers], CellEnding] | None = None,
) -> CellEnding:
    """Return how a cell ended, judged by its processes' files and exit codes.

    A cause has precedence over its consequences: if one worker is out of memory or killed, other workers
    fail, too. A worker's own report has precedence over the time limit.

    Args:
        job: Job of the cell.
        exits: How the cell's processes exited.
        oom_kills_before: Result of `count_oom_kills` before the cell started, or None if unknown.
        classify_without_oom: Function that classifies the ending of this kind of cell if memory was no cause.
            None: `classify_collective_ending`.
    """
    workers = job.folder.read_worker_results(job.world_size)
    if refused := find_first_reason_with_status(workers, "unsupported"):
        return CellEnding("unsupported", refused)
    if find_first_reason_with_status(workers, "oom"):
        return make_out_of_memory_ending(job, workers)
    if any(p.exit_code == -signal.SIGKILL for p in exits.processes) and has_oom_kill_since(
        oom_kills_before
    ):
        return KILLED_FOR_MEMORY
    return (classify_without_oom or classify_collective_ending)(job, exits, workers)


def find_first_reason_with_status(
    workers: Mapping[int, Mapping[str, Any]], status: str
) -> str | None:
    """Return the reason that the first worker with this status gives. None without such a worker."""
    return next((w["reason"] for w in workers.values() if w["status"] == status), None)


#: Messages of gloo and NCCL in a worker that has lost the connection to another worker.
_LOST_PEER = re.compile(
    r"Connection (closed|reset) by peer|Broken pipe|remote process (exited|has terminated)"
)


def find_error_cause(
    workers: Mapping[int, Mapping[str, Any]], reached_time_limit: bool
) -> str | None:
    """Return the first worker error that does not report the loss of another worker.

    If all errors report such a loss, the result is the first error, or None at the time limit.

    Args:
        workers: Results of the workers by rank.
        reached_time_limit: Whether the cell has reached its time limit. The loss of a worker is then no
            error, because the processes of one node end before those of others.
    """
    errors = [w["reason"] for w in workers.values() if w["status"] == "error"]
    causes = [reason for reason in errors if not _LOST_PEER.search(reason)]
    return next(iter(causes or ([] if reached_time_limit else errors)), None)


def classify_collective_ending(
    job: Job, exits: Exits, workers: Mapping[int, Mapping[str, Any]]
) -> CellEnding:
    """Return how a cell without parameter servers ended, unless for lack of memory.

    Args:
        job: Job of the cell.
        exits: How the cell's processes exited.
        workers: Results of the workers by rank.
    """
    s, step = job.settings, find_first_step_with_unequal_calls(read_worker_states(job))
    # Different collectives are the first cause to check: their symptoms are an abort of gloo, or a hang of
    # NCCL.
    if step is not None:
        return CellEnding(
            "unsupported", describe_different_group_calls(s.model, s.strategy, f"step {step}")
        )
    killed = [p for p in exits.processes if p.exit_code is not None and p.exit_code < 0]
    if killed:
        return CellEnding("error", read_nccl_watchdog_reason(job, killed) or str(killed[0]))
    if reason := find_error_cause(workers, reached_time_limit=exits.reached_time_limit):
        # `reason` is from a worker that has waited too long in a collective. Other workers, which still run,
        # did not reach this collective.
        waits = hang_reason(read_worker_states(job)) if "Timed out waiting" in reason else None
        return CellEnding("error", f"{reason}; {waits}" if waits else reason)
    if exits.reached_time_limit or exits.has_hung:
        return make_hang_or_limit_ending(job, exits)
    lost = [p for p in exits.processes if p.exit_code not in (0, None)]
    if lost:
        return CellEnding("error", str(lost[0]))
    if len(workers) < job.world_size:
        missing = sorted(set(range(job.world_size)) - set(workers))
        return CellEnding("error", f"ranks {missing} ended without a result")
    if diverged := find_first_reason_with_status(workers, "diverged"):
        return CellEnding("diverged", diverged)
    return CellEnding("ok", None)


def make_hang_or_limit_ending(job: Job, exits: Exits) -> CellEnding:
    """Return the ending of a cell that hung or reached its time limit.

    The agent has ended the cell's processes. Only a slow cell has a result, `timeout`.
    """
    if exits.has_hung:
        return CellEnding(
            "error", hang_reason(read_worker_states(job)) or "it hangs: no worker made progress"
        )
    return make_time_limit_ending(job, failure_at_time_limit_reason(job))


def make_time_limit_ending(job: Job, failure_reason: str | None) -> CellEnding:
    """Return the ending of a cell at its time limit. It is `timeout` unless a failure reason is given."""
    return (
        CellEnding("error", failure_reason)
        if failure_reason
        else make_timeout_ending(job.time_limit_s)
    )


def make_timeout_ending(limit_s: float) -> CellEnding:
    """Return the ending `timeout` of a cell that reached its time limit."""
    return CellEnding("timeout", f"the cell's limit of {limit_s:g} s was reached")


#: Messages that PyTorch's NCCL watchdog writes before it ends a process by SIGABRT. The first kind names the
#: collective, but is not always written. The second always is.
_WATCHDOG_SAYS = (
    re.compile(r"Collective \w+\(.*raised the following async exception: .*"),
    re.compile(r"[\w ]*watchdog thread terminated with exception: .*"),
)


def read_nccl_watchdog_reason(job: Job, killed: Sequence[ProcessExit]) -> str | None:
    """Return the last log message of NCCL's watchdog in a process that the watchdog ended.

    The message is about an error of a communicator, or a collective that took longer than
    `worker.COLLECTIVE_S`. The result is None without such a process.
    """
    for process in killed:
        path = job.folder.get_log_path(process.name)
        if process.exit_code != -signal.SIGABRT or not path.exists():
            continue
        lines = read_last_lines(path)
        for sign in _WATCHDOG_SAYS:
            if reports := [match[0] for line in lines if (match := sign.search(line))]:
                return f"{process.name}: {reports[-1].strip()}"
    return None


def make_out_of_memory_ending(job: Job, workers: Mapping[int, Mapping[str, Any]]) -> CellEnding:
    """Return the ending of a cell in which a worker had no memory left.

    The ending is the result `oom`, or an error if other programs used the GPU as well.
    """
    lacking = {rank: w for rank, w in workers.items() if w["status"] == "oom"}
    for worker in lacking.values():
        if not worker.get("others"):
            return CellEnding("oom", worker["reason"])
    rank, worker = next(iter(lacking.items()))
    name, others = format_worker_name(rank), worker["others"]
    device = job.folder.read_process_locations().get(name, {})
    where = f"{describe_gpu(device.get('gpu', {}))} of {device.get('host')}"
    texts = [f"process {p['pid']} {_format_gib(p['bytes'])}" for p in others["processes"]]
    listed = ", ".join(texts) or f"others {_format_gib(others['others_bytes'])}"
    return CellEnding(
        "error",
        f"{name} had no memory left on {where}, of which others used a part: {listed}. Free the GPU, and "
        f"train the cell again; {worker['reason']}",
    )


def _format_gib(held_bytes: int | None) -> str:
    return (
        "an unknown part"
        if held_bytes is None
        else f"{format_bytes(held_bytes)} ({held_bytes:,} bytes)"
    )


def has_oom_kill_since(oom_kills_before: int | None) -> bool:
    """Return whether the kernel's OOM killer has killed a process since an earlier count.

    `oom_kills_before` is that count, from `count_oom_kills`. Only processes of this control group count.
    """
    return oom_kills_before is not None and count_oom_kills() > oom_kills_before


def count_oom_kills(
    proc: Path = Path("/proc/self/cgroup"), root: Path = Path("/sys/fs/cgroup")
) -> int:
    """Return how many processes of this control group the kernel's OOM killer has killed.

    The number is 0 if it cannot be read.

    Args:
        proc: The kernel's list of this process's control groups, of version 1 or 2.
        root: Folder in which control groups are mounted.
    """
    try:
        groups = [line.split(":", 2) for line in proc.read_text(encoding="utf-8").splitlines()]
        for _, controllers, group in groups:
            # Only version 1 of Linux control groups has a group per controller.
            if "memory" in controllers.split(","):
                file = root / "memory" / group.lstrip("/") / "memory.oom_control"
                break
        else:
            file = root / groups[0][2].lstrip("/") / "memory.events"
        counts = dict(line.split() for line in file.read_text(encoding="utf-8").splitlines())
    except (OSError, IndexError, ValueError):
        return 0
    return int(counts.get("oom_kill", 0))
