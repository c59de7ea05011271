# Analysis: the records of a study merged into tables, figures and a report, each in one process.
from stratbench.analysis.measures import PLOTS

TABLES = f"{RESULTS}/{{study}}/tables"
FIGURES = f"{RESULTS}/{{study}}/plots"


report: "../report/workflow.rst"


rule merge_records:
    input:
        cells=f"{RESULTS}/{{study}}/cells.json",
        records=record_paths(),
    output:
        cells=f"{RESULTS}/{{study}}/cells.csv",
        epochs=f"{RESULTS}/{{study}}/epochs.csv",
    log:
        f"{RESULTS}/{{study}}/logs/merge_records.log",
    localrule: True
    conda:
        ENV
    params:
        records=lambda w: f"{RESULTS}/{w.study}/cells",
        skipped=skipped,
        targets=targets,
        trained=as_trained,
    shell:
        "python -m stratbench.analysis.collect --expected {input.cells:q}"
        " --skipped {params.skipped:q} --targets {params.targets:q} --study {params.trained:q}"
        " --records-root {params.records:q} --out {output.cells:q} --epochs-out {output.epochs:q}"
        " > {log:q} 2>&1"


rule audit_records:
    input:
        cells=f"{RESULTS}/{{study}}/cells.csv",
        records=record_paths(),
    output:
        f"{RESULTS}/{{study}}/audit.csv",
    log:
        f"{RESULTS}/{{study}}/logs/audit_records.log",
    localrule: True
    conda:
        ENV
    params:
        study=lambda w: f"{RESULTS}/{w.study}",
    shell:
        "python -m stratbench.analysis.audit --cells {input.cells:q} --study-dir {params.study:q}"
        " --out {output:q} > {log:q} 2>&1"


# The published tables under the same rules; they are the same for every study.
rule audit_paper:
    output:
        f"{RESULTS}/{{study}}/paper_audit.csv",
    log:
        f"{RESULTS}/{{study}}/logs/audit_paper.log",
    localrule: True
    conda:
        ENV
    shell:
        "python -m stratbench.analysis.paper_audit --out {output:q} > {log:q} 2>&1"


rule make_tables:
    input:
        cells=f"{RESULTS}/{{study}}/cells.csv",
        audit=f"{RESULTS}/{{study}}/audit.csv",
    output:
        summary=f"{RESULTS}/{{study}}/summary.csv",
        # A folder: what no cell of an experiment has measured has no table.
        tables=directory(TABLES),
    log:
        f"{RESULTS}/{{study}}/logs/make_tables.log",
    localrule: True
    conda:
        ENV
    shell:
        "python -m stratbench.analysis.tables --cells {input.cells:q} --audit {input.audit:q}"
        " --summary-out {output.summary:q} --out-dir {output.tables:q} > {log:q} 2>&1"


rule make_plots:
    input:
        cells=f"{RESULTS}/{{study}}/cells.csv",
        epochs=f"{RESULTS}/{{study}}/epochs.csv",
        summary=f"{RESULTS}/{{study}}/summary.csv",
    output:
        svg=[
            report(
                f"{FIGURES}/{experiment}/{plot}.svg",
                caption=f"../report/{plot}.rst",
                category=f"Experiment {experiment}",
                labels={"figure": PLOTS[plot].title},
            )
            for experiment in STUDY.experiments
            for plot in PLOTS
        ],
        others=[
            f"{FIGURES}/{experiment}/{plot}.{kind}"
            for experiment in STUDY.experiments
            for plot in PLOTS
            for kind in ("png", "pdf")
        ],
    log:
        f"{RESULTS}/{{study}}/logs/make_plots.log",
    localrule: True
    conda:
        ENV
    params:
        plots=lambda w: FIGURES.format(study=w.study),
        study=lambda w: f"{RESULTS}/{w.study}",
    shell:
        "python -m stratbench.analysis.plots --cells {input.cells:q} --epochs {input.epochs:q}"
        " --summary {input.summary:q} --study-dir {params.study:q} --out-dir {params.plots:q}"
        " > {log:q} 2>&1"


rule make_decision:
    input:
        cells=f"{RESULTS}/{{study}}/cells.csv",
        audit=f"{RESULTS}/{{study}}/audit.csv",
    output:
        f"{RESULTS}/{{study}}/decision.csv",
    log:
        f"{RESULTS}/{{study}}/logs/make_decision.log",
    localrule: True
    conda:
        ENV
    params:
        constraints=constraints,
    shell:
        "python -m stratbench.analysis.decide --cells {input.cells:q} --audit {input.audit:q}"
        " --constraints {params.constraints:q} --out {output:q} > {log:q} 2>&1"


rule compare_with_paper:
    input:
        cells=f"{RESULTS}/{{study}}/cells.csv",
        audit=f"{RESULTS}/{{study}}/audit.csv",
    output:
        cells=f"{RESULTS}/{{study}}/against_cells.csv",
        claims=f"{RESULTS}/{{study}}/against_claims.csv",
    log:
        f"{RESULTS}/{{study}}/logs/compare_with_paper.log",
    localrule: True
    conda:
        ENV
    shell:
        "python -m stratbench.analysis.against --cells {input.cells:q} --audit {input.audit:q}"
        " --cells-out {output.cells:q} --claims-out {output.claims:q} > {log:q} 2>&1"


