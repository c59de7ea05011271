from functools import cache

from stratbench.extensions.links import jobs as links_jobs
from stratbench.study.slurm.nodes import read_cluster_nodes

# What the measurement asks a scheduler for; of one node where there is no SLURM.
links_request = cache(
    lambda: links_jobs.make_links_request(
        STUDY,
        CLUSTER,
        read_cluster_nodes() if internals.submits_jobs_to_slurm(workflow) else [],
    )
)
for stage in ("projection", "report"):
    ADDED[stage].inputs.append(lambda: existing("links", "links.csv"))


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
        arguments=lambda w: links_jobs.make_links_arguments(STUDY, CLUSTER),
        folder=lambda w: f"{RESULTS}/{STUDY.name}/links",
    message:
        f"measure the network links for the study {STUDY.name} on {{resources.nodes}} nodes; log: {{log}}"
    shell:
        f"{PROGRAM}"
        "-m stratbench.extensions.links.measure {params.arguments:q} --out {params.folder:q} 2>&1 | tee {log:q} && touch {output:q}"


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
        f"describe the measured network links of the study {STUDY.name}"
    shell:
        "rm {input:q}; "
        f"{PROGRAM}"
        "-m stratbench.extensions.links.section --folder {params.folder:q} 2>&1 | tee {log:q}"
