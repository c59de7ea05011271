"""Tells the user which jobs SLURM will never start, and why.

It looks before anything is submitted, when SLURM refuses a job, and while jobs are pending.
"""

from __future__ import annotations

import logging
import re
import threading
import time
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from stratbench.cell.coordinates import Cell
from stratbench.cell.settings import Settings
from stratbench.study.resources import JobRequest
from stratbench.study.slurm import nodes
from stratbench.study.slurm.commands import printed_by
from stratbench.study.slurm.live_jobs import comment_of, tell
from stratbench.study.slurm.unstarted_jobs import explain_unstarted

#: The time between two looks at the pending jobs, and how long a job must have waited, in seconds.
LOOK_S = 20
PATIENCE_S = 60
#: Reasons for pending that only a person can remove: what SLURM calls them, and what to do.
FOR_EVER = {
    r"PartitionConfig|PartitionNodeLimit|PartitionTimeLimit|BadConstraints": (
        "no node of the partition has what it asks for, or its limits forbid it: change `cluster` or the "
        "experiment's time_limit_s in config.yaml, or partition and constraint in the profile"
    ),
    r"InvalidAccount|AccountNotAllowed|InvalidQOS|QOSNotAllowed": (
        "change slurm_account, qos or slurm_partition in the profile"
    ),
    r"PartitionDown|PartitionInactive": "the partition takes no jobs: name another in the profile",
    r"JobHeld\w*|launch failed requeued held": "it is held: scontrol release JOB, or cancel it",
    r"(QOS|Assoc)\w*(PerJob|PerNode|MaxWall|TimeLimit|ResourceLimit)\w*|QOSMin\w*|MaxMemPerLimit": (
        "your QOS or association allows one job less: change `cluster` or the experiment's time_limit_s "
        "in config.yaml, or qos and slurm_account in the profile"
    ),
}
#: Limits on all jobs of a user or an account together: they pass when other jobs end.
SHARED_LIMITS = r"(QOS|Assoc|Max)\w+"


def submitted_request(resources: Any) -> JobRequest:
    """The request of a Snakemake job to SLURM, including the profile's changes."""
    gres = str(resources.get("gres") or "")
    types = list(nodes.gpu_types(gres))
    return JobRequest(
        nodes=int(resources.get("nodes") or 1),
        gpus=nodes.count_gpus(gres),
        gpu_type=types[0] if len(types) == 1 else None,
        cpus=int(resources.get("cpus_per_task") or 1),
        mem_mib=int(resources.get("mem_mb") or 0),
        runtime_min=int(resources.get("runtime") or 0),
    )


#: Snakemake's job, its cell and settings, and the request that the config makes for it.
Submission = tuple[Any, Cell, Settings, JobRequest]


def before_submission(workflow: Any, jobs: Sequence[Submission]) -> list[str]:
    """Sentences on why no node can hold some jobs; if none, starts to report those that fail to start.

    `workflow` is Snakemake's, about to submit to SLURM. With another scheduler this does nothing.
    """
    if workflow.local_exec or workflow.executor_plugin.name != "slurm":
        return []
    # The plugin chooses among the partitions of such a file, and this function does not read it.
    anywhere = getattr(workflow.executor_settings, "partition_config", None) is not None
    offered = nodes.cluster_nodes()
    refused_cells = refusals(jobs, offered, anywhere)
    if not refused_cells:
        partitions = {"*" if anywhere else j.resources.get("slurm_partition") for j, *_ in jobs}
        there = [n for p in partitions for n in nodes.nodes_of_partition(offered, p)]
        if mixed := nodes.describe_types(there, (submitted_request(j.resources) for j, *_ in jobs)):
            tell(mixed)
        asks = {
            str(job.output[0]): nodes.describe_request(cell, submitted_request(job.resources))
            for job, cell, _, _ in jobs
        }
        messages = logging.getLogger("snakemake.logging")
        messages.addFilter(RefusalFilter(asks))
        messages.addFilter(explain_unstarted)
        made = {comment_of(j.rule.name, list(j.wildcards)): str(j.output[0]) for j, *_ in jobs}
        watch(made, Path.cwd())
    return nodes.lines_of_refusals(refused_cells)


def refusals(
    jobs: Iterable[Submission], offered: list[nodes.Node], anywhere: bool
) -> dict[Cell, str]:
    """The reasons why no node can hold a job, by its cell. `anywhere`: it may run in any partition."""
    reasons = {}
    for job, cell, settings, from_config in jobs:
        asked = submitted_request(job.resources)
        partition = "*" if anywhere else job.resources.get("slurm_partition")
        in_profile = _plain(asked) != _plain(from_config)
        sentence = nodes.refusal(
            cell,
            settings,
            asked if in_profile else from_config,
            nodes.nodes_of_partition(offered, partition),
            in_profile,
        )
        if sentence is None and from_config.worker:  # its workers may go to another partition
            sentence = nodes.refusal(cell, settings, from_config.worker, offered)
        if sentence:
            reasons[cell] = sentence
    return reasons


