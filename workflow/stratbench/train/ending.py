"""Classification of how a cell ended: with a result (such as ok, oom or timeout), or an error."""

from __future__ import annotations

import re
import signal
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from stratbench.cell.files import last_lines
from stratbench.cell.run_folder import rank_of, worker_name
from stratbench.cell.text.words import bytes_text
from stratbench.ps.wire.link import RunEnded, ServerLost
from stratbench.telemetry.machine.foreign_processes import describe_gpu
from stratbench.train.agent import Exits, ProcessExit, has_joined
from stratbench.train.job import Job
from stratbench.train.standing import standings_of, unlike_step, why_hung, why_no_timeout
from stratbench.workload.users_code import calls_differ


@dataclass(frozen=True)
class Ending:
    """How a cell ended: a record's status or `error`, and the reason if it is not `ok`."""

    status: str
    reason: str | None


KILLED_FOR_MEMORY = Ending("oom", "the kernel killed a process because the host had no memory left")


def classify(job: Job, exits: Exits, kills_before: int | None = None) -> Ending:
    """Return how a cell ended, from the files of its processes and their exits.

    A cause takes precedence over its consequences: when one worker is out of memory or killed, its peers fail
    too, because their partner is gone. A worker's own report takes precedence over the deadline.

    Args:
        job: The cell's.
        exits: How its processes exited.
        kills_before: Count of `oom_kills` before the cell, or None if unknown.
    """
    workers = job.folder.read_workers(job.world_size)
    if refused := first_reason(workers, "unsupported"):
        return Ending("unsupported", refused)
    if first_reason(workers, "oom"):
        return out_of_memory(job, workers)
    if any(p.exit_code == -signal.SIGKILL for p in exits.processes) and has_killed(kills_before):
        return KILLED_FOR_MEMORY
    return (classify_served if job.has_servers else classify_collective)(job, exits, workers)


def first_reason(workers: Mapping[int, Mapping[str, Any]], status: str) -> str | None:
    """Return the reason of the first worker with this status.

    Return None if none has it.
    """
    return next((w["reason"] for w in workers.values() if w["status"] == status), None)


#: Messages of gloo and NCCL where a worker's peer is gone.
_LOST_PEER = re.compile(
    r"Connection (closed|reset) by peer|Broken pipe|remote process (exited|has terminated)"
)


def cause_of_error(workers: Mapping[int, Mapping[str, Any]], was_ended: bool) -> str | None:
    """Return the first error that is not the loss of another worker, else the first.

    Args:
        workers: The workers' results by rank.
        was_ended: Whether the cell reached its limit: then the loss of a worker is no error. On several
            nodes one is ended shortly before the others.
    """
    errors = [w["reason"] for w in workers.values() if w["status"] == "error"]
    causes = [reason for reason in errors if not _LOST_PEER.search(reason)]
    return next(iter(causes or ([] if was_ended else errors)), None)


def classify_collective(job: Job, exits: Exits, workers: Mapping[int, Mapping[str, Any]]) -> Ending:
    """Return how a cell of interdependent workers ended, none of which was out of memory.

    Args:
        job: The cell's.
        exits: How its processes exited.
        workers: Results of the workers by rank.
    """
    s, step = job.settings, unlike_step(standings_of(job))
    if step is not None:  # whatever came of it: gloo aborts, and NCCL waits
        return Ending("unsupported", calls_differ(s.model, s.strategy, f"step {step}"))
    killed = [p for p in exits.processes if p.exit_code is not None and p.exit_code < 0]
    if killed:
        return Ending("error", watchdog_reason(job, killed) or str(killed[0]))
    if reason := cause_of_error(workers, was_ended=exits.timed_out):
        # A peer did not come to a collective in time. Whoever still runs is the one.
        waits = why_hung(standings_of(job)) if "Timed out waiting" in reason else None
        return Ending("error", f"{reason}; {waits}" if waits else reason)
    if exits.timed_out or exits.hung:
        return hung_or_slow(job, exits)
    lost = [p for p in exits.processes if p.exit_code not in (0, None)]
    if lost:
        return Ending("error", str(lost[0]))
    if len(workers) < job.world_size:
        missing = sorted(set(range(job.world_size)) - set(workers))
        return Ending("error", f"ranks {missing} ended without a result")
    if diverged := first_reason(workers, "diverged"):
        return Ending("diverged", diverged)
    return Ending("ok", None)


