AGAINST = (
    "-m stratbench.extensions.paper.against --cells {params.out:q}/cells.csv"
    " --audit {params.out:q}/audit.csv --summary {params.out:q}/summary.csv"
    " --cells-out {params.out:q}/against_cells.csv"
    " --claims-out {params.out:q}/against_claims.csv --tables-out {params.out:q}/paper_tables"
)
ADDED["report"].before.append(AGAINST)
ADDED["report"].inputs.append(lambda: f"{RESULTS}/{STUDY.name}/against_claims.csv")


rule compare_with_paper:
    input:
        cells=f"{RESULTS}/{{study}}/cells.csv",
        audit=f"{RESULTS}/{{study}}/audit.csv",
        summary=f"{RESULTS}/{{study}}/summary.csv",
    output:
        cells=f"{RESULTS}/{{study}}/against_cells.csv",
        claims=f"{RESULTS}/{{study}}/against_claims.csv",
        tables=directory(f"{RESULTS}/{{study}}/paper_tables"),
    log:
        f"{RESULTS}/{{study}}/logs/compare_with_paper.log",
    benchmark:
        f"{RESULTS}/{{study}}/benchmarks/compare_with_paper.tsv"
    localrule: True
    conda:
        ENV
    params:
        study=study_dir,
        out=study_dir,
    message:
        "compare the study {wildcards.study} with the claims of the paper"
    shell:
        PROGRAM + AGAINST + " > {log:q} 2>&1"
