# Helpers of all rules: the validated config, the study's cells, and the resources of a cell.
import json
import re
from dataclasses import fields
from functools import cache
from pathlib import Path

from snakemake.exceptions import WorkflowError

from stratbench.study import config as stratbench_config
from stratbench.study import resources as cell_resources
from stratbench.cell.coordinates import CELL_PATTERN
from stratbench.plan.devices import named_gpus

try:
    for _file in workflow.configfiles:
        stratbench_config.check_duplicate_keys(_file)
    CONFIG, STUDY = stratbench_config.load(config)
    named_gpus(CONFIG["cluster"])
except stratbench_config.ConfigError as error:
    raise WorkflowError(str(error)) from None

stratbench_config.set_job_environment(CONFIG, PACKAGE_ROOT)
# With --sdm conda Snakemake takes PYTHONPATH from the jobs; each command gives it to itself again. It names
# no path, since a changed command makes everything again.
FIND_PACKAGE = 'export PYTHONPATH="$STRATBENCH_PACKAGE${{PYTHONPATH:+:$PYTHONPATH}}"; '

RESULTS = CONFIG["results"]
if workflow.modifier.path_modifier.replace_prefix(RESULTS) != RESULTS:
    raise WorkflowError(
        "stratbench cannot be used as a module with `prefix:`; set `results` in its config instead"
    )
CLUSTER = CONFIG["cluster"]
ENV = "../../envs/stratbench.yaml"
CELL = f"{{study}}/cells/{CELL_PATTERN}"
LOGS = f"{{study}}/logs/{CELL_PATTERN}"


wildcard_constraints:
    study=re.escape(STUDY.name),
    experiment=r"[A-Za-z0-9][A-Za-z0-9._-]*",
    strategy=r"[A-Za-z0-9][A-Za-z0-9._-]*",
    model=r"[A-Za-z0-9][A-Za-z0-9._-]*",
    dataset=r"[A-Za-z0-9][A-Za-z0-9._-]*",
    gpus=r"\d+",
    repeat=r"\d+",


PLAN = cell_resources.StudyPlan(f"{RESULTS}/{STUDY.name}/plan.json")


def skipped_cells():
    """Why cells are not trained, by path: the plan says so, and the config lets it."""
    if not CLUSTER["skip_infeasible"]:
        return {}
    found = {
        cell.path: PLAN.infeasible(cell, STUDY.settings(cell).as_json(), CLUSTER)
        for cell in STUDY.cells
    }
    return {path: why for path, why in found.items() if why}


SKIPPED = skipped_cells()


def record_paths():
    """The record of every cell of the study that is not skipped."""
    return [
        str(cell.record_path(RESULTS))
        for cell in STUDY.cells
        if cell.path not in SKIPPED
    ]


CELLS = {cell.path: cell for cell in STUDY.cells}


def cell_of(wildcards):
    """The cell that a training job's wildcards name."""
    path = CELL_PATTERN.format(**wildcards)
    if path not in CELLS:
        raise WorkflowError(f"{path} is not a cell of the study {STUDY.name!r}")
    return CELLS[path]


@cache
def settings_of(cell):
    """What a cell is trained with."""
    return STUDY.settings(cell)


def setting_parameters():
    """A parameter for each setting of a training job: a changed one trains again, and is named in a dry run.

    Functions, as for every parameter that holds a text of the config: in a plain text Snakemake takes
    braces for wildcards.
    """

    def parameter(key):
        return lambda w: settings_of(cell_of(w)).as_parameter(key)

    return {
        field.name: parameter(field.name)
        for field in fields(stratbench_config.Settings)
    }


def skipped(wildcards):
    """Why cells are not trained, for `collect`."""
    return json.dumps(SKIPPED)


def targets(wildcards):
    """The accuracies to reach, for `collect`."""
    return json.dumps(STUDY.target_accuracies())


def as_trained(wildcards, input):
    """The study whose settings records must have, for `collect`; no reason to run again: new records are."""
    return json.dumps(STUDY.as_trained(), sort_keys=True)


def constraints(wildcards):
    """What `decide` ranks under."""
    # A peak fits with the same reserve as in the plan.
    return json.dumps(
        CONFIG["decide"] | {"memory_margin": CONFIG["cluster"]["memory_margin"]}
    )


def description(wildcards):
    """What the study is for."""
    return STUDY.description


def study_dir(wildcards):
    """results/<study>."""
    return f"{RESULTS}/{wildcards.study}"


def data_dir(dataset):
    return f"{RESULTS}/data/{dataset}"


@cache
def asked_of(cell):
    """What a cell asks a scheduler for."""
    return cell_resources.asked(
        cell,
        settings_of(cell),
        CLUSTER,
        STUDY.time_limit_s(cell),
        PLAN.host_mem_mib(cell),
        PLAN.longest_s(cell),
    )
