AUDIT = (
    "-m stratbench.extensions.audit --cells {params.out:q}/cells.csv"
    " --study-dir {params.study:q} --out {params.out:q}/audit.csv"
)
ADDED["collect"].after.append(AUDIT)
for stage in ("tables", "decide", "report"):
    ADDED[stage].options.append("--audit {params.out:q}/audit.csv")
    ADDED[stage].inputs.append(lambda: f"{RESULTS}/{STUDY.name}/audit.csv")


rule audit_records:
    input:
        added_inputs("audit"),
        cells=f"{RESULTS}/{{study}}/cells.csv",
        records=JOBS.list_record_paths(),
    output:
        f"{RESULTS}/{{study}}/audit.csv",
    log:
        f"{RESULTS}/{{study}}/logs/audit_records.log",
    benchmark:
        f"{RESULTS}/{{study}}/benchmarks/audit_records.tsv"
    localrule: True
    conda:
        ENV
    params:
        study=study_dir,
        out=study_dir,
    message:
        "audit the records of the study {wildcards.study}"
    shell:
        PROGRAM + AUDIT + " > {log:q} 2>&1"
