# The combinations of an experiment that are worth measuring: results/<study>/tune/config.yaml, a study for
# `verdict`. It has no output, so that it always runs.
rule tune:
    input:
        rules.plan.input,
    log:
        f"{RESULTS}/{STUDY.name}/logs/tune.log",
    localrule: True
    conda:
        ENV
    params:
        config=lambda w: json.dumps(STUDY_CONFIG),  # in its order: the first experiment is tuned
    message:
        f"select promising combinations of options for the study {STUDY.name}"
    shell:
        f"{PROGRAM}{VALUES}-m stratbench.extensions.tune --config @config 2>&1 | tee {{log:q}}"
