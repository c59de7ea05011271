# stratbench: measures distributed-training strategies against each other on your machines.
#
#   snakemake --profile profiles/local                       the study named in config.yaml
#   snakemake --profile profiles/slurm --config study=paper  another one, on a cluster
#   snakemake -n                                             what would be trained
#   snakemake -c1 check                                      whether its networks can be trained by its strategies
#   snakemake -c1 plan                                       what fits, how long it takes, what it costs
#   snakemake -c1 project                                step times on more workers than were trained on
#   snakemake --profile profiles/local verdict               which strategy is fastest, by short blocks
#   snakemake -c1 decide                                     what to choose, from the records that are there
#   snakemake -c1 partial                                    merge what is there, list what is missing
#   snakemake -c1 bundle                                     its records as one file
#   snakemake -c1 export                                     the same for other tools, as Parquet
#   snakemake -c1 compare --config 'sets={a: a.zip, b: results/demo}'    result sets side by side
from snakemake.utils import min_version

min_version("9.18")


include: "workflow/rules/package.smk"
include: "workflow/rules/syntax.smk"


if not IS_GIVEN_CONFIG:

    configfile: "config.yaml"


include: "workflow/rules/common.smk"
include: "workflow/rules/data.smk"
include: "workflow/rules/train.smk"


for extension in load_extensions().values():
    for name in extension.rule_files:

        include: f"workflow/rules/{name}"


include: "workflow/rules/analysis.smk"


rule all:
    default_target: True
    input:
        JOBS.list_record_paths(),  # listed here too: a deleted record is made again although its tables are there
        f"{RESULTS}/{STUDY.name}/report.html",
    message:
        f"the study {STUDY.name}: its records and its report"
