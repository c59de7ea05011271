"""Manages the attempts of a cell with checkpoints.

An attempt is one start of a cell. It resumes from the checkpoints of the attempt before. Each worker writes
its checkpoints to a folder next to the cell's run folder. The next attempt empties the run folder. Before
that, the dates of its files show when the killed attempt ended. This module does not import torch.
"""

from __future__ import annotations

import json
import shutil
import time
from collections.abc import Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

from stratbench.cell.files import write_text_atomically
from stratbench.cell.run_folder import RunFolder, format_worker_name
from stratbench.extensions.checkpoints.checkpoints import (
    delete_checkpoints,
    delete_later_checkpoints,
    get_checkpoint_path,
    list_checkpoint_steps,
)
from stratbench.extensions.checkpoints.keys import Checkpoints
from stratbench.telemetry.timeline import read_phase_intervals
from stratbench.train.job import Job


def get_checkpoint_folder(run: RunFolder, rank: int) -> Path:
    """Return the folder with the checkpoints of worker `rank`."""
    return run.saved_state_dir / format_worker_name(rank)


def find_newest_common_checkpoint_step(run: RunFolder, num_workers: int) -> int | None:
    """Return the step of the newest checkpoint that all workers have, if any."""
    each = [list_checkpoint_steps(get_checkpoint_folder(run, rank)) for rank in range(num_workers)]
    return max(set.intersection(*each), default=None)


def delete_checkpoints_before_common_step(run: RunFolder, rank: int, num_workers: int) -> None:
    """Delete a worker's checkpoints before the newest one that all workers have.

    Workers do not wait for each other: a slower worker may not have written the newest checkpoint yet.

    Args:
        run: Run folder of the cell.
        rank: Rank of this worker.
        num_workers: Number of workers.
    """
    if (step := find_newest_common_checkpoint_step(run, num_workers)) is not None:
        delete_checkpoints(get_checkpoint_folder(run, rank), before_step=step)


def find_last_write_unix_s(run: RunFolder) -> float | None:
    """Return the time of the last write to a run folder, in seconds since 1970.

    This is about the end of the attempt, because a process on each node writes every second. The result is
    None if the folder is empty.
    """
    dates = [path.stat().st_mtime for path in run.path.glob("*") if path.is_file()]
    return max(dates, default=None)


def make_next_attempt_job(job: Job, previous_end_unix_s: float | None) -> Job:
    """Return the job of a cell's next attempt, with the times of earlier attempts.

    The times of the job include earlier attempts, but not the time between attempts. Checkpoints of attempts
    with other settings, data or devices are deleted.

    Args:
        job: Job of the cell.
        previous_end_unix_s: End of the previous attempt in seconds since 1970, or None without one.
    """
    folder = job.folder.saved_state_dir
    path, identity = folder / "attempts.json", get_values_common_to_attempts(job)
    earlier = _read_resumable_attempts(path, identity) if previous_end_unix_s is not None else []
    now_unix_s = time.time()
    if not earlier:
        shutil.rmtree(folder, ignore_errors=True)
    else:
        _record_attempt_end(earlier[-1], job, previous_end_unix_s, now_unix_s)
        print(
            f"attempt {len(earlier) + 1} resumes after step {earlier[-1]['next_step']} "
            f"({earlier[-1]['repeated_s']:.0f} s of work are repeated)",
            flush=True,
        )
    mine = {"started_unix_s": now_unix_s, "queue_wait_s": job.queue_wait_s}
    write_text_atomically(path, json.dumps({"of": identity, "attempts": [*earlier, mine]}) + "\n")
    spent_s = sum(attempt["ran_s"] for attempt in earlier)
    return replace(
        job,
        origin_unix_s=job.origin_unix_s - spent_s,
        origin_s=job.origin_s - spent_s,
        queue_wait_s=(earlier or [mine])[0]["queue_wait_s"],
        earlier_attempts=tuple(earlier),
    )


def get_values_common_to_attempts(job: Job) -> dict[str, Any]:
    """Return the values that must be equal in all attempts of a cell."""
    identity = {"cell": asdict(job.cell), "settings": asdict(job.settings), "data": job.data}
    return json.loads(json.dumps(identity | {"cuda": job.use_cuda}))


def _read_resumable_attempts(path: Path, common_values: dict[str, Any]) -> list[dict[str, Any]]:
    try:
        kept = json.loads(path.read_text(encoding="utf-8"))
        return kept["attempts"] if kept["of"] == common_values else []
    except (OSError, ValueError, KeyError, TypeError):
        return []


def _record_attempt_end(
    attempt: dict[str, Any], job: Job, ended_unix_s: float, now_unix_s: float
) -> None:
    """Add the duration and the lost time in seconds to an attempt's entry, in place. The attempt has ended.

    The entry also gets `next_step`, the step after which the next attempt resumes.

    Args:
        attempt: Entry of the attempt in attempts.json.
        job: Job of the cell.
        ended_unix_s: End of the attempt in seconds since 1970.
        now_unix_s: Present time in seconds since 1970.
    """
    step = find_newest_common_checkpoint_step(job.folder, job.world_size)
    # With later checkpoints, workers might resume from checkpoints of different attempts.
    for rank in range(job.world_size):
        delete_later_checkpoints(get_checkpoint_folder(job.folder, rank), step or 0)
    begun = attempt["started_unix_s"]
    ended = min(max(ended_unix_s, begun), now_unix_s)
    kept = begun
    if step is not None:
        each = [get_checkpoint_folder(job.folder, rank) for rank in range(job.world_size)]
        kept = min(get_checkpoint_path(folder, step).stat().st_mtime for folder in each)
    attempt |= {
        "next_step": step or 0,
        "ran_s": ended - begun,
        "repeated_s": ended - min(max(kept, begun), ended),
        "between_s": now_unix_s - ended,
    }


def make_restarts_entry(job: Job, worker_results: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """Return the section `restarts` of the cell's record.

    Args:
        job: Job of the cell's last attempt.
        worker_results: Results of each worker.
    """
    checkpoints = [worker["checkpoints"] for worker in worker_results if worker.get("checkpoints")]
    trained = (
        p.start_s
        for p in read_phase_intervals(job.folder.list_phase_log_paths())
        if p.phase == "train"
    )
    first_s = min(trained, default=None)
    largest = {
        key: max((k[key] for k in checkpoints), default=0) for key in ("held_up_s", "written_s")
    }
    return {
        "count": len(job.earlier_attempts),
        "from_steps": [attempt["next_step"] for attempt in job.earlier_attempts],
        "repeated_s": sum(attempt["repeated_s"] for attempt in job.earlier_attempts),
        "between_s": sum(attempt["between_s"] for attempt in job.earlier_attempts),
        "until_step_s": None if first_s is None else first_s - job.earlier_attempts_s,
        "checkpoints": {
            "every": job.settings.get_extension_keys(Checkpoints).checkpoint_every,
            "count": max((k["count"] for k in checkpoints), default=0),
            "bytes": sum(k["bytes"] for k in checkpoints),
            **largest,
        },
    }
