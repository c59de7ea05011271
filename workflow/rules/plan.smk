# Planning: what the study will need, take and cost, told before anything runs: `snakemake plan`. It trains
# nothing and needs no GPU; it has no output, so that it always runs.
rule plan:
    log:
        f"{RESULTS}/{STUDY.name}/logs/plan.log",
    localrule: True
    conda:
        ENV
    params:
        config=json.dumps(
            CONFIG | {"studies": {STUDY.name: CONFIG["studies"][STUDY.name]}},
            sort_keys=True,
        ),
    shell:
        "python -m stratbench.plan --config {params.config:q} 2>&1 | tee {log:q}"
