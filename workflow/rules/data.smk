# Data sets: verified, and converted once to arrays that training processes map into memory.
rule prepare_data:
    output:
        # A folder with other data of the same name lacks the file.
        meta=f"{RESULTS}/data/{{dataset}}/meta{{spec}}.json",
    log:
        f"{RESULTS}/data/{{dataset}}{{spec}}.log",
    benchmark:
        f"{RESULTS}/data/{{dataset}}{{spec}}.benchmark.tsv"
    localrule: True  # compute nodes often cannot download
    conda:
        ENV
    params:
        out=lambda w, output: str(Path(output.meta).parent),
        spec=lambda w: json.dumps(data_spec(w.dataset), sort_keys=True),
    message:
        "prepare the data set {wildcards.dataset}"
    shell:
        f"{PROGRAM}{VALUES}"
        "-m stratbench.workload.data.prepare {wildcards.dataset:q} --out {params.out:q}"
        f" --spec @spec ${{{{STRATBENCH_NO_DOWNLOAD:+--no-download}}}}{TO_LOG}"
