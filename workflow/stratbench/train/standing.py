"""Diagnoses whether the workers of a cell that was ended were slow, or hung.

The agent of each node reads its workers' heartbeats at the time limit, when a worker has failed, and
periodically. If no worker has made progress for too long, the agent makes each process write the stacks of
its threads. The launcher evaluates the results of all agents.
"""

from __future__ import annotations

import contextlib
import math
import os
import re
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from stratbench.cell.run_folder import format_worker_name, parse_rank
from stratbench.cell.text.help_page import format_help_address
from stratbench.telemetry.heartbeat import STACK_SIGNAL, read_heartbeat, read_shard_group_calls
from stratbench.telemetry.timeline import read_phase_intervals
from stratbench.train.forkserver import Process
from stratbench.train.job import Job

#: Seconds after which a cell is ended if none of its workers makes progress. A hung collective times out
#: earlier (`worker.COLLECTIVE_S`), with a better message.
HUNG_S = 900.0
#: Longest time in seconds to wait for processes to write their stacks. A stopped process never does.
STACKS_S = 2.0
STACK_POLL_S = 0.05
#: Largest number of different worker states that a message lists.
MAX_LISTED_STATES = 4
_CALL = re.compile(r'^  File "(?P<path>.*)", line (?P<line>\d+) in (?P<function>.*)$')


@dataclass(frozen=True)
class WorkerState:
    """Last known state of a worker: its steps, phase, progress and exit code."""

    #: Number of training steps that the worker has started. Its GPU may not have finished them.
    steps: int
    #: Name of the worker's phase, such as `train` or `eval`. Between two phases it is `after` with the
    #: previous name.
    phase: str
    #: Exit code of the worker. None: the worker was still running.
    exit_code: int | None = None
    #: Seconds since the worker's last progress. None: the worker has sent no heartbeat.
    without_progress_s: float | None = None
    #: Seconds of the worker's longest step. None: the worker has sent no heartbeat.
    longest_step_s: float | None = None
    #: Whether the worker counts as hung (`HeartbeatReading.is_hung`).
    is_hung: bool = False
    #: Innermost call on the worker's stack, as `function (file.py:12)`. None: the stack was not requested, or
    #: the worker did not write it.
    innermost_call: str | None = None
    #: Numbers of the shard groups that the worker has called in its last step.
    called_groups: Sequence[int] = ()

    def __str__(self) -> str:
        call = f", in {self.innermost_call}" if self.innermost_call else ""
        return f"{self.steps} steps, in phase {self.phase}{call}"


def are_all_workers_hung(job: Job, workers: Sequence[Process], awake_since_s: float) -> bool:
    """Return whether all running workers of this node have made no progress for HUNG_S.

    The result is False if one of them has not taken a step yet, or does not count as hung for its step times.

    Args:
        job: Job of the cell.
        workers: Processes of this node's workers.
        awake_since_s: End of the node's last pause, on its monotonic clock.
    """
    ranks = [parse_rank(w.name) for w in workers if w.exitcode is None]
    now_s = time.monotonic()
    readings = [
        read_heartbeat(job.folder.get_heartbeat_path(rank), now_s, awake_since_s)
        for rank in ranks
        # Processes of a user's command have no rank, and send no heartbeat.
        if rank is not None
    ]
    return bool(readings) and all(
        reading is not None
        and reading.steps
        and reading.is_hung
        and reading.without_progress_s > HUNG_S
        for reading in readings
    )


def write_worker_states(
    job: Job,
    node: int,
    processes: Sequence[Process],
    reached_time_limit: bool,
    awake_since_s: float,
) -> None:
    """Write the last states of this node's workers to a file in the run folder.

    Args:
        job: Job of the cell.
        node: Number of the node.
        processes: All processes of the cell on this node, running or not.
        reached_time_limit: Whether the time limit was reached.
        awake_since_s: End of the node's last pause, on its monotonic clock.
    """
    now_s = time.monotonic()
    by_name = {p.name: p for p in processes}
    standings = {}
    for rank in job.list_ranks_on_node(node):
        if (name := format_worker_name(rank)) not in by_name:
            # If a user's command trains, there are no worker processes whose state is known.
            return
        reading = read_heartbeat(job.folder.get_heartbeat_path(rank), now_s, awake_since_s)
        standings[name] = {
            "steps": reading.steps if reading else 0,
            "phase": read_worker_phase(job, rank),
            "exit_code": by_name[name].exitcode,
            "without_progress_s": reading and reading.without_progress_s,
            "longest_step_s": reading and reading.longest_step_s,
            "is_hung": reading is not None and reading.is_hung,
            "called_groups": read_shard_group_calls(job.folder.get_heartbeat_path(rank)),
        }
    running = [p for p in processes if p.exitcode is None]
    stepless = reached_time_limit and not any(entry["steps"] for entry in standings.values())
    if stepless or all(standings[p.name]["is_hung"] for p in running if p.name in standings):
        request_process_stacks(job, running)
        for name, entry in standings.items():
            entry["innermost_call"] = read_innermost_call(job.folder.get_stack_trace_path(name))
    job.folder.write_worker_states(node, standings)


def read_worker_phase(job: Job, rank: int) -> str:
    """Return the name of a worker's present phase, or `start` before the first phase."""
    phases = read_phase_intervals([job.folder.get_phase_log_path(rank)])
    open_ones = [p.phase for p in phases if math.isinf(p.end_s)]
    if open_ones:
        return open_ones[-1]
    last = max(phases, key=lambda p: p.end_s, default=None)
    return f"after {last.phase}" if last else "start"


