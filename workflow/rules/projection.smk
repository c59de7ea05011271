EVIDENCE["projection"] = lambda: existing("projection.csv")


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
        "-m stratbench.extensions.projection --config @config"
        " -m stratbench.extensions.projection.shown.section --table {params.table:q} 2>&1 | tee {log:q}"
