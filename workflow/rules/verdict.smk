# Verdicts: which strategy is fastest, from blocks of short segments instead of whole trainings. One run is
# one round; with `rounds: all` Snakemake starts itself again until all is decided or the budget is spent. No
# checkpoints: what a round runs follows from the blocks that were complete before it.
from stratbench.cell.blocks import BLOCK_FILE, BLOCK_PATTERN
from stratbench.study.verdict_round import Round

BLOCK = f"{RESULTS}/{{study}}/blocks/{BLOCK_PATTERN}"
NEXT_ROUND = [sys.executable, *"-m stratbench.analysis.race next".split()]
ROUND = Round(
    STUDY_CONFIG, STUDY, JOBS, NEXT_ROUND, is_job=not internals.is_main(workflow)
)


def block_of(wildcards):
    """The block of a verdict's round that a job's wildcards name."""
    return or_workflow_error(ROUND.block_of, wildcards)


def block_request(wildcards):
    """What the block asks a scheduler for."""
    return ROUND.request_of(block_of(wildcards))


def data_of_block(wildcards):
    """The data that all cells of a block are trained on. A block of other data is made anew."""
    plan = block_of(wildcards)
    settings = JOBS.settings_of(plan.cell(plan.order[0]))
    resume.forget_other_data(workflow, plan.folder(RESULTS) / BLOCK_FILE, settings)
    return prepared_data(plan.dataset)


def told_verdict():
    """The study's verdict, where there is one of the config's settings; else an empty text."""
    path = ROUND.file.with_name("verdict.json")
    return str(path) if ROUND.has_current_verdict else ""


def block_jobs():
    """Yield each planned block's job, its cells, and what it asks a scheduler for."""
    for job in internals.get_jobs(workflow, rules.run_block):
        if internals.is_planned(workflow, job):
            plan = block_of(job.wildcards)
            yield job, list(map(plan.cell, plan.order)), ROUND.request_of(plan)


def begin_round():
    """Once the jobs are planned: keep the round for those of its jobs that run elsewhere."""
    if internals.get_jobs(workflow, rules.verdict):
        ROUND.keep()


def end_round():
    """After a round: start the next, where the config says so and something is open."""
    if (
        internals.get_jobs(workflow, rules.verdict)
        and CONFIG["verdict"]["rounds"] == "all"
    ):
        if not ROUND.content["done"] and or_workflow_error(ROUND.goes_on):
            internals.restart(workflow)


TRAINED_BY["run_block"] = block_of
TRAINING_JOBS.append(block_jobs)
BEFORE_JOBS.append(begin_round)
AFTER_JOBS.append(end_round)
EVIDENCE["verdict"] = told_verdict


# One job a block, in one allocation. Out of memory, a time limit and divergence of a segment are results;
# anything else fails the job, and the block is repeated whole, in the same order.
rule run_block:
    input:
        data=data_of_block,
    output:
        block=f"{BLOCK}/block.json",
        segments=directory(f"{BLOCK}/segments"),
    log:
        f"{RESULTS}/{{study}}/logs/blocks/{BLOCK_PATTERN}.log",
    conda:
        ENV
    resources:
        # As of a cell's job, in train.smk.
        nodes=lambda w: block_request(w).nodes,
        gres=lambda w: block_request(w).gres,
        tasks=lambda w: block_request(w).nodes,
        tasks_per_gpu=0,
        mpi=lambda w: "srun" if block_request(w).nodes > 1 else "",
        cpus_per_task=lambda w: block_request(w).cpus,
        server_cpus=lambda w: block_request(w).server_cpus,
        mem_mb=lambda w: block_request(w).mem_mib,
        runtime=lambda w: block_request(w).runtime_min,
        time_limit_s=lambda w: int(ROUND.limit_s(block_of(w)) or 0),
        gpu_slots=1,
    params:
        # Other settings than those of a block that is there make it stale: it is measured again.
        trained=lambda w: json.dumps(ROUND.trained(block_of(w)), sort_keys=True),
        block=lambda w, input: json.dumps(block_of(w).as_dict()),
        settings=lambda w, input: json.dumps(ROUND.settings_of(block_of(w))),
        data=lambda w, input: str(Path(input.data).parent),
        out=lambda w, output: str(Path(output.block).parent),
        logs=lambda w: str(block_of(w).log_dir(RESULTS)),
    message:
        "block {wildcards.block} of {wildcards.study}/{wildcards.experiment}: {wildcards.model},"
        " workers: {wildcards.gpus}; log: {log}"
    shell:
        f"{FIND_PACKAGE}"
        f"exec python -m stratbench.train.block --parent $PPID {VALUES}"
        "--block @block --settings @settings --data @data --logs @logs"
        " --out {params.out:q} --time-limit-s {resources.time_limit_s}"
        " --nodes {resources.nodes} --cpus-per-node {resources.cpus_per_task}"
        " --server-cpus {resources.server_cpus}"
        " >> {log:q} 2>&1"


# One round, and what it decided. It has no output, so that it always runs.
rule verdict:
    input:
        lambda w: or_workflow_error(ROUND.files),
    log:
        f"{RESULTS}/{STUDY.name}/logs/verdict.log",
    localrule: True
    conda:
        ENV
    params:
        config=lambda w: json.dumps(STUDY_CONFIG, sort_keys=True),
        outlook=lambda w: or_workflow_error(lambda: ROUND.outlook),  # all that a dry run can say
    message:
        f"tell what is decided of the study {STUDY.name}. {{params.outlook}}"
    shell:
        f"{PROGRAM}{VALUES}"
        "-m stratbench.analysis.race tell --config @config 2>&1 | tee {log:q}"