def _plain(asked: JobRequest) -> tuple[Any, ...]:
    gpus = asked.gpus, asked.gpu_type
    return asked.nodes, *gpus, asked.cpus, asked.mem_mib, asked.runtime_min


# ---------------------------------------------------------------- a refused sbatch


class RefusalFilter(logging.Filter):
    """Replaces the report of a refused sbatch, a page of its command line, by two sentences."""

    def __init__(self, asks: Mapping[str, str]) -> None:
        """`asks`: the request of each job, in words, by the first file that the job makes."""
        super().__init__()
        self._asks = asks

    def filter(self, record: logging.LogRecord) -> bool:
        message = getattr(record, "rule_msg", None)
        why = refusal_by_sbatch(message) if isinstance(message, str) else None
        if why is not None:
            asks = next(
                (self._asks[o] for o in getattr(record, "output", ()) if o in self._asks), None
            )
            record.rule_msg = f"SLURM refuses it: {why}." + (f" {asks}." if asks else "")
            record.shellcmd = None
        return True


def refusal_by_sbatch(message: str) -> str | None:
    """The reason why sbatch refused a job, from the SLURM plugin's report; None for other messages."""
    match = re.match(
        r"SLURM sbatch failed\. The error message was '(.*?)'\.\n\s+sbatch call:",
        message,
        re.DOTALL,
    )
    if match is None:
        return None
    lines = [line.removeprefix("sbatch: ").strip() for line in match[1].splitlines()]
    return "; ".join(line.removeprefix("error: ").rstrip(".") for line in lines if line)


# ---------------------------------------------------------------- pending for ever


def watch(cells: Mapping[str, str], directory: Path) -> None:
    """Looks at the pending jobs of `directory` until this process ends, and reports those that are stuck.

    `cells`: the file that a job makes, by the job's comment. Runs in a thread, so nothing waits for it.
    """
    seen: dict[tuple[str, str], float] = {}

    def look_for_ever() -> None:
        reported: set[str] = set()
        while True:
            time.sleep(LOOK_S)
            for job, sentence in newly_stuck(seen, cells, directory, time.monotonic()):
                if job not in reported:
                    reported.add(job)
                    tell(sentence)

    threading.Thread(target=look_for_ever, name="pending jobs", daemon=True).start()


def newly_stuck(
    seen: dict[tuple[str, str], float],
    cells: Mapping[str, str],
    directory: Path,
    now_s: float,
) -> list[tuple[str, str]]:
    """(job id, sentence) of each job that has waited PATIENCE_S for a reason that does not pass.

    `seen` keeps the time at which each job was first seen with its reason. Empty if SLURM does not
    answer.
    """
    shown = printed_by(["squeue", "--me", "--noheader", "--format=%i|%Z|%T|%r|%k"])
    if shown is None:
        return []
    stuck = dict(stuck_jobs(shown, directory))
    sentences = []
    for (job, comment), (reason, remedy) in stuck.items():
        since_s = seen.setdefault((job, reason), now_s)
        if comment in cells and now_s - since_s >= PATIENCE_S:
            sentences.append(
                (
                    job,
                    f"SLURM job {job} ({cells[comment]}) waits for a reason that does not pass by "
                    f"itself, {reason}: {remedy.replace('JOB', job)}; scancel {job} gives it up",
                )
            )
    for key in seen.keys() - {(job, why) for (job, _), (why, _) in stuck.items()}:
        del seen[key]
    return sentences


def stuck_jobs(text: str, directory: Path) -> Iterable[tuple[tuple[str, str], tuple[str, str]]]:
    """((job id, comment), (reason, remedy)) of the pending jobs of `directory` that will not start.

    `text` is the output of squeue. A limit on all jobs together counts only while no job of the user
    runs.
    """
    rows = [line.split("|", 4) for line in text.splitlines() if line.count("|") >= 4]
    running = any(state in ("RUNNING", "COMPLETING", "CONFIGURING") for _, _, state, _, _ in rows)
    here = directory.resolve()
    for job, folder, state, reason, comment in rows:
        if state != "PENDING" or Path(folder).resolve() != here:
            continue
        remedy = next((r for p, r in FOR_EVER.items() if re.fullmatch(p, reason)), None)
        if remedy is None and not running and re.fullmatch(SHARED_LIMITS, reason):
            remedy = "your QOS or association allows no more, and no job of yours runs"
        if remedy is not None:
            yield (job, comment), (reason, remedy)
