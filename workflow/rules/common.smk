# Helpers of all rules: the validated config, and what rules ask of the study's cells.
import json
import re
import sys
import time
from collections import defaultdict
from dataclasses import dataclass, field, fields
from pathlib import Path

from snakemake.exceptions import WorkflowError

from stratbench.cell.coordinates import CELL_PATTERN
from stratbench.cell.extensions import load_extensions
from stratbench.cell.installation import INSTALLED
from stratbench.cell.settings import Settings
from stratbench.study import job_values, reasons
from stratbench.strategies import get_strategy_class
from stratbench.strategies.needs import iter_missing_requirements
from stratbench.study import resume
from stratbench.study import snakemake_internals as internals
from stratbench.study.config.config import load_config
from stratbench.study.job_environment import add_cache_command, set_job_environment
from stratbench.study.jobs import Jobs
from stratbench.study.config.messages import ConfigError
from stratbench.study.config.schema import collect_constraints
from stratbench.study.slurm import live_jobs
from stratbench.workload.data.prepared import format_meta_file_name


@dataclass
class Addition:
    """Additions of extensions to a stage of the analysis."""

    #: Their own stages, as command lines, which run before it and after it where one process runs all.
    before: list = field(default_factory=list)
    after: list = field(default_factory=list)
    #: Options of its command line, and files that it writes.
    options: list = field(default_factory=list)
    outputs: list = field(default_factory=list)
    #: Functions that give the path of a further input; an empty text where there is none.
    inputs: list = field(default_factory=list)
    #: The same by extension, for inputs that the command line names.
    evidence: dict = field(default_factory=dict)
    #: Parameters that the command lines of their own stages name.
    params: dict = field(default_factory=dict)


try:
    CONFIG, STUDY = load_config(config, internals.get_config_files(workflow))
except ConfigError as error:
    raise WorkflowError(str(error)) from None

# When this run began: evidence of failures that is older is of another.
BEGUN_S = time.time()
JOBS = Jobs(CONFIG, STUDY)
set_job_environment(CONFIG, PACKAGE_ROOT)
add_cache_command(internals.get_job_settings(workflow), Path(".snakemake/cache"))
# With --sdm conda Snakemake takes PYTHONPATH from the jobs; each command gives it to itself again. It names
# no path, since a changed command makes everything again.
FIND_PACKAGE = 'export PYTHONPATH="$STRATBENCH_PACKAGE${{PYTHONPATH:+:$PYTHONPATH}}"; '
# Runs programs (-m), one after the other, that end with the Snakemake that has started them; a launcher sees
# to that itself.
RUN = "python -m stratbench.study.program $PPID "
PROGRAM = f"set -o pipefail; {FIND_PACKAGE}{RUN}"
# The file that holds what is too long for the command line.
VALUES = f"{job_values.OF_JOB} "
# Shows the log of a failed job in every case: `snakemake -c1 plan` and `stratbench plan` do not show failed logs.
TO_LOG = " > {log:q} 2>&1 || {{ cat {log:q} >&2; exit 1; }}"

RESULTS = CONFIG["results"]
if internals.changes_path_by_prefix(workflow, RESULTS):
    raise WorkflowError(
        "stratbench cannot be used as a module with `prefix:`; set `results` in its config instead"
    )
CLUSTER = CONFIG["cluster"]
# Whether jobs have another Python than this one. It finds the package of a clone, and nothing that is installed here.
IN_CONDA = internals.uses_conda(workflow)
if IN_CONDA and INSTALLED:
    raise WorkflowError(
        "--sdm conda: a conda environment does not find the stratbench that pip has installed; leave the option out, "
        "or use a clone (docs/installing.md)"
    )
ENV = "../../envs/stratbench.yaml"
CELL = f"{{study}}/cells/{CELL_PATTERN}"
LOGS = f"{{study}}/logs/{CELL_PATTERN}"
# Of this study alone, for a command line.
STUDY_CONFIG = CONFIG | {"studies": {STUDY.name: CONFIG["studies"][STUDY.name]}}

# The rules of extensions add to these.
# Functions that say of cells that nothing can train them, before the first is submitted.
START_CHECKS = []
# Functions without arguments: run once the jobs are planned, and after the last.
BEFORE_JOBS, AFTER_JOBS = [], []
# Functions that yield further planned jobs that train: the job, its cells, and what it asks a scheduler for.
TRAINING_JOBS = []
# By the name of a rule that trains, a function that names what a job's wildcards stand for.
TRAINED_BY = {}
# Functions that give what each worker job of a cell asks SLURM for, by its cell and resources, or an empty text.
WORKER_JOBS = []
# By a stage of the analysis (its name in STAGES, or that of an extension), what extensions add to it.
ADDED = defaultdict(Addition)


