from stratbench.extensions.plan.device_rates import list_configured_gpus
from stratbench.extensions.plan.start_check import find_network_faults

or_workflow_error(list_configured_gpus, CLUSTER)
START_CHECKS.append(find_network_faults)
ADDED["report"].inputs.append(lambda: f"{RESULTS}/{STUDY.name}/prediction.csv")


# Planning: what the study will need, take and cost, told before anything runs: `snakemake plan`. It trains
# nothing and needs no GPU; it has no output, so that it always runs.
rule plan:
    input:
        # Nothing is known of these before they were read.
        [prepared_data(name) for name in STUDY.list_own_data_sets()],
    log:
        f"{RESULTS}/{STUDY.name}/logs/plan.log",
    localrule: True
    conda:
        ENV
    params:
        config=lambda w: json.dumps(STUDY_CONFIG, sort_keys=True),
        # The profile's, where there is one.
        partition=lambda w, resources: str(resources.get("slurm_partition") or "*"),
    message:
        f"plan the memory, time and cost of the study {STUDY.name}"
    shell:
        f"{PROGRAM}{VALUES}"
        "-m stratbench.extensions.plan --config @config --partition {params.partition:q}"
        " 2>&1 | tee {log:q}"


# The check: which strategy would refuse which network and why, in seconds, before anything is planned or
# trained. Its exit code says whether one would. It has no output, so that it always runs.
rule check:
    input:
        rules.plan.input,
    log:
        f"{RESULTS}/{STUDY.name}/logs/check.log",
    localrule: True
    conda:
        ENV
    params:
        config=rules.plan.params.config,
        partition=rules.plan.params.partition,
    message:
        f"check whether the strategies of the study {STUDY.name} support its models"
    shell:
        f"{PROGRAM}{VALUES}"
        "-m stratbench.extensions.plan --check --config @config --partition {params.partition:q}"
        " 2>&1 | tee {log:q}"


# What the plan predicts of every finished cell, beside what was measured.
rule compare_with_prediction:
    input:
        f"{RESULTS}/{{study}}/cells.csv",
    output:
        f"{RESULTS}/{{study}}/prediction.csv",
    log:
        f"{RESULTS}/{{study}}/logs/compare_with_prediction.log",
    benchmark:
        f"{RESULTS}/{{study}}/benchmarks/compare_with_prediction.tsv"
    localrule: True
    conda:
        ENV
    params:
        # Only what a prediction depends on: a changed time limit makes nothing again, and a changed setting
        # makes new records.
        cluster=lambda w: json.dumps(CLUSTER, sort_keys=True),
        config=lambda w, input: json.dumps(
            {key: CONFIG[key] for key in ("results", "datasets", "cluster")}
            | STUDY.build_training_config(),
            sort_keys=True,
        ),
    message:
        "compare the plan's predictions for the study {wildcards.study} with the measurements"
    shell:
        f"{PROGRAM}{VALUES}"
        "-m stratbench.extensions.plan.against_records --config @config --out {output:q}"
        " > {log:q} 2>&1"
