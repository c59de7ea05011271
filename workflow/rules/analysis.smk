# Analysis: the records of a study merged into tables, figures and a report, each in one process.
from stratbench.analysis.report import brief
from stratbench.cell.text.words import wrap_lines

TABLES = f"{RESULTS}/{{study}}/tables"
FIGURES = f"{RESULTS}/{{study}}/plots"


report: "../report/workflow.rst"


onsuccess:
    if internals.get_jobs(workflow, rules.write_report):
        print(
            wrap_lines(brief.iter_study_summary_lines(Path(RESULTS, STUDY.name))),
            flush=True,
        )
    for end in AFTER_JOBS:
        end()


onerror:
    if failed := list(
        reasons.iter_failure_summary(failed_jobs(), RESULTS, BEGUN_S)
    ):
        print(wrap_lines(failed), file=sys.stderr, flush=True)


# The command line of each stage, once for all rules. `study`: results/<study>; `out`: the folder of what
# the stages make of its records, itself or one below it. Extensions add to each.
STAGES = {
    "collect": "-m stratbench.analysis.records.collect --expected {params.study:q}/cells.json"
    " --skipped @skipped --targets @targets --study @trained"
    " --records-root {params.study:q}/cells"
    " --out {params.out:q}/cells.csv --epochs-out {params.out:q}/epochs.csv",
    "tables": "-m stratbench.analysis.tables.tables --cells {params.out:q}/cells.csv"
    " --summary-out {params.out:q}/summary.csv --out-dir {params.out:q}/tables",
    "decide": "-m stratbench.analysis.decision.decide --cells {params.out:q}/cells.csv"
    " --constraints @constraints --evidence {params.evidence:q}"
    " --out {params.out:q}/decision.csv --answers-out {params.out:q}/answers.json",
    "plots": "-m stratbench.analysis.figures.plots --cells {params.out:q}/cells.csv"
    " --epochs {params.out:q}/epochs.csv --summary {params.out:q}/summary.csv"
    " --answers {params.out:q}/answers.json"
    " --study-dir {params.study:q} --out-dir {params.out:q}/plots",
    "report": "-m stratbench.analysis.report.report --folder {params.out:q}"
    " --study-dir {params.study:q} --evidence {params.evidence:q}"
    " --description={params.description:q}",
}
STAGES = {name: " ".join([line, *ADDED[name].options]) for name, line in STAGES.items()}


rule merge_records:
    input:
        cells=f"{RESULTS}/{{study}}/cells.json",
        records=JOBS.list_record_paths(),
    output:
        cells=f"{RESULTS}/{{study}}/cells.csv",
        epochs=f"{RESULTS}/{{study}}/epochs.csv",
    log:
        f"{RESULTS}/{{study}}/logs/merge_records.log",
    benchmark:
        f"{RESULTS}/{{study}}/benchmarks/merge_records.tsv"
    localrule: True
    conda:
        ENV
    params:
        study=study_dir,
        out=study_dir,
        skipped=skipped,
        targets=targets,
        trained=as_trained,
    message:
        "merge the records of the study {wildcards.study}"
    shell:
        PROGRAM + VALUES + STAGES["collect"] + " > {log:q} 2>&1"


rule make_tables:
    input:
        added_inputs("tables"),
        cells=f"{RESULTS}/{{study}}/cells.csv",
    output:
        summary=f"{RESULTS}/{{study}}/summary.csv",
        # A folder: what no cell of an experiment has measured has no table.
        tables=directory(TABLES),
    log:
        f"{RESULTS}/{{study}}/logs/make_tables.log",
    benchmark:
        f"{RESULTS}/{{study}}/benchmarks/make_tables.tsv"
    localrule: True
    conda:
        ENV
    params:
        study=study_dir,
        out=study_dir,
    message:
        "write the tables of the study {wildcards.study}"
    shell:
        PROGRAM + STAGES["tables"] + " > {log:q} 2>&1"


rule make_plots:
    input:
        cells=f"{RESULTS}/{{study}}/cells.csv",
        epochs=f"{RESULTS}/{{study}}/epochs.csv",
        summary=f"{RESULTS}/{{study}}/summary.csv",
        answers=f"{RESULTS}/{{study}}/answers.json",
    output:
        # A folder: which figures there are depends on what the records have.
        plots=report(
            directory(FIGURES),
            patterns=["{experiment}/{model}/{plot}.svg"],
            caption="../report/figure.rst",
            category="Experiment {experiment}",
            labels={"model": "{model}", "figure": "{plot}"},
        ),
    log:
        f"{RESULTS}/{{study}}/logs/make_plots.log",
    benchmark:
        f"{RESULTS}/{{study}}/benchmarks/make_plots.tsv"
    localrule: True
    conda:
        ENV
    params:
        study=study_dir,
        out=study_dir,
    message:
        "draw the figures of the study {wildcards.study}"
    shell:
        PROGRAM + STAGES["plots"] + " > {log:q} 2>&1"