def classify_served(job: Job, exits: Exits, workers: Mapping[int, Mapping[str, Any]]) -> Ending:
    """Return how a cell with parameter servers ended: they decide whether a lost worker matters.

    Args:
        job: The cell's.
        exits: How its processes exited.
        workers: Results of the workers by rank.
    """
    servers = job.folder.read_servers(job.n_servers)
    if diverged := first_reason(workers, "diverged"):
        return Ending("diverged", diverged)
    lost = next((f["error"] for f in servers if f["error"]), None)
    if lost:
        own = [own_reason(workers.get(w["worker"])) for f in servers for w in f.get("lost", ())]
        return Ending("error", ": ".join([lost, *filter(None, own[:1])]))
    # The servers do not begin before every worker has joined.
    for rank, worker in workers.items():
        if worker["status"] == "error" and not has_joined(job, rank):
            return Ending("error", worker["reason"])
    if exits.timed_out or exits.hung:
        return hung_or_slow(job, exits)
    if len(servers) < job.n_servers:
        dead = next((p for p in exits.processes if rank_of(p.name) is None and p.exit_code), None)
        return Ending("error", str(dead or "a parameter server left no statistics"))
    evaluates = not job.settings.steps  # else whoever is through tells as much
    if not any(w["status"] == "ok" and (w["per_epoch"] or not evaluates) for w in workers.values()):
        return Ending("error", first_reason(workers, "error") or "no worker lived to evaluate")
    return Ending("ok", None)


def hung_or_slow(job: Job, exits: Exits) -> Ending:
    """Return how a cell ended that reached its limit or hung. Only slowness is a result."""
    if exits.hung:
        return Ending("error", why_hung(standings_of(job)) or "it hangs: no worker got on")
    return failed_or_slow(job, why_no_timeout(job))


def failed_or_slow(job: Job, why_failed: str | None) -> Ending:
    """Return the ending of a cell at its limit: slow, without another reason."""
    return Ending("error", why_failed) if why_failed else slow(job.time_limit_s)


def slow(limit_s: float) -> Ending:
    """Return the ending of a cell that reached its limit without failing."""
    return Ending("timeout", f"the cell's limit of {limit_s:g} s was reached")


def own_reason(worker: Mapping[str, Any] | None) -> str | None:
    """Return a lost worker's own reason, unless it only repeats that of the servers."""
    reason = worker is not None and worker["status"] == "error" and worker["reason"]
    return (
        reason
        if reason and not reason.startswith((RunEnded.__name__, ServerLost.__name__))
        else None
    )


#: What PyTorch's watchdog of NCCL writes before it ends a process by SIGABRT: the first names the
#: collective and its number, the second comes always.
_WATCHDOG_SAYS = (
    re.compile(r"Collective \w+\(.*raised the following async exception: .*"),
    re.compile(r"[\w ]*watchdog thread terminated with exception: .*"),
)


def watchdog_reason(job: Job, killed: Sequence[ProcessExit]) -> str | None:
    """Return why NCCL's watchdog ended the first of the processes that it ended, or None.

    The reason is an error of a communicator, or a collective that took longer than `worker.COLLECTIVE_S`.
    """
    for process in killed:
        path = job.folder.log(process.name)
        if process.exit_code != -signal.SIGABRT or not path.exists():
            continue
        lines = last_lines(path)
        for sign in _WATCHDOG_SAYS:
            if reports := [match[0] for line in lines if (match := sign.search(line))]:
                return f"{process.name}: {reports[-1].strip()}"
    return None


def out_of_memory(job: Job, workers: Mapping[int, Mapping[str, Any]]) -> Ending:
    """Return the ending of a cell with a worker out of memory.

    It is a result if the cell had its GPU to itself.
    """
    lacking = {rank: w for rank, w in workers.items() if w["status"] == "oom"}
    for worker in lacking.values():
        if not worker.get("others"):
            return Ending("oom", worker["reason"])
    rank, worker = next(iter(lacking.items()))
    name, others = worker_name(rank), worker["others"]
    device = job.folder.read_places().get(name, {})
    where = f"{describe_gpu(device.get('gpu', {}))} of {device.get('host')}"
    texts = [f"process {p['pid']} {_in_gib(p['bytes'])}" for p in others["processes"]]
    listed = ", ".join(texts) or f"others {_in_gib(others['others_bytes'])}"
    return Ending(
        "error",
        f"{name} had no memory left on {where}, of which others used a part: {listed}. Free the GPU, and "
        f"train the cell again; {worker['reason']}",
    )


def _in_gib(held_bytes: int | None) -> str:
    return (
        "an unknown part"
        if held_bytes is None
        else f"{bytes_text(held_bytes)} ({held_bytes:,} bytes)"
    )


def has_killed(kills_before: int | None) -> bool:
    """Return whether the control group counts more memory kills than before; not if unknown."""
    return kills_before is not None and oom_kills() > kills_before


def oom_kills(proc: Path = Path("/proc/self/cgroup"), root: Path = Path("/sys/fs/cgroup")) -> int:
    """Return the out-of-memory kills in this process's control group.

    Return 0 where that cannot be read.

    Args:
        proc: The kernel's list of this process's groups, of both versions.
        root: Where control groups are mounted.
    """
    try:
        groups = [line.split(":", 2) for line in proc.read_text(encoding="utf-8").splitlines()]
        for _, controllers, group in groups:
            if "memory" in controllers.split(","):  # version 1
                file = root / "memory" / group.lstrip("/") / "memory.oom_control"
                break
        else:
            file = root / groups[0][2].lstrip("/") / "memory.events"
        counts = dict(line.split() for line in file.read_text(encoding="utf-8").splitlines())
    except (OSError, IndexError, ValueError):
        return 0
    return int(counts.get("oom_kill", 0))
