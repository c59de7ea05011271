"""Files by which a job gets what the run had that submitted it: its values, and the whole config.

The command of a job has `--values FILE`, and `@NAME` in place of each value that is too long for a command
line. Both files are written before the first job starts. So a job on SLURM trains what it was submitted with,
whatever has become of config.yaml since.
"""

from __future__ import annotations

import hashlib
import json
import re
import sys
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from stratbench.cell.files import replacing
from stratbench.study import snakemake_internals as internals

OPTION = "--values"
#: The option in the command of a rule.
OF_JOB = f"{OPTION} {{log:q}}.json"
#: The folder of the configs that jobs are given. Each file is named by its content.
CONFIGS = Path(".snakemake/configs")


def keep_config(workflow: Any) -> None:
    """Have the jobs of a run be given its config, in place of files and options that name it.

    Args:
        workflow: Snakemake's, before its first job.
    """
    text = json.dumps(internals.get_config(workflow), default=str)
    path = CONFIGS / f"{hashlib.sha256(text.encode()).hexdigest()[:16]}.json"
    with replacing(path) as temporary:
        temporary.write_text(text, encoding="utf-8")
    internals.give_config(workflow, path)


def is_given_config(workflow: Any) -> bool:
    """Return whether this process is a job that was given its run's config."""
    return any(
        Path(p).parent.parts[-2:] == CONFIGS.parts
        for p in internals.get_named_config_files(workflow)
    )


def write_values(jobs: Iterable[Any]) -> None:
    """Write the file of each of Snakemake's `jobs` whose command names one."""
    for job in jobs:
        command = internals.get_command(job)
        if OPTION in command:
            names = re.findall(r" @(\w+)", command)
            text = json.dumps({name: getattr(job.params, name) for name in names})
            # Not synchronized to the disk: after a crash the jobs are planned again.
            with replacing(f"{job.log[0]}.json") as temporary:
                temporary.write_text(text, encoding="utf-8")


def insert_values(arguments: list[str]) -> list[str]:
    """Return a command line with the values of its file in place of their names."""
    if OPTION not in arguments:
        return arguments
    at = arguments.index(OPTION)
    path, others = Path(arguments[at + 1]), arguments[:at] + arguments[at + 2 :]
    try:
        values = {f"@{name}": value for name, value in json.loads(path.read_bytes()).items()}
    except FileNotFoundError:
        sys.exit(
            f"{path}: is not there; start Snakemake without --no-hooks, and where this workflow is a module, "
            "call its `onstart` (docs/module.md)"
        )
    return [values.get(argument, argument) for argument in others]
