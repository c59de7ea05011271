"""Files that hand the values and config of a run to its jobs.

The command of a job has `--values FILE`, and `@NAME` in place of each value that is too long for a command
line. Both files are written before the first job starts. So a job on SLURM uses the config of its submission,
even if config.yaml has changed since.
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
#: The folder of the configs for jobs. Each file is named by its content.
CONFIGS = Path(".snakemake/configs")


def keep_config(workflow: Any) -> None:
    """Make the jobs of a run use its config in place of its files and options.

    Args:
        workflow: Snakemake's, before its first job.
    """
    text = json.dumps(internals.get_config(workflow), default=str)
    path = CONFIGS / f"{hashlib.sha256(text.encode()).hexdigest()[:16]}.json"
    with replacing(path) as temporary:
        temporary.write_text(text, encoding="utf-8")
    internals.give_config(workflow, path)


def is_given_config(workflow: Any) -> bool:
    """Return whether this process is a job that uses its run's config."""
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
    """Return a command line with each `@NAME` replaced by its value from the file."""
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
