"""Explains why a SLURM job ended before its Snakemake rule began, and what to do about it."""

from __future__ import annotations

import re
from collections.abc import Sequence
from pathlib import Path

from stratbench.study.slurm.commands import read_command_output

#: Messages of a shell and of SLURM about a missing program or folder.
_MISSING = re.compile(
    r"(/\S+): (?:not found|No such file or directory)|couldn't chdir to `(.+?)': No such file"
)


def explain_unstarted_rule(logs: Sequence[Path]) -> str | None:
    """Return why a SLURM job ended before its Snakemake rule began. None if the rule began.

    The text names the node and the missing path.

    Args:
        logs: Logs of the rule, followed by SLURM's log of the job, whose name is the job's number.
    """
    *own, slurm_log = logs or [Path()]
    if not slurm_log.stem.isdecimal() or any(log.exists() for log in own):
        return None
    job = slurm_log.stem
    shown = read_command_output(["scontrol", "--oneliner", "show", "job", job]) or ""
    host = re.search(r"\bBatchHost=(\S+)", shown)
    if host is None:  # the job has never started, or SLURM does not say where
        return None
    began = f"SLURM job {job} began on {host[1]}"
    if not slurm_log.exists():
        return (
            f"{began} and wrote no log; if {host[1]} cannot read {Path.cwd()}, move this folder to a file "
            "system that all nodes share"
        )
    missing = _MISSING.search(slurm_log.read_text(encoding="utf-8", errors="replace"))
    path = missing and (missing[1] or missing[2])
    if path is None:
        return None
    if Path(path).name.startswith("python"):
        return (
            f"{began}, which does not have {path}; create the Python environment on a file system that all "
            "nodes share, or have each job load it by `precommand` in the profile"
        )
    return f"{began}, which does not have {path}; put it on a file system that all nodes share"
