# Whether `decide` asks for a number of GPUs on which some experiment trains nothing.
ASKS_PROJECTION = CONFIG["decide"]["gpus"] is not None and any(
    CONFIG["decide"]["gpus"] not in e.expand_cells_arguments["gpus"]
    for e in STUDY.experiments.values()
)
ADDED["report"].inputs.append(lambda: existing("projection.csv"))


if ASKS_PROJECTION:
    PROJECTED = (
        "-m stratbench.extensions.projection --config @asking"
        f" --most {CONFIG['decide']['gpus']} --out {{params.out:q}}/asked_projection.csv"
    )
    ADDED["decide"].before.append(PROJECTED)
    ADDED["decide"].params["asking"] = lambda w: json.dumps(
        STUDY_CONFIG, sort_keys=True
    )
    ADDED["decide"].options.append(
        "--evidence projection={params.out:q}/asked_projection.csv"
    )
    ADDED["decide"].inputs.append(
        lambda: f"{RESULTS}/{STUDY.name}/asked_projection.csv"
    )

    # Before a decision, from the records that are there.
    rule project_to_asked:
        input:
            added_inputs("projection"),
            cells=f"{RESULTS}/{{study}}/cells.csv",
        output:
            f"{RESULTS}/{{study}}/asked_projection.csv",
        log:
            f"{RESULTS}/{{study}}/logs/project_to_asked.log",
        benchmark:
            f"{RESULTS}/{{study}}/benchmarks/project_to_asked.tsv"
        localrule: True
        conda:
            ENV
        params:
            out=study_dir,
            asking=ADDED["decide"].params["asking"],
        message:
            f"project the step times of the study {{wildcards.study}} to {CONFIG['decide']['gpus']} workers"
        shell:
            f"{PROGRAM}{VALUES}{PROJECTED} > {{log:q}} 2>&1"


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
        f"project the step times of the study {STUDY.name} to more workers"
    shell:
        f"{PROGRAM}{VALUES}"
        "-m stratbench.extensions.projection --config @config"
        " -m stratbench.extensions.projection.shown.section --table {params.table:q} 2>&1 | tee {log:q}"
