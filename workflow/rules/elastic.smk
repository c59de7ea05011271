from stratbench.extensions.elastic.jobs.worker_job import WorkerJob


def worker_job_of(cell, resources):
    """What each worker job of an elastic cell asks SLURM for, as JSON; empty for other cells and without SLURM.

    Worker jobs have the partition, account and the like of the cell's own job. Only in a job that SLURM runs is
    Snakemake not the main process.
    """
    settings = JOBS.resolve_settings(cell)
    if "elastic" not in settings.more or internals.is_planning_process(workflow):
        return ""
    asked = JOBS.build_job_request(cell).worker
    return WorkerJob.from_request(
        asked, resources, CLUSTER["worker_partition"]
    ).as_json()


WORKER_JOBS.append(worker_job_of)
