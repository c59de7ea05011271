"""Elastic cells on the test cluster: their worker jobs, and what they leave of themselves."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import psutil
from cluster import SlurmCluster
from cluster_workflow import NEVER_S, ClusterWorkflow, study

from launching import until
from stratbench.cell.run_folder import RunFolder
from stratbench.extensions.elastic.run_files import RunFiles
from stratbench.extensions.elastic.servers.journal import read_journal

#: A cell of two workers.
SPLIT = {"strategies": ["ddp"], "gpus": [2], "elastic": True, "warmup_steps": 1}
SERVED = SPLIT | {"strategies": ["ps-ormo"], "lr": 0.002}
#: Of one that trains until it is stopped, and sleeps most of the time. These epochs take hours; a worker with
#: servers draws them all before its first step: of a million for a minute.
ENDLESS = {
    "epochs": 10_000,
    "slowdown": {"workers": [0, 1], "factor": 60},
    "time_limit_s": NEVER_S,
}


class Elastic:
    """A split synchronous cell, the only one of its experiment, and its SLURM jobs."""

    strategy = "ddp"

    def __init__(self, workflow: ClusterWorkflow, experiment: str) -> None:
        self.workflow, self.experiment = workflow, experiment
        self.cluster: SlurmCluster = workflow.cluster
        logs = workflow.folder / f"results/tiny/logs/{experiment}"
        self.run = RunFolder(logs / self.strategy / "vgg-compact/2gpu/rep0/run")

    def launcher(self) -> psutil.Process:
        """The launcher in the cell's own job."""
        return until(lambda: self.workflow.launcher(self.experiment))

    def coordinator(self) -> str:
        """The id of the cell's own job."""
        return self.workflow.slurm_jobs(self.experiment)[-1]["id"]

    def jobs(self, *states: str) -> list[str]:
        """The ids of the worker jobs, ended ones too, or of those in some states."""
        lines = self.cluster.run("squeue", "-h", "-t", "all", "-S", "i", "-o", "%i|%T|%k|%Z")
        rows = [line.split("|") for line in lines.splitlines()]
        ours = [r for r in rows if r[3] == str(self.workflow.folder) and r[2].startswith("worker ")]
        ours = [r for r in ours if f" of {self.experiment}/" in r[2]]
        return [r[0] for r in ours if not states or r[1] in states]

    def entries(self) -> list[dict[str, Any]]:
        """What the keeper has noted of worker jobs: at their submission, and at their end."""
        return list(
            map(json.loads, RunFiles(self.run).worker_jobs_path.read_text().split("\n")[:-1])
        )

    def job_of(self, number: int) -> str:
        """The id of the SLURM job of a worker."""
        return next(entry["id"] for entry in self.entries() if entry["number"] == number)

    def process_of(self, number: int) -> psutil.Process:
        """The process of a worker: SLURM's nodes are all on this machine."""
        job = str(self.run.job_path)
        for process in psutil.process_iter(["cmdline"]):
            words = process.info["cmdline"] or []
            is_worker = words[-2:] == [job, str(number)] and "srun" not in words[0]
            if is_worker and "stratbench.extensions.elastic.worker" in words:
                return process
        raise AssertionError(f"worker {number} has no process")

    def incarnation(self) -> dict[str, Any]:
        """What the last launcher has kept of its members."""
        incarnations = RunFiles(self.run).list_member_history_paths()
        return json.loads(incarnations[-1].read_text()) if incarnations else {"generations": []}

    def came(self) -> set[int]:
        """The numbers of all workers that the last launcher has let in."""
        return set(map(int, self.incarnation().get("event_times_by_member", ())))

    def present(self) -> set[int]:
        """The numbers of the workers that train now."""
        last = next(iter(self.incarnation()["generations"][-1:]), {"began_unix_s": None})
        goes_on = last["began_unix_s"] is not None and last["ended_unix_s"] is None
        return set(last["members"]) if goes_on and not last["broken"] else set()

    def gone(self, how: str) -> dict[int, float]:
        """When it was noted of each worker that it was "left" or "lost"; 0 where only that it was."""
        return dict.fromkeys(self.incarnation()[f"{how}_members"], 0.0)

    def wait_for_new(self, before: set[int]) -> set[int]:
        """Wait until two train of whom none, or not all, are `before`; these."""
        return until(lambda: len(now := self.present()) == 2 and now != before and now)


class Served(Elastic):
    """The same with parameter servers."""

    strategy = "ps-ormo"

    def events(self, kind: str) -> list[dict[str, Any]]:
        """What the servers noted of this kind."""
        return [e for e in read_journal(RunFiles(self.run).servers_dir) if e["event"] == kind]

    def wait_for(self, kind: str, count: int) -> list[dict[str, Any]]:
        """Wait until the servers have noted so many events of a kind; these."""
        return until(lambda: len(noted := self.events(kind)) >= count and noted)

    def present(self) -> set[int]:
        here: set[int] = set()
        for event in read_journal(RunFiles(self.run).servers_dir):
            if event["event"] == "incarnation":
                here.clear()
            elif event["event"] == "begin":
                here.add(event["worker"])
            elif event["event"] in ("leave", "loss"):
                here.discard(event["worker"])
        return here

    def gone(self, how: str) -> dict[int, float]:
        kind = {"left": "leave", "lost": "loss"}[how]
        return {event["worker"]: event["at_unix_s"] for event in self.events(kind)}


def two_cells(
    folder: Path, cluster: SlurmCluster, changes: dict[str, Any], **of_cluster: Any
) -> tuple[ClusterWorkflow, Elastic, Served]:
    """A workflow with a cell of split synchronous workers and one of servers."""
    config = study(
        {"split": SPLIT | changes, "served": SERVED | changes},
        mem_mib_per_cpu_worker=1500,
        **of_cluster,
    )
    workflow = ClusterWorkflow(folder, config, cluster)
    return workflow, Elastic(workflow, "split"), Served(workflow, "served")
