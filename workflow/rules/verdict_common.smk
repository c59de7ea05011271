# Helpers of verdict.smk: the round, its blocks, and what of them is done before and after all jobs.
from stratbench.extensions.verdict.blocks import BLOCK_FILE, BLOCK_PATTERN
from stratbench.extensions.verdict.verdict_round import Round

BLOCK = f"{RESULTS}/{{study}}/blocks/{BLOCK_PATTERN}"
NEXT_ROUND = [sys.executable, *"-m stratbench.extensions.verdict.paired next".split()]
ROUND = Round(
    STUDY_CONFIG,
    STUDY,
    JOBS,
    NEXT_ROUND,
    is_job=not internals.is_planning_process(workflow),
)


def get_block_plan(wildcards):
    """The block of a verdict's round that a job's wildcards name."""
    return or_workflow_error(ROUND.get_block_plan, wildcards)


def block_request(wildcards):
    """What the block asks a scheduler for."""
    return ROUND.make_block_request(get_block_plan(wildcards))


def data_of_block(wildcards):
    """The data that all cells of a block are trained on. A block of other data is made anew."""
    plan = get_block_plan(wildcards)
    settings = JOBS.resolve_settings(plan.make_segment_cell(plan.order[0]))
    resume.retrain_results_of_changed_data(
        workflow, plan.get_result_folder(RESULTS) / BLOCK_FILE, settings
    )
    return prepared_data(plan.dataset)


def verdict_path():
    """The study's verdict, where there is one of the config's settings; else an empty text."""
    path = ROUND.file.with_name("verdict.json")
    return str(path) if ROUND.has_current_verdict else ""


def block_jobs():
    """Yield each planned block's job, its cells, and what it asks a scheduler for."""
    for job in internals.get_jobs(workflow, rules.run_block):
        if internals.is_planned_job(workflow, job):
            plan = get_block_plan(job.wildcards)
            yield job, list(
                map(plan.make_segment_cell, plan.order)
            ), ROUND.make_block_request(plan)


def begin_round():
    """Once the jobs are planned: keep the round for those of its jobs that run elsewhere."""
    if internals.get_jobs(workflow, rules.verdict):
        ROUND.write_round_file()


def end_round():
    """After a round: start the next, where the config says so and something is open."""
    if (
        internals.get_jobs(workflow, rules.verdict)
        and CONFIG["verdict"]["rounds"] == "all"
    ):
        if not ROUND.content["done"] and or_workflow_error(ROUND.is_followed_by_round):
            internals.restart_snakemake(workflow)


TRAINED_BY["run_block"] = get_block_plan
TRAINING_JOBS.append(block_jobs)
BEFORE_JOBS.append(begin_round)
AFTER_JOBS.append(end_round)
ADDED["audit"].inputs.append(verdict_path)  # its blocks are audited, too
ADDED["decide"].evidence["verdict"] = verdict_path
ADDED["report"].evidence["verdict"] = verdict_path
