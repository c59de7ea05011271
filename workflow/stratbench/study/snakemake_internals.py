"""Undocumented names of Snakemake, in one module that an upgrade has to check.

Two things of Snakemake are replaced while it runs: the class of its executor and the `run` of its scheduler.
In each function `workflow` is Snakemake's, and so are `job` and `rule`; a rule is `rules.NAME`.
"""

from __future__ import annotations

import logging
import os
import sys
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from threading import Thread
from typing import Any

# ------------------------------------------------------------ how it was started


def is_main(workflow: Any) -> bool:
    """Return whether this process plans the run, and is not one of its jobs."""
    return workflow.is_main_process


def is_local(workflow: Any) -> bool:
    """Return whether jobs run on this machine."""
    return workflow.local_exec


def is_on_slurm(workflow: Any) -> bool:
    """Return whether jobs are submitted to SLURM."""
    return not workflow.local_exec and workflow.executor_plugin.name == "slurm"


def uses_conda(workflow: Any) -> bool:
    """Return whether jobs have a Python of a conda environment (`--sdm conda`)."""
    from snakemake.settings.types import DeploymentMethod

    return DeploymentMethod.CONDA in workflow.deployment_settings.deployment_method


def has_prefix(workflow: Any, path: str) -> bool:
    """Return whether a module's `prefix:` changes `path`."""
    return workflow.modifier.path_modifier.replace_prefix(path) != path


def get_config_files(workflow: Any) -> Sequence[Path]:
    """Return all files of the config."""
    return workflow.configfiles


def get_named_config_files(workflow: Any) -> Sequence[Path]:
    """Return the files that the command line names (`--configfile`)."""
    return workflow.overwrite_configfiles


def get_config(workflow: Any) -> dict[str, Any]:
    return workflow.globals["config"]


def give_config(workflow: Any, path: Path) -> None:
    """Have jobs read the config from `path`, and from no file or option of this run."""
    settings = workflow.config_settings
    settings.configfiles, settings.config_args = [path.absolute()], []


def get_job_settings(workflow: Any) -> Any | None:
    """Return the settings of jobs elsewhere, with the `precommand` of the profile.

    Return None if there are none.
    """
    return workflow.remote_execution_settings


# ------------------------------------------------------------ planned and failed jobs


def is_of_rule(job: Any, rule: Any) -> bool:
    return job.rule.name == rule.rule.name


def get_jobs(workflow: Any, rule: Any) -> list[Any]:
    """Return the rule's jobs in the graph of jobs, also those that need not run."""
    return [job for job in workflow.dag.jobs if is_of_rule(job, rule)]


def is_planned(workflow: Any, job: Any) -> bool:
    return workflow.dag.needrun(job)


def iter_planned(workflow: Any) -> Iterator[Any]:
    """Yield all jobs that are to run."""
    yield from workflow.dag.needrun_jobs()


def iter_failed(workflow: Any) -> Iterator[Any]:
    yield from workflow.scheduler.failed


def get_command(job: Any) -> str:
    """Return the command of the job's rule before wildcards and parameters are filled in."""
    return job.rule.shellcmd or ""


def lacks_output(workflow: Any, job: Any) -> bool:
    """Return whether a job is planned since a file of its output was not there."""
    return bool(workflow.dag.reason(job).missing_output)


def is_forced(workflow: Any, path: str) -> bool:
    """Return whether Snakemake must make the file `path` again in any case."""
    return path in workflow.dag.forcefiles


def force(workflow: Any, path: str) -> None:
    """Have Snakemake make the file `path` again. Called while the jobs are planned."""
    workflow.dag.forcefiles.add(path)


# ------------------------------------------------------------ what Snakemake knows of files


def is_cut_off(workflow: Any, job: Any) -> bool:
    """Return whether Snakemake was killed while the job ran: it holds its files for incomplete."""
    return bool(workflow.async_run(workflow.persistence.incomplete(job)))


def is_known(workflow: Any, job: Any) -> bool:
    """Return whether Snakemake knows how the job's files were made."""
    return workflow.persistence.has_metadata(job)


def note_finished(workflow: Any, job: Any) -> None:
    """Have Snakemake note that the job has made its files."""
    workflow.async_run(workflow.persistence.finished(job))


# ------------------------------------------------------------ the run


def run_with(handler: logging.Handler) -> None:
    """Run Snakemake on this process's arguments, with a handler of its log.

    End with its exit code.
    """
    import snakemake.cli

    # Snakemake clears the handlers of its own logger, `snakemake.logging`.
    logging.getLogger("snakemake").addHandler(handler)
    snakemake.cli.main()


def restart(workflow: Any) -> None:
    """Restart Snakemake in this process, so that it plans with the files that now exist."""
    workflow.persistence.unlock()
    sys.stderr.flush()
    os.execv(sys.executable, [sys.executable, "-m", "snakemake", *sys.argv[1:]])


def end_run(workflow: Any) -> None:
    """End the run as Snakemake does at a SIGTERM.

    Callable from a signal handler.

    Snakemake's own handler takes a lock, and would deadlock if its main thread holds it.
    """
    Thread(target=workflow.scheduler.exit_gracefully).start()


def start_sorted(workflow: Any, key: Callable[[Any], Any]) -> None:
    """Have jobs that Snakemake has chosen together start in the order of `key`."""
    run = workflow.scheduler.run

    def run_sorted(jobs: Sequence[Any], *args: Any, **kwargs: Any) -> Any:
        return run(sorted(jobs, key=key), *args, **kwargs)

    workflow.scheduler.run = run_sorted


def extend_executor(workflow: Any, methods: type) -> Any:
    """Put the methods of a class in front of those of Snakemake's executor.

    Return the executor.
    """
    executor = workflow.scheduler._executor
    executor.__class__ = type("ExtendedExecutor", (methods, type(executor)), {})
    return executor


def fail_silently(workflow: Any, job: Any) -> None:
    """Report to the scheduler that a job has failed, without printing its command line."""
    workflow.scheduler.error_callback(job)


def avoid_nodes(executor: Any, nodes: str) -> None:
    """Have the SLURM plugin ask for other nodes than these from now on."""
    if hasattr(executor, "_failed_nodes"):
        executor._failed_nodes.add(nodes)
