"""Wraps Snakemake's undocumented names, in one module to check when Snakemake is upgraded.

Two parts of Snakemake are replaced while it runs: the class of its executor and the `run` of its scheduler.
In each function `workflow`, `job` and `rule` are Snakemake's objects; a rule is `rules.NAME`.
"""

from __future__ import annotations

import logging
import os
import re
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from textwrap import dedent
from threading import Thread
from typing import Any


def is_planning_process(workflow: Any) -> bool:
    """Return whether this Snakemake process plans the run instead of running one job."""
    return workflow.is_main_process


def runs_jobs_locally(workflow: Any) -> bool:
    """Return whether jobs run on this machine."""
    return workflow.local_exec


def submits_jobs_to_slurm(workflow: Any) -> bool:
    """Return whether jobs are submitted to SLURM."""
    return not workflow.local_exec and workflow.executor_plugin.name == "slurm"


def uses_conda(workflow: Any) -> bool:
    """Return whether jobs have a Python of a conda environment (`--sdm conda`)."""
    from snakemake.settings.types import DeploymentMethod

    return DeploymentMethod.CONDA in workflow.deployment_settings.deployment_method


def changes_path_by_prefix(workflow: Any, path: str) -> bool:
    """Return whether a module's `prefix:` changes `path`."""
    return workflow.modifier.path_modifier.replace_prefix(path) != path


def get_config_files(workflow: Any) -> Sequence[Path]:
    """Return all config files that Snakemake reads."""
    return workflow.configfiles


def get_command_line_config_files(workflow: Any) -> Sequence[Path]:
    """Return the config files that the command line names (`--configfile`)."""
    return workflow.overwrite_configfiles


def get_config(workflow: Any) -> dict[str, Any]:
    return workflow.globals["config"]


def set_job_config(workflow: Any, path: Path) -> None:
    """Make jobs read the config from `path` only, ignoring the run's config files and options."""
    settings = workflow.config_settings
    settings.configfiles, settings.config_args = [path.absolute()], []


def get_job_settings(workflow: Any) -> Any | None:
    """Return Snakemake's settings of remote jobs, with the profile's `precommand`, or None."""
    return workflow.remote_execution_settings


def is_job_of_rule(job: Any, rule: Any) -> bool:
    return job.rule.name == rule.rule.name


def get_jobs(workflow: Any, rule: Any) -> list[Any]:
    """Return the rule's jobs in the job graph (DAG), including jobs that need not run."""
    return [job for job in workflow.dag.jobs if is_job_of_rule(job, rule)]


def is_planned_job(workflow: Any, job: Any) -> bool:
    return workflow.dag.needrun(job)


def iter_planned_jobs(workflow: Any) -> Iterator[Any]:
    """Yield all jobs that Snakemake is going to run."""
    yield from workflow.dag.needrun_jobs()


def iter_failed_jobs(workflow: Any) -> Iterator[Any]:
    yield from workflow.scheduler.failed


def get_rule_command(job: Any) -> str:
    """Return the command of the job's rule before wildcards and parameters are filled in."""
    return job.rule.shellcmd or ""


def had_missing_output(workflow: Any, job: Any) -> bool:
    """Return whether a job was planned because one of its output files was missing."""
    return bool(workflow.dag.reason(job).missing_output)


def is_forced_file(workflow: Any, path: str) -> bool:
    """Return whether Snakemake must make the file `path` again in any case."""
    return path in workflow.dag.forcefiles


def force_file(workflow: Any, path: str) -> None:
    """Make Snakemake create the file `path` again. This must be called while jobs are planned."""
    workflow.dag.forcefiles.add(path)


def has_incomplete_files(workflow: Any, job: Any) -> bool:
    """Return whether Snakemake regards the job's files as incomplete.

    Snakemake does so if it was killed while the job ran.
    """
    return bool(workflow.async_run(workflow.persistence.incomplete(job)))


def has_metadata(workflow: Any, job: Any) -> bool:
    """Return whether Snakemake has stored metadata on how the job's files were made."""
    return workflow.persistence.has_metadata(job)


def mark_job_finished(workflow: Any, job: Any) -> None:
    """Make Snakemake store that the job has created its output files."""
    workflow.async_run(workflow.persistence.finished(job))


def run_snakemake_with_handler(handler: logging.Handler) -> None:
    """Run Snakemake on this process's arguments with a log handler. Exit with its exit code."""
    import snakemake.cli

    # Snakemake's own logger is `snakemake.logging`, whose handlers Snakemake clears.
    logging.getLogger("snakemake").addHandler(handler)
    snakemake.cli.main()


def remove_places_from_error(message: str) -> str:
    """Return an error of the rules without the file, line and traceback that Snakemake adds.

    Other messages are returned unchanged.
    """
    of_rules = re.search(
        r'^ *WorkflowError\b[^\n]*:\n(.*?)(?:^Wildcards:|^Traceback:|^  File "|\Z)',
        message,
        re.MULTILINE | re.DOTALL,
    )
    return dedent(of_rules[1]).strip() if of_rules else message


def restart_snakemake(workflow: Any) -> None:
    """Restart Snakemake in this process, so that it plans again with the existing files."""
    workflow.persistence.unlock()
    sys.stderr.flush()
    os.execv(sys.executable, [sys.executable, "-m", "snakemake", *sys.argv[1:]])


def end_run(workflow: Any) -> None:
    """End the run as Snakemake does at a SIGTERM; signal handlers may call this function.

    Snakemake's own handler takes a lock, and would deadlock if the main thread holds this lock.
    """
    Thread(target=workflow.scheduler.exit_gracefully).start()


def start_jobs_by_priority(workflow: Any) -> None:
    """Make Snakemake start the jobs that it chooses together in the order of their priorities.

    Snakemake chooses jobs by priority, but starts the chosen ones in any order, which on SLURM becomes the
    order of the queue. This must be called before the first job.
    """
    run = workflow.scheduler.run

    def run_jobs_in_order(jobs: Sequence[Any], *args: Any, **kwargs: Any) -> Any:
        return run(sorted(jobs, key=lambda job: -job.priority), *args, **kwargs)

    workflow.scheduler.run = run_jobs_in_order


def extend_executor(workflow: Any, class_with_methods: type) -> Any:
    """Override methods of Snakemake's executor by those of a class, and return the executor."""
    executor = workflow.scheduler._executor
    executor.__class__ = type("ExtendedExecutor", (class_with_methods, type(executor)), {})
    return executor


def fail_job_silently(workflow: Any, job: Any) -> None:
    """Report to the scheduler that a job has failed, without printing its command line."""
    workflow.scheduler.error_callback(job)


def exclude_nodes(executor: Any, node_names: str) -> None:
    """Make the SLURM plugin exclude `node_names` from all later submissions."""
    if hasattr(executor, "_failed_nodes"):
        executor._failed_nodes.add(node_names)
