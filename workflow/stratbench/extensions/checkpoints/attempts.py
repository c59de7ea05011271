"""The attempts of a cell with checkpoints: where a new one resumes, and what it cost.

Each worker writes its own checkpoints, in a folder next to the run folder, which the next launcher empties.
The dates of its files show when a killed attempt ended. Nothing here imports torch.
"""

from __future__ import annotations

import json
import shutil
import time
from collections.abc import Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

from stratbench.cell.files import write_atomic
from stratbench.cell.run_folder import RunFolder, worker_name
from stratbench.extensions.checkpoints.checkpoints import forget, forget_beyond, path_of, steps_in
from stratbench.extensions.checkpoints.keys import Checkpoints
from stratbench.telemetry.timeline import read_phases
from stratbench.train.job import Job


def folder_of(run: RunFolder, rank: int) -> Path:
    """Return the folder of the checkpoints of worker `rank`."""
    return run.kept / worker_name(rank)


def common_step(run: RunFolder, workers: int) -> int | None:
    """Return the steps of the newest checkpoint that all workers have, or None without one."""
    each = [steps_in(folder_of(run, rank)) for rank in range(workers)]
    return max(set.intersection(*each), default=None)


def forget_older(run: RunFolder, rank: int, workers: int) -> None:
    """Delete a worker's checkpoints before the newest one that all workers have.

    No worker waits for another here: one that is behind has not written what others have.

    Args:
        run: Run folder of the cell.
        rank: Rank of this worker.
        workers: Number of workers.
    """
    if (step := common_step(run, workers)) is not None:
        forget(folder_of(run, rank), below=step)


def last_sign(run: RunFolder) -> float | None:
    """Return the date at which an attempt last wrote to its run folder, or None.

    The sampler of each node writes every second.
    """
    dates = [path.stat().st_mtime for path in run.path.glob("*") if path.is_file()]
    return max(dates, default=None)


def begin(job: Job, ended_unix_s: float | None) -> Job:
    """Return the job as the next attempt of its cell, with times from the first attempt's start.

    Time in which no attempt ran is left out of them. `ended_unix_s` is the end of the attempt before
    (`last_sign`). Attempts of other settings, data or devices are forgotten.
    """
    folder = job.folder.kept
    path, identity = folder / "attempts.json", identity_of(job)
    earlier = _read(path, identity) if ended_unix_s is not None else []
    now_unix_s = time.time()
    if not earlier:
        shutil.rmtree(folder, ignore_errors=True)
    else:
        _close(earlier[-1], job, ended_unix_s, now_unix_s)
        print(
            f"attempt {len(earlier) + 1}: it goes on after step {earlier[-1]['next_step']} "
            f"({earlier[-1]['repeated_s']:.0f} s of work are done again)",
            flush=True,
        )
    mine = {"started_unix_s": now_unix_s, "queue_wait_s": job.queue_wait_s}
    write_atomic(path, json.dumps({"of": identity, "attempts": [*earlier, mine]}) + "\n")
    spent_s = sum(attempt["ran_s"] for attempt in earlier)
    return replace(
        job,
        origin_unix_s=job.origin_unix_s - spent_s,
        origin_s=job.origin_s - spent_s,
        queue_wait_s=(earlier or [mine])[0]["queue_wait_s"],
        attempts=tuple(earlier),
    )


def identity_of(job: Job) -> dict[str, Any]:
    """Return what must be equal for an attempt to resume from another's checkpoints."""
    identity = {"cell": asdict(job.cell), "settings": asdict(job.settings), "data": job.data}
    return json.loads(json.dumps(identity | {"cuda": job.use_cuda}))


def _read(path: Path, identity: dict[str, Any]) -> list[dict[str, Any]]:
    try:
        kept = json.loads(path.read_text(encoding="utf-8"))
        return kept["attempts"] if kept["of"] == identity else []
    except (OSError, ValueError, KeyError, TypeError):
        return []


def _close(attempt: dict[str, Any], job: Job, ended_unix_s: float, now_unix_s: float) -> None:
    """Add to an attempt its end, its lost part, and where the next one resumes."""
    step = common_step(job.folder, job.world_size)
    for rank in range(job.world_size):  # else all might have one soon, each of another attempt
        forget_beyond(folder_of(job.folder, rank), step or 0)
    begun = attempt["started_unix_s"]
    ended = min(max(ended_unix_s, begun), now_unix_s)
    kept = begun
    if step is not None:
        each = [folder_of(job.folder, rank) for rank in range(job.world_size)]
        kept = min(path_of(folder, step).stat().st_mtime for folder in each)
    attempt |= {
        "next_step": step or 0,
        "ran_s": ended - begun,
        "repeated_s": ended - min(max(kept, begun), ended),
        "between_s": now_unix_s - ended,
    }


def entry_of(job: Job, workers: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """The record's `restarts`; `workers`: what each measured. Without attempts before, nothing was lost."""
    checkpoints = [worker["checkpoints"] for worker in workers if worker.get("checkpoints")]
    trained = (p.start_s for p in read_phases(job.folder.phase_logs()) if p.phase == "train")
    first_s = min(trained, default=None)
    largest = {
        key: max((k[key] for k in checkpoints), default=0) for key in ("held_up_s", "written_s")
    }
    return {
        "count": len(job.attempts),
        "from_steps": [attempt["next_step"] for attempt in job.attempts],
        "repeated_s": sum(attempt["repeated_s"] for attempt in job.attempts),
        "between_s": sum(attempt["between_s"] for attempt in job.attempts),
        "until_step_s": None if first_s is None else first_s - job.spent_s,
        "checkpoints": {
            "every": job.settings.of(Checkpoints).checkpoint_every,
            "count": max((k["count"] for k in checkpoints), default=0),
            "bytes": sum(k["bytes"] for k in checkpoints),
            **largest,
        },
    }