wildcard_constraints:
    study=re.escape(STUDY.name),
    experiment=r"[A-Za-z0-9][A-Za-z0-9._-]*",
    strategy=r"[A-Za-z0-9][A-Za-z0-9._-]*",
    model=r"[A-Za-z0-9][A-Za-z0-9._-]*",
    dataset=r"[A-Za-z0-9][A-Za-z0-9._-]*",
    spec=r"(-[0-9a-f]{12})?",
    gpus=r"\d+",
    repeat=r"\d+",
    block=r"\d+",


def cell_of(wildcards):
    """The cell that a training job's wildcards name."""
    return or_workflow_error(JOBS.find_cell, wildcards)


def cell_request(wildcards):
    """What the cell asks a scheduler for."""
    return JOBS.build_job_request(cell_of(wildcards))


def setting_parameters():
    """A parameter for each setting of a training job: a changed one trains again, and is named in a dry run.

    Functions, as for every parameter that holds a text of the config: in a plain text Snakemake takes
    braces for wildcards.
    """

    def parameter(key):
        return lambda w: JOBS.resolve_settings(cell_of(w)).format_setting(key)

    return {field.name: parameter(field.name) for field in fields(Settings)}


def skipped(wildcards):
    """Why cells are not trained, for `collect`."""
    return json.dumps(JOBS.skip_reasons)


def targets(wildcards):
    """The scores to reach, for `collect`."""
    return json.dumps(STUDY.get_target_scores())


def as_trained(wildcards, input):
    """The study whose settings records must have, for `collect`; no reason to run again: new records are."""
    resolved = {"own_code": STUDY.describe_own_code(), "data_specs": STUDY.data_specs()}
    return json.dumps(
        STUDY.build_training_config()
        | {key: own for key, own in resolved.items() if own},
        sort_keys=True,
    )


def constraints(wildcards):
    """What `decide` ranks under."""
    return json.dumps(collect_constraints(CONFIG))


def description(wildcards):
    """What the study is for."""
    return STUDY.description


def study_dir(wildcards):
    """results/<study>."""
    return f"{RESULTS}/{wildcards.study}"


def data_spec(dataset):
    """What decides a data set's samples; None where its name does."""
    return STUDY.data_specs().get(dataset)


def prepared_data(dataset):
    """The file that is there once the data set, as the config has it, is prepared."""
    return f"{RESULTS}/data/{dataset}/{format_meta_file_name(data_spec(dataset))}"


def data_of_cell(wildcards):
    """The data that a cell is trained on. A record of other data is made anew."""
    cell = cell_of(wildcards)
    settings = JOBS.resolve_settings(cell)
    resume.retrain_results_of_changed_data(
        workflow, cell.record_path(RESULTS), settings
    )
    return prepared_data(cell.dataset)


def or_workflow_error(question, *of):
    """The answer, or Snakemake's own error with the reason."""
    try:
        return question(*of)
    except ConfigError as error:
        raise WorkflowError(str(error)) from None


def missing_needs(cells):
    """Why some cells cannot be trained by this Python; nothing where their jobs have another."""
    if IN_CONDA:
        return []
    settings = [(c.strategy, JOBS.resolve_settings(c)) for c in cells]
    used = [(name, get_strategy_class(s.strategy), s.options) for name, s in settings]
    lacking = [*iter_missing_requirements(used), *STUDY.list_import_errors(cells)]
    elsewhere = not internals.runs_jobs_locally(workflow)
    return lacking or [
        fault
        for check in START_CHECKS
        for fault in check(STUDY_CONFIG, STUDY, cells, elsewhere)
    ]


def existing(*names):
    """The path of a file of the study, where it is there; else an empty text."""
    path = Path(RESULTS, STUDY.name, *names)
    return str(path) if path.exists() else ""


def evidence(stage):
    """A function that gives the files of extensions that a stage reads beside the records, as NAME=PATH."""
    return lambda wildcards: [
        f"{name}={path}"
        for name, path_of in ADDED[stage].evidence.items()
        if (path := path_of())
    ]


def added_inputs(stage):
    """A function that gives the files that extensions have a stage read."""
    added = ADDED[stage]
    return lambda wildcards: [
        path
        for path_of in (*added.inputs, *added.evidence.values())
        if (path := path_of())
    ]


def added_params(stages):
    """The names that extensions add to the command lines of some stages."""
    return {
        key: value for stage in stages for key, value in ADDED[stage].params.items()
    }


def in_one_process(names, stages):
    """The command line of a process that runs some stages, by name, on the records that are there."""
    partial = dict.fromkeys(("collect", "report"), " --partial")
    return " ".join(
        line
        for name in names
        for added, stage in [(ADDED[name], stages[name] + partial.get(name, ""))]
        for line in (*added.before, stage, *added.after)
    )


def failed_jobs():
    """Yield what each failed job trained, and its log."""
    for job in internals.iter_failed_jobs(workflow):
        for rule, trained_by in TRAINED_BY.items():
            if internals.is_job_of_rule(job, getattr(rules, rule)):
                yield trained_by(job.wildcards), Path(job.log[0])
