# Verdicts: which strategy is fastest, from blocks of short segments instead of whole trainings. One run is
# one round; with `rounds: all` Snakemake starts itself again until all is decided or the budget is spent. No
# checkpoints: what a round runs follows from the blocks that were complete before it.
# Its helpers are in verdict_common.smk.


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
        time_limit_s=lambda w: int(
            ROUND.compute_segment_time_limit_s(get_block_plan(w)) or 0
        ),
        gpu_slots=1,
    params:
        # Other settings than those of a block that is there make it stale: it is measured again.
        trained=lambda w: json.dumps(
            ROUND.get_settings_in_common(get_block_plan(w)), sort_keys=True
        ),
        block=lambda w, input: json.dumps(get_block_plan(w).as_dict()),
        settings=lambda w, input: json.dumps(ROUND.get_cell_settings(get_block_plan(w))),
        data=lambda w, input: str(Path(input.data).parent),
        out=lambda w, output: str(Path(output.block).parent),
        logs=lambda w: str(get_block_plan(w).get_log_folder(RESULTS)),
    message:
        "measure block {wildcards.block} of {wildcards.study}/{wildcards.experiment}: {wildcards.model},"
        " workers: {wildcards.gpus}; log: {log}"
    shell:
        f"{FIND_PACKAGE}"
        f"exec python -m stratbench.extensions.verdict.block --parent $PPID {VALUES}"
        "--block @block --settings @settings --data @data --logs @logs"
        " --out {params.out:q} --time-limit-s {resources.time_limit_s}"
        " --nodes {resources.nodes} --cpus-per-node {resources.cpus_per_task}"
        " --server-cpus {resources.server_cpus}"
        " >> {log:q} 2>&1"


# One round, and what it decided. It has no output, so that it always runs.
rule verdict:
    input:
        lambda w: or_workflow_error(ROUND.list_files),
    log:
        f"{RESULTS}/{STUDY.name}/logs/verdict.log",
    localrule: True
    conda:
        ENV
    params:
        config=lambda w: json.dumps(STUDY_CONFIG, sort_keys=True),
        outlook=lambda w: or_workflow_error(lambda: ROUND.content)["outlook"],  # cost, and later rounds
    message:
        f"report the present verdicts of the study {STUDY.name}. {{params.outlook}}"
    shell:
        f"{PROGRAM}{VALUES}"
        "-m stratbench.extensions.verdict.paired tell --config @config 2>&1 | tee {log:q}"
