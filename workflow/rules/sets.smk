# Result sets: the records of a study as one file, and sets beside each other. Nothing here trains, and
# nothing has an output that Snakemake knows of, so that it always runs.
from stratbench.extensions.sets.keys import list_existing_sets


# `snakemake bundle`: records, timelines, resolved config and environment in results/<study>/<study>.stratbench.zip.
rule bundle:
    input:
        f"{RESULTS}/{STUDY.name}/cells.json",
    log:
        f"{RESULTS}/{STUDY.name}/logs/bundle.log",
    localrule: True
    conda:
        ENV
    params:
        study=lambda w, input: str(Path(input[0]).parent),
        config=lambda w: json.dumps(
            {
                key: value
                for key, value in STUDY_CONFIG.items()
                if key not in ("sets", "compare", "bundle", "export")
            },
            sort_keys=True,
        ),
        hosts=CONFIG["bundle"]["hosts"],
    message:
        f"bundle the records of the study {STUDY.name} into a file"
    shell:
        f"{PROGRAM}{VALUES}"
        "-m stratbench.extensions.sets bundle --study-dir {params.study:q} --config @config"
        " --hosts {params.hosts:q} 2>&1 | tee {log:q}"


# `snakemake compare --config 'sets={a10g: a10g.stratbench.zip, here: results/paper}'`: a page, tables and
# figures in results/compare/<names>/. With 'compare={fail_above: 0.05}' it fails where a strategy is slower.
rule compare:
    log:
        f"{RESULTS}/compare/compare.log",
    localrule: True
    conda:
        ENV
    params:
        sets=lambda w: json.dumps(or_workflow_error(list_existing_sets, CONFIG)),
        compare=lambda w: json.dumps(CONFIG["compare"]),
        constraints=constraints,
        out=f"{RESULTS}/compare",
    message:
        "compare result sets"
    shell:
        f"{PROGRAM}{VALUES}"
        "-m stratbench.extensions.sets compare --sets @sets --compare @compare"
        " --constraints @constraints --out {params.out:q} 2>&1 | tee {log:q}"


# `snakemake export --config 'export=[parquet, mlflow]'`: the records that are there, for other tools, in
# results/<study>/export.
rule export:
    input:
        f"{RESULTS}/{STUDY.name}/cells.json",
    log:
        f"{RESULTS}/{STUDY.name}/logs/export.log",
    localrule: True
    conda:
        ENV
    params:
        study=lambda w, input: str(Path(input[0]).parent),
        formats=CONFIG["export"],
        skipped=skipped,
        targets=targets,
        trained=as_trained,
    message:
        f"export the records of the study {STUDY.name} to other formats"
    shell:
        f"{PROGRAM}{VALUES}"
        "-m stratbench.extensions.sets export {params.study:q} --to {params.formats:q}"
        " --skipped @skipped --targets @targets --study @trained"
        " --out {params.study:q}/export 2>&1 | tee {log:q}"