def request_process_stacks(job: Job, running: Sequence[Process]) -> None:
    """Make processes write their stack traces, and wait up to STACKS_S for these."""
    answering = [
        p for p in running if p.pid is not None and job.folder.get_stack_trace_path(p.name).exists()
    ]
    for process in answering:
        with contextlib.suppress(ProcessLookupError):
            os.kill(process.pid, STACK_SIGNAL)
    paths = [job.folder.get_stack_trace_path(process.name) for process in answering]
    ends_s = time.monotonic() + STACKS_S
    before = None
    while time.monotonic() < ends_s:
        sizes = [path.stat().st_size for path in paths]
        if all(sizes) and sizes == before:
            return
        before = sizes
        time.sleep(STACK_POLL_S)


def read_stack_calls(path: Path) -> list[str]:
    """Return the calls in the file with a process's stack, innermost first.

    The list is empty without a file. The calls are those of the main thread, which `faulthandler` writes
    last. If the main thread waits for autograd's thread, the calls of that thread come first, because it
    calls the collectives of backward.
    """
    try:
        lines = path.read_text(encoding="utf-8", errors="replace").splitlines()
    except FileNotFoundError:
        return []
    threads: list[list[str]] = []
    for line in lines:
        if "hread 0x" in line:
            threads.append([])
        elif threads and _CALL.match(line):
            threads[-1].append(line)
    if not threads:
        return []
    *others, main = threads
    if not main or not main[0].endswith("in _engine_run_backward"):
        return main
    return next((calls for calls in others if calls and "/autograd/" in calls[-1]), []) + main


def read_innermost_call(path: Path) -> str | None:
    """Return the innermost call in a stack file as `function (file.py:12)`, or None without one."""
    calls = read_stack_calls(path)
    if not calls:
        return None
    match = _CALL.match(calls[0])
    return f"{match['function']} ({os.path.basename(match['path'])}:{match['line']})"


def failure_at_time_limit_reason(job: Job) -> str | None:
    """Return why a cell that reached its time limit counts as failed. None if it was only slow.

    The cell counts as failed if no worker had taken a step, or if it hung (`hang_reason`).
    """
    worker_states = read_worker_states(job)
    results = job.folder.read_worker_results(job.world_size)
    limit = f"the cell's limit of {job.time_limit_s:g} s"
    ranks = range(job.world_size)
    if not any(
        _has_taken_step(job, rank, worker_states.get(rank), results.get(rank)) for rank in ranks
    ):
        known = {
            rank: worker_states.get(rank) or WorkerState(0, read_worker_phase(job, rank))
            for rank in ranks
        }
        address = format_help_address("no step within")
        return f"no step within {limit}; {_format_worker_states(known)} {address}"
    return hang_reason(worker_states) if len(worker_states) == job.world_size else None


def read_worker_states(job: Job) -> dict[int, WorkerState]:
    """Return the last known state of each worker whose agent has written one, by rank."""
    return {
        parse_rank(name): WorkerState(**entry)
        for name, entry in job.folder.read_worker_states().items()
    }


def find_first_step_with_unequal_calls(worker_states: Mapping[int, WorkerState]) -> int | None:
    """Return the step in which two workers called different shard groups. None without a difference.

    Steps count from 1. If a worker has only called fewer groups than another, that is no difference, because
    the worker may be slower.
    """
    first, *others = worker_states.values() or [WorkerState(0, "")]
    for other in others:
        pairs = zip(first.called_groups, other.called_groups, strict=False)
        if first.steps == other.steps and any(a != b for a, b in pairs):
            return first.steps + 1
    return None


def hang_reason(worker_states: Mapping[int, WorkerState]) -> str | None:
    """Return a sentence with the workers' last states if all running workers hang, else None."""
    running = {rank: state for rank, state in worker_states.items() if state.exit_code is None}
    if not running or not all(state.is_hung for state in running.values()):
        return None
    quiet_s = min(s.without_progress_s for s in running.values())
    longest_s = max(s.longest_step_s for s in running.values())
    address = format_help_address("no worker made progress")
    return (
        f"it hangs: no worker made progress for {quiet_s:.1f} s, and no step before had taken longer than "
        f"{longest_s:.3g} s; {_format_worker_states(running)} {address}"
    )


def _has_taken_step(
    job: Job, rank: int, state: WorkerState | None, result: dict[str, Any] | None
) -> bool:
    """Return whether a worker has certainly taken a training step.

    If the worker's agent has written no state, the worker's result or phase log decides.
    """
    if state is not None:
        return state.steps > 0
    if result is not None and result["status"] in ("ok", "diverged"):
        return True
    return any(
        p.phase == "train" for p in read_phase_intervals([job.folder.get_phase_log_path(rank)])
    )


def _format_worker_states(worker_states: Mapping[int, WorkerState]) -> str:
    """Return the last known state of each worker as text.

    The ranks with the fewest steps come first, because others wait for them.
    """
    by_state: dict[str, list[int]] = {}
    for rank, state in sorted(worker_states.items(), key=lambda item: (item[1].steps, item[0])):
        by_state.setdefault(str(state), []).append(rank)
    groups = [
        f"rank{'s' if len(ranks) > 1 else ''} {', '.join(map(str, ranks))}: {text}"
        for text, ranks in by_state.items()
    ]
    more = (
        [f"and {len(groups) - MAX_LISTED_STATES} more"] if len(groups) > MAX_LISTED_STATES else []
    )
    return "; ".join([*groups[:MAX_LISTED_STATES], *more])