rule make_decision:
    input:
        added_inputs("decide"),
        cells=f"{RESULTS}/{{study}}/cells.csv",
    output:
        f"{RESULTS}/{{study}}/decision.csv",
        f"{RESULTS}/{{study}}/answers.json",
    log:
        f"{RESULTS}/{{study}}/logs/make_decision.log",
    benchmark:
        f"{RESULTS}/{{study}}/benchmarks/make_decision.tsv"
    localrule: True
    conda:
        ENV
    params:
        study=study_dir,
        out=study_dir,
        constraints=constraints,
        evidence=evidence("decide"),
    message:
        "rank the strategies of the study {wildcards.study}"
    shell:
        PROGRAM + VALUES + STAGES["decide"] + " > {log:q} 2>&1"


rule write_report:
    input:
        added_inputs("report"),
        f"{RESULTS}/{{study}}/answers.json",
        cells=f"{RESULTS}/{{study}}/cells.csv",
        summary=f"{RESULTS}/{{study}}/summary.csv",
        plots=FIGURES,
        tables=TABLES,
    output:
        report(
            f"{RESULTS}/{{study}}/report.html",
            caption="../report/report.rst",
            category="Report",
            labels={"figure": "The whole report"},
        ),
        ADDED["report"].outputs,
    log:
        f"{RESULTS}/{{study}}/logs/write_report.log",
    benchmark:
        f"{RESULTS}/{{study}}/benchmarks/write_report.tsv"
    localrule: True
    conda:
        ENV
    params:
        study=study_dir,
        out=study_dir,
        description=description,
        evidence=evidence("report"),
    message:
        "write the report of the study {wildcards.study}"
    shell:
        PROGRAM + STAGES["report"] + " > {log:q} 2>&1"


# Merges what is there and lists what is missing: `snakemake partial`. The records are no inputs, so that
# it trains nothing; it has no output, so that it always runs. While another run holds the lock: --nolock.
rule partial:
    input:
        f"{RESULTS}/{STUDY.name}/cells.json",
    log:
        f"{RESULTS}/{STUDY.name}/logs/partial.log",
    localrule: True
    conda:
        ENV
    params:
        **added_params(STAGES),
        study=lambda w, input: str(Path(input[0]).parent),
        out=lambda w, input: str(Path(input[0]).parent / "partial"),
        skipped=skipped,
        targets=targets,
        trained=as_trained,
        description=description,
        constraints=constraints,
        evidence=evidence("report"),
    message:
        f"merge the existing records of the study {STUDY.name}"
    shell:
        PROGRAM
        + VALUES
        + "--hold {params.out:q} "
        + in_one_process(STAGES, STAGES)
        + " 2>&1 | tee {log:q}"


# Ranks the strategies from the records that are there, under the constraints `decide` of the config:
# `snakemake -c1 decide --config 'decide={gpus: 2}'`. Like `partial` it trains nothing and always runs.
rule decide:
    input:
        f"{RESULTS}/{STUDY.name}/cells.json",
    log:
        f"{RESULTS}/{STUDY.name}/logs/decide.log",
    localrule: True
    conda:
        ENV
    params:
        **added_params(["decide"]),
        study=lambda w, input: str(Path(input[0]).parent),
        out=lambda w, input: str(Path(input[0]).parent / "decision"),
        skipped=skipped,
        targets=targets,
        trained=as_trained,
        constraints=constraints,
        evidence=evidence("decide"),
    message:
        f"rank the strategies of the study {STUDY.name} by its existing records"
    shell:
        f"set -o pipefail; {FIND_PACKAGE}("
        f"mkdir -p {{params.out:q}}"
        f" && {RUN}{VALUES}--hold {{params.out:q}} {in_one_process(['collect'], STAGES)}"
        " > {params.out:q}/records.txt"
        f" && {RUN}{VALUES}--hold {{params.out:q}}"
        f" {in_one_process(['decide'], STAGES)}"
        ") 2>&1 | tee {log:q}"