rule write_report:
    input:
        against=f"{RESULTS}/{{study}}/against_claims.csv",
        decision=f"{RESULTS}/{{study}}/decision.csv",
        cells=f"{RESULTS}/{{study}}/cells.csv",
        audit=f"{RESULTS}/{{study}}/audit.csv",
        summary=f"{RESULTS}/{{study}}/summary.csv",
        prediction=f"{RESULTS}/{{study}}/prediction.csv",
        paper=f"{RESULTS}/{{study}}/paper_audit.csv",
        svg=[
            f"{FIGURES}/{experiment}/{plot}.svg"
            for experiment in STUDY.experiments
            for plot in PLOTS
        ],
    output:
        report(
            f"{RESULTS}/{{study}}/report.html",
            caption="../report/report.rst",
            category="Report",
            labels={"figure": "The whole report"},
        ),
    log:
        f"{RESULTS}/{{study}}/logs/write_report.log",
    localrule: True
    conda:
        ENV
    params:
        plots=lambda w: FIGURES.format(study=w.study),
        study=lambda w: f"{RESULTS}/{w.study}",
        description=description,
        constraints=constraints,
    shell:
        "python -m stratbench.analysis.report --cells {input.cells:q} --audit {input.audit:q}"
        " --summary {input.summary:q} --prediction {input.prediction:q}"
        " --paper-audit {input.paper:q}"
        " --plots-dir {params.plots:q} --study-dir {params.study:q}"
        " --constraints {params.constraints:q} --description={params.description:q}"
        " --out {output:q} > {log:q} 2>&1"


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
        study=lambda w, input: str(Path(input[0]).parent),
        out=lambda w, input: str(Path(input[0]).parent / "partial"),
        skipped=skipped,
        targets=targets,
        trained=as_trained,
        description=description,
        constraints=constraints,
    shell:
        "(python -m stratbench.analysis.collect --partial --expected {input:q}"
        " --skipped {params.skipped:q} --targets {params.targets:q} --study {params.trained:q}"
        " --records-root {params.study:q}/cells"
        " --out {params.out:q}/cells.csv --epochs-out {params.out:q}/epochs.csv"
        " && python -m stratbench.analysis.audit --cells {params.out:q}/cells.csv"
        " --study-dir {params.study:q} --out {params.out:q}/audit.csv"
        " && python -m stratbench.analysis.tables --cells {params.out:q}/cells.csv"
        " --audit {params.out:q}/audit.csv"
        " --summary-out {params.out:q}/summary.csv --out-dir {params.out:q}/tables"
        " && python -m stratbench.analysis.plots --cells {params.out:q}/cells.csv"
        " --epochs {params.out:q}/epochs.csv --summary {params.out:q}/summary.csv"
        " --study-dir {params.study:q} --out-dir {params.out:q}/plots"
        " && python -m stratbench.analysis.decide --cells {params.out:q}/cells.csv"
        " --audit {params.out:q}/audit.csv --constraints {params.constraints:q}"
        " --out {params.out:q}/decision.csv"
        " && python -m stratbench.analysis.against --cells {params.out:q}/cells.csv"
        " --audit {params.out:q}/audit.csv --cells-out {params.out:q}/against_cells.csv"
        " --claims-out {params.out:q}/against_claims.csv"
        " && python -m stratbench.analysis.paper_audit --out {params.out:q}/paper_audit.csv"
        " && python -m stratbench.analysis.report --partial --cells {params.out:q}/cells.csv"
        " --paper-audit {params.out:q}/paper_audit.csv"
        " --audit {params.out:q}/audit.csv"
        " --summary {params.out:q}/summary.csv --plots-dir {params.out:q}/plots"
        " --study-dir {params.study:q} --description={params.description:q}"
        " --constraints {params.constraints:q} --out {params.out:q}/report.html"
        ") 2>&1 | tee {log:q}"


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
        study=lambda w, input: str(Path(input[0]).parent),
        out=lambda w, input: str(Path(input[0]).parent / "decision"),
        skipped=skipped,
        targets=targets,
        trained=as_trained,
        constraints=constraints,
    shell:
        "(mkdir -p {params.out:q}"
        " && python -m stratbench.analysis.collect --partial --expected {input:q}"
        " --skipped {params.skipped:q} --targets {params.targets:q} --study {params.trained:q}"
        " --records-root {params.study:q}/cells"
        " --out {params.out:q}/cells.csv --epochs-out {params.out:q}/epochs.csv"
        " > {params.out:q}/records.txt"
        " && python -m stratbench.analysis.audit --cells {params.out:q}/cells.csv"
        " --study-dir {params.study:q} --out {params.out:q}/audit.csv"
        " && python -m stratbench.analysis.decide --cells {params.out:q}/cells.csv"
        " --audit {params.out:q}/audit.csv --constraints {params.constraints:q}"
        " --out {params.out:q}/decision.csv"
        ") 2>&1 | tee {log:q}"
