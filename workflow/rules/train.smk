import signal

from stratbench.study import job_values, order, resume
from stratbench.study.slurm.job_requests import Submission, check_and_follow_submissions
from stratbench.train import forkserver

TRAINED_BY["train_cell"] = cell_of


# Runs after the jobs are planned and before the first is submitted; not in a dry run, and not inside a job.
onstart:
    signal.signal(signal.SIGTERM, lambda *_: internals.end_run(workflow))
    for begin in BEFORE_JOBS:
        begin()
    training = internals.get_jobs(workflow, rules.train_cell)
    planned = [job for job in training if internals.is_planned_job(workflow, job)]
    cells = sorted((cell_of(job.wildcards), job) for job in planned)
    trained = [cell for cell, _ in cells]
    submissions = [
        Submission(
            job,
            cell,
            JOBS.resolve_settings(cell),
            JOBS.build_job_request(cell),
            JOBS.estimate_max_time_s(cell),
        )
        for cell, job in cells
    ]
    for further in TRAINING_JOBS:
        for job, of_job, request in further():
            planned.append(job)
            trained += of_job
            settings = JOBS.resolve_settings(of_job[0])
            submissions.append(Submission(job, of_job[0], settings, request))
    if lacking := missing_needs(trained):
        raise WorkflowError("\n".join(lacking))
    if internals.submits_jobs_to_slurm(workflow) and (
        unheld := check_and_follow_submissions(workflow, submissions)
    ):
        raise WorkflowError("\n".join(unheld))
    if not internals.runs_jobs_locally(workflow):
        # Snakemake does not know its SLURM jobs again after it was killed.
        live_jobs.wait_for_earlier_jobs(workflow, planned)
    resume.report_finished_jobs(workflow, training)
    internals.start_jobs_by_priority(workflow)
    job_values.save_config_for_jobs(workflow)
    job_values.write_job_values(internals.iter_planned_jobs(workflow))
    if internals.runs_jobs_locally(workflow) and submissions:
        forkserver.share_fork_server_until_exit()


# Training: one job a cell. Oom, timeout and divergence are results; anything else fails the job.
# No `benchmark:`. Snakemake would see the launcher alone, since workers live under the fork server or on
# other nodes; and reading the memory of processes disturbs what is measured in them.
rule train_cell:
    input:
        data=data_of_cell,
    output:
        record=f"{RESULTS}/{CELL}/record.json",
        timeline=f"{RESULTS}/{CELL}/timeline.csv",
    log:
        f"{RESULTS}/{LOGS}.log",
    # Repeat after repeat, shuffled within; no reason to train again.
    priority: lambda w: order.compute_job_priority(cell_of(w))
    conda:
        ENV
    resources:
        # Not parameters: asking for other nodes or more time does not retrain what has finished.
        nodes=lambda w: cell_request(w).nodes,
        gres=lambda w: cell_request(w).gres,
        # One task a node, which the launcher starts itself: SLURM's plugin must neither derive tasks
        # from GPUs nor wrap the job in an srun of its own, which it does where `mpi` is not set.
        tasks=lambda w: cell_request(w).nodes,
        tasks_per_gpu=0,
        mpi=lambda w: "srun" if cell_request(w).nodes > 1 else "",
        cpus_per_task=lambda w: cell_request(w).cpus,
        server_cpus=lambda w: cell_request(w).server_cpus,
        mem_mb=lambda w: cell_request(w).mem_mib,
        runtime=lambda w: cell_request(w).runtime_min,
        time_limit_s=lambda w: int(STUDY.time_limit_s(cell_of(w)) or 0),
        # Workers that are jobs of their own, at most so many at a time, which this job submits; and in words.
        worker_jobs=lambda w: cell_request(w).workers,
        as_jobs=lambda w: (" (jobs of their own)" if cell_request(w).workers else ""),
        # The record says how many repeats were planned; more of them retrain none.
        repeats=lambda w: STUDY.experiments[w.experiment].expand_cells_arguments[
            "repeats"
        ],
        gpu_slots=1,
    params:
        **setting_parameters(),
        cell=lambda w: json.dumps(cell_of(w).as_dict()),
        # What depends on `input` is no reason to run again: the parameters above are, one by one.
        settings=lambda w, input: JOBS.resolve_settings(cell_of(w)).as_json(),
        data=lambda w, input: str(Path(input.data).parent),
        worker_job=lambda w, resources: "".join(
            ask(cell_of(w), resources) for ask in WORKER_JOBS
        ),
        logs=lambda w: str(cell_of(w).log_dir(RESULTS)),
    message:
        "train {wildcards.study}/{wildcards.experiment}: {wildcards.strategy}, {wildcards.model},"
        " workers: {wildcards.gpus}{resources.as_jobs}, repeat {wildcards.repeat}; log: {log}"
    # The launcher takes its shell's place, so that no shell can be killed in front of it, and ends with
    # the Snakemake that runs it here: on SLURM that is the job's own, not the one that has submitted it.
    # It empties its log once it holds the cell.
    shell:
        f"{FIND_PACKAGE}"
        f"exec python -m stratbench.train.launch --parent $PPID {VALUES}"
        "--cell @cell --settings @settings --data @data --logs @logs"
        " --record {output.record:q} --timeline {output.timeline:q}"
        " --time-limit-s {resources.time_limit_s} --repeats {resources.repeats} --nodes {resources.nodes}"
        " --cpus-per-node {resources.cpus_per_task} --server-cpus {resources.server_cpus}"
        " --worker-job={params.worker_job:q}"
        " >> {log:q} 2>&1"


rule list_cells:
    output:
        f"{RESULTS}/{{study}}/cells.json",
    log:
        f"{RESULTS}/{{study}}/logs/list_cells.log",
    localrule: True
    conda:
        ENV
    params:
        matrices=json.dumps(
            [e.expand_cells_arguments for e in STUDY.experiments.values()]
        ),
    message:
        "list the cells of the study {wildcards.study}"
    shell:
        f"{PROGRAM}{VALUES}"
        f"-m stratbench.study.listing @matrices --out {{output:q}}{TO_LOG}"
