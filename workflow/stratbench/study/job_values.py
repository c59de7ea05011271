"""Writes files that pass a run's config and other values to the run's jobs.

The command of a job has `--values FILE`, and `@NAME` in place of each value that is too long for a command
line. Both files are written before the first job starts. A job on SLURM thus uses the config of its
submission, even if config.yaml has changed since.
"""

from __future__ import annotations

import hashlib
import json
import re
import sys
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from stratbench.cell.files import replace_file_atomically
from stratbench.study import snakemake_internals as internals

OPTION = "--values"
#: The option in the command of a rule, where Snakemake replaces `{log:q}` by the path of the job's log.
OF_JOB = f"{OPTION} {{log:q}}.json"
#: Folder of the config files for jobs. A file's name is the hash of its content.
CONFIGS = Path(".snakemake/configs")


def save_config_for_jobs(workflow: Any) -> None:
    """Save a run's config to a file, which the run's jobs read instead of config.yaml.

    Args:
        workflow: Snakemake's workflow, before its first job.
    """
    text = json.dumps(internals.get_config(workflow), default=str)
    path = CONFIGS / f"{hashlib.sha256(text.encode()).hexdigest()[:16]}.json"
    with replace_file_atomically(path) as temporary:
        temporary.write_text(text, encoding="utf-8")
    internals.set_job_config(workflow, path)


def is_job_with_saved_config(workflow: Any) -> bool:
    """Return whether this process is a job that reads the config saved by `save_config_for_jobs`.

    `workflow` is the object of Snakemake that represents this process's run.
    """
    return any(
        Path(p).parent.parts[-2:] == CONFIGS.parts
        for p in internals.get_command_line_config_files(workflow)
    )


def write_job_values(jobs: Iterable[Any]) -> None:
    """Write the file of values for each Snakemake job whose command has the option `--values`."""
    for job in jobs:
        command = internals.get_rule_command(job)
        if OPTION in command:
            names = re.findall(r" @(\w+)", command)
            text = json.dumps({name: getattr(job.params, name) for name in names})
            # No fsync is needed: after a crash of the machine the jobs are planned again, with a new file.
            with replace_file_atomically(f"{job.log[0]}.json") as temporary:
                temporary.write_text(text, encoding="utf-8")


def insert_job_values(arguments: list[str]) -> list[str]:
    """Return a job's command-line arguments with each `@NAME` replaced by its value.

    The values come from the file that the option `--values` names.
    """
    if OPTION not in arguments:
        return arguments
    at = arguments.index(OPTION)
    path, others = Path(arguments[at + 1]), arguments[:at] + arguments[at + 2 :]
    try:
        values = {f"@{name}": value for name, value in json.loads(path.read_bytes()).items()}
    except FileNotFoundError:
        sys.exit(
            f"{path}: does not exist; start Snakemake without --no-hooks, and where this workflow is a "
            "module, call its `onstart` (docs/module.md)"
        )
    return [values.get(argument, argument) for argument in others]
