"""The workflow in a folder of its own, run with the SLURM profile on the test cluster."""

from __future__ import annotations

import contextlib
import json
import os
import secrets
import signal
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import psutil
from cluster import SlurmCluster

from launching import LIMIT_S, phase_logs, until
from stratbench.train.forkserver import FOLDER_VARIABLE

sys.path.insert(0, str(Path(__file__).parents[1] / "workflow"))
from snakemake_forks import LOOK_VARIABLE, StartedSnakemake
from tiny_study import TIMEOUT_S, Workflow, tiny_config

PROFILE = "profiles/slurm/config.yaml"
#: Where the report is not what is tested.
CELLS_ONLY = ("--until", "train_cell")
#: Snakemake asks SLURM how its jobs are so often, in seconds; of itself ever less often, down to every 180 s.
LOOK_S = 2
#: More seconds than any test takes.
NEVER_S = 6000
#: A cell that trains until it is stopped, and sleeps most of the time: other tests need the cores. These
#: epochs take hours; workers with servers draw them all before their first step.
ENDLESS = {
    "epochs": 10_000,
    "warmup_steps": 1,
    "slowdown": {"workers": [0], "factor": 60},
    "time_limit_s": NEVER_S,
}


def study(experiments: dict[str, dict[str, Any]], **cluster: int) -> dict[str, Any]:
    """The tiny study with these experiments, each a change of a cell on one worker.

    A node has 24,000 MiB, so one node takes two of these cells at a time.
    """
    config = tiny_config()
    base = config["studies"]["tiny"]["experiments"]["second"]
    config["studies"]["tiny"]["experiments"] = {k: base | v for k, v in experiments.items()}
    config["cluster"] = {
        "gpus_per_node": 1,
        "cpus_per_gpu": 8,
        "mem_mib_per_gpu": 3000,
        "mem_mib_per_cpu_worker": 12000,
    } | cluster
    return config


class ClusterWorkflow(Workflow):
    """A copy of the workflow that runs on a test cluster."""

    def __init__(self, folder: Path, config: dict[str, Any], cluster: SlurmCluster) -> None:
        super().__init__(folder, config)
        self.cluster = cluster
        # A short name, as a socket's path must be. There is no such folder before `share_import`.
        self._warm = cluster.directory / f"warm-{secrets.token_hex(4)}"

    def command(self, *args: str) -> list[str]:
        return [sys.executable, "-m", "snakemake", "--profile", "profiles/slurm", *args]

    def environment(self) -> dict[str, str]:
        ours = super().environment()
        changed = {
            "XDG_CACHE_HOME": ours["XDG_CACHE_HOME"],
            FOLDER_VARIABLE: str(self._warm),
            LOOK_VARIABLE: str(LOOK_S),
        }
        return self.cluster.env | changed | self.variables

    def share_import(self, warm: Mapping[str, str], *experiments: str) -> None:
        """From now on let cells, or those of `experiments`, share the fork server of `warm`.

        For where what ends a job is not what is tested: their workers are its children then, and not
        processes of the job.
        """
        if experiments:
            logs = tuple(f"/logs/{name}/" for name in experiments)
            self.change_code(
                "workflow/stratbench/train/forkserver.py",
                "shared = _find_shared_server_address() if may_share else None",
                "shared = _find_shared_server_address() "
                f"if any(x in ' '.join(sys.argv) for x in {logs}) else None",
            )
        self._warm.symlink_to(warm[FOLDER_VARIABLE])

    def ask_sbatch_for(self, option: str) -> None:
        """Have each job submitted with one more option of sbatch."""
        line = "  # slurm_extra: \"'--exclusive'\""
        self.change_code(PROFILE, line, f"  slurm_extra: \"'{option}'\"")

    def finish(self, run: StartedSnakemake) -> str:
        """What a started Snakemake printed, once it has ended; killed and failed after TIMEOUT_S.

        In the `finally` of a test that fails it is killed at once: nothing may end it any more.
        """
        is_failing = sys.exc_info()[0] is not None
        with contextlib.suppress(subprocess.TimeoutExpired):
            return run.communicate(timeout=0 if is_failing else TIMEOUT_S)[0]
        os.killpg(run.pid, signal.SIGKILL)
        output, _ = run.communicate(timeout=LIMIT_S)
        assert is_failing, f"snakemake hangs after {TIMEOUT_S} s; it printed:\n{output}"
        return output

    def slurm_jobs(
        self, experiment: str | None = None, rule: str = "train_cell"
    ) -> list[dict[str, str]]:
        """This folder's SLURM jobs of a rule, ended ones too, by submission.

        Each with id, state, comment, nodes, gres.
        """
        fields = {"id": "%i", "state": "%T", "comment": "%k", "nodes": "%N", "gres": "%b"}
        form = "|".join([*fields.values(), "%Z"])
        lines = self.cluster.run("squeue", "-h", "-t", "all", "-S", "i", "-o", form).splitlines()
        rows = [line.split("|") for line in lines]
        jobs = [dict(zip(fields, row, strict=False)) for row in rows if row[-1] == str(self.folder)]
        wanted = f"rule_{rule}_wildcards_tiny_" + (f"{experiment}_" if experiment else "")
        return [job for job in jobs if job["comment"].startswith(wanted)]

    def reach_limit(self, job: str) -> None:
        """Have a running job's time limit be now.

        SLURM refuses a time that has passed by when it is read, and so a "now" at the end of a second.
        """

        def accepted() -> bool:
            try:
                self.cluster.run("scontrol", "update", f"JobId={job}", "EndTime=now")
            except RuntimeError as e:
                if "Invalid time specified" not in str(e):
                    raise
                return False
            return True

        until(accepted)

    def launcher(self, experiment: str) -> psutil.Process | None:
        """The launcher of the experiment's cell, if it runs."""
        for process in psutil.process_iter():
            try:
                command = process.cmdline()
                ours = "stratbench.train.launch" in command and process.cwd() == str(self.folder)
            except psutil.Error:
                continue
            if ours and f"/cells/{experiment}/" in command[command.index("--record") + 1]:
                return process
        return None

    def block_launcher(self, experiment: str) -> psutil.Process | None:
        """The launcher of the experiment's block, if it runs."""
        for process in psutil.process_iter():
            with contextlib.suppress(psutil.Error):
                command = process.cmdline()
                ours = "stratbench.extensions.verdict.block" in command and process.cwd() == str(
                    self.folder
                )
                if ours and f"/blocks/{experiment}/" in command[command.index("--out") + 1]:
                    return process
        return None

    def training_worker(self, experiment: str) -> psutil.Process | None:
        """The last worker of the experiment's cell, once all of its workers train."""
        logs = self.folder / "results" / "tiny" / "logs" / experiment
        phases = phase_logs(logs)
        try:
            if not phases or any('"train"' not in p.read_text() for p in phases):
                return None
        except FileNotFoundError:  # an earlier run's: its launcher has just cleared the folder
            return None
        workers = {}
        for process in psutil.process_iter():
            with contextlib.suppress(OSError):
                output = Path(f"/proc/{process.pid}/fd/1").readlink()
                if logs in output.parents and output.name.startswith("rank"):
                    workers[output.name] = process
        return workers[max(workers)] if len(workers) == len(phases) else None

    def cell_record(self, experiment: str) -> Path | None:
        """The record of an experiment's only cell, if there is one."""
        cells = self.folder / "results" / "tiny" / "cells" / experiment
        return next(cells.rglob("record.json"), None)

    def status(self, experiment: str) -> str | None:
        """The status in that record; None without one."""
        path = self.cell_record(experiment)
        return json.loads(path.read_text())["status"] if path else None
