# Planning: what the study will need, take and cost, told before anything runs: `snakemake plan`. It trains
# nothing and needs no GPU; it has no output, so that it always runs.
PLANNED_CONFIG = json.dumps(
    CONFIG | {"studies": {STUDY.name: CONFIG["studies"][STUDY.name]}}, sort_keys=True
)


rule plan:
    log:
        f"{RESULTS}/{STUDY.name}/logs/plan.log",
    localrule: True
    conda:
        ENV
    params:
        config=PLANNED_CONFIG,
    shell:
        "python -m stratbench.plan --config {params.config:q} 2>&1 | tee {log:q}"


# What the plan predicts of every finished cell beside what was measured.
rule compare_with_prediction:
    input:
        f"{RESULTS}/{{study}}/cells.csv",
    output:
        f"{RESULTS}/{{study}}/prediction.csv",
    log:
        f"{RESULTS}/{{study}}/logs/compare_with_prediction.log",
    localrule: True
    conda:
        ENV
    params:
        config=PLANNED_CONFIG,
    shell:
        "python -m stratbench.plan.compare --config {params.config:q} --out {output:q}"
        " > {log:q} 2>&1"
