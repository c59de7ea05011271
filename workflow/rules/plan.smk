from stratbench.plan.start_check import faults_of_networks

START_CHECKS.append(faults_of_networks)


# Planning: what the study will need, take and cost, told before anything runs: `snakemake plan`. It trains
# nothing and needs no GPU; it has no output, so that it always runs.
rule plan:
    input:
        # Nothing is known of these before they were read.
        [prepared_data(name) for name in STUDY.own_data()],
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
        f"plan the study {STUDY.name}"
    shell:
        f"{PROGRAM}{VALUES}"
        "-m stratbench.plan --config @config --partition {params.partition:q}"
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
        f"check the networks of the study {STUDY.name}"
    shell:
        f"{PROGRAM}{VALUES}"
        "-m stratbench.plan --check --config @config --partition {params.partition:q}"
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
            | STUDY.as_trained(),
            sort_keys=True,
        ),
    message:
        "compare what the plan predicts of {wildcards.study} with what was measured"
    shell:
        f"{PROGRAM}{VALUES}"
        "-m stratbench.plan.against_records --config @config --out {output:q}"
        " > {log:q} 2>&1"


# Step times on counts that nobody has, from the study's records, and from its links.csv where `links` has
# made one: projection.csv, which the report shows, and an answer in words. It has no output, so that it always
# runs.
rule project:
    input:
        rules.plan.input,
    log:
        f"{RESULTS}/{STUDY.name}/logs/project.log",
    localrule: True
    conda:
        ENV
    params:
        config=rules.plan.params.config,
        table=lambda w: f"{RESULTS}/{STUDY.name}/projection.csv",
    message:
        f"project the study {STUDY.name} to more workers"
    shell:
        f"{PROGRAM}{VALUES}"
        "-m stratbench.plan.projection --config @config"
        " -m stratbench.analysis.report.projection --table {params.table:q} 2>&1 | tee {log:q}"


# What links cost, measured by processes of their own: on this machine, or on SLURM by a job on two nodes
# where a partition has them. `links` takes its output away, so that it measures whenever that is asked for.
rule links_measured:
    output:
        f"{RESULTS}/{STUDY.name}/links/measured",
    log:
        f"{RESULTS}/{STUDY.name}/logs/links_measured.log",
    conda:
        ENV
    resources:
        # As of a cell's job, in train.smk.
        nodes=lambda w: links_request().nodes,
        gres=lambda w: links_request().gres,
        tasks=lambda w: links_request().nodes,
        tasks_per_gpu=0,
        mpi=lambda w: "srun" if links_request().nodes > 1 else "",
        cpus_per_task=lambda w: links_request().cpus,
        mem_mb=lambda w: links_request().mem_mib,
        runtime=lambda w: links_request().runtime_min,
        gpu_slots=1,
    params:
        arguments=lambda w: JOBS.links_arguments(),
        folder=lambda w: f"{RESULTS}/{STUDY.name}/links",
    message:
        f"measure the links for the study {STUDY.name}, on nodes: {{resources.nodes}}; log: {{log}}"
    shell:
        f"{PROGRAM}"
        "-m stratbench.train.links.measure {params.arguments:q} --out {params.folder:q} 2>&1 | tee {log:q} && touch {output:q}"


# And what they cost, in words; the report shows it with figures.
rule links:
    input:
        rules.links_measured.output,
    log:
        f"{RESULTS}/{STUDY.name}/logs/links.log",
    localrule: True
    conda:
        ENV
    params:
        folder=rules.links_measured.params.folder,
    message:
        f"what the links of the study {STUDY.name} cost"
    shell:
        "rm {input:q}; "
        f"{PROGRAM}"
        "-m stratbench.analysis.report.links --folder {params.folder:q} 2>&1 | tee {log:q}"
