"""Finds the mistakes in config.yaml, and fills in the defaults."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator, Mapping
from typing import Any

from stratbench.cell.extensions import list_config_blocks
from stratbench.cell.text.words import format_wrong_value
from stratbench.study.config.consistency import (
    check_decided_model,
    check_experiment,
    check_name_lengths,
    check_own_models,
    check_score_tolerances,
    fill_adamw_defaults,
    iter_unknown_name_messages,
    iter_variant_error_messages,
)
from stratbench.study.config.data_sets import DataSets
from stratbench.study.config.messages import ConfigError, format_wrong_value_message, join_messages
from stratbench.study.config.schema import (
    build_config_schema,
    check_config_structure,
    check_extension_keys,
    fill_schema_defaults,
    parse_texts_by_schema,
)
from stratbench.study.config.yaml_traps import check_value_types
from stratbench.workload.data.datasets import DATASETS, make_dataset_metadata


def validate_config(raw: Mapping[str, Any]) -> dict[str, Any]:
    """Return a config with its defaults filled in, or raise ConfigError for its mistakes.

    Raises:
        ConfigError: For all unknown keys and wrong values. If there are none, for all unknown names. If there
            are none, for the first contradiction in each experiment.
    """
    raw = parse_texts_by_schema(raw, build_config_schema())
    check_value_types(raw, ())
    check_config_structure(raw)
    config = json.loads(json.dumps(raw))
    for values in config["studies"].values():
        for block in values["experiments"].values():
            fill_adamw_defaults(block)
    fill_schema_defaults(config)
    config["results"] = _normalise_results_folder(config["results"])
    if unknown := list(_iter_unknown_names(config)):
        raise ConfigError(join_messages(unknown))
    if config["cluster"]["skip_infeasible"] and config["cluster"]["gpu"] is None:
        raise ConfigError(
            "config: cluster.skip_infeasible = true: needs cluster.gpu, the GPU whose memory cells must fit; "
            "set it"
        )
    for name in config["datasets"]:
        if name in DATASETS:
            raise ConfigError(f"config: datasets.{name}: {name!r} is built in; choose another name")
        try:
            make_dataset_metadata(name, config["datasets"][name])
        except ValueError as e:
            raise ConfigError(f"config: datasets.{name}: {e}") from e
    for place in list_config_blocks():
        if place != "experiment":
            check_extension_keys(place, config if place == "top" else config[place], config)
    check_own_models(config)
    experiments = config["studies"][config["study"]]["experiments"].values()
    check_decided_model(
        config["decide"]["model"], (m for block in experiments for m in block["models"])
    )
    known = DataSets(config)
    check_score_tolerances(config)
    wrong = []
    for study, values in config["studies"].items():
        if study == "data":
            raise ConfigError(
                "config: studies.data: the folder 'data' is for data sets; rename the study"
            )
        for experiment, block in values["experiments"].items():
            where = f"studies.{study}.experiments.{experiment}"
            # Data files are read only for the study that runs.
            describe = (
                known.describe_data_set
                if study == config["study"]
                else known.describe_data_set_from_config
            )
            try:
                check_experiment(where, block, values, config, describe)
                check_name_lengths(study, experiment, block)
            except ConfigError as e:
                wrong.append(str(e))
    if wrong:
        raise ConfigError(join_messages(wrong))
    return config


def _iter_unknown_names(config: Mapping[str, Any]) -> Iterator[str]:
    """Yield a message for each unknown study, strategy, option, data set and model."""
    if config["study"] not in config["studies"]:
        yield format_wrong_value_message(
            "study", config["study"], "is not a study", config["studies"]
        )
    for study, values in config["studies"].items():
        yield from iter_variant_error_messages(study, values)
        for experiment, block in values["experiments"].items():
            where = f"studies.{study}.experiments.{experiment}"
            yield from iter_unknown_name_messages(where, block, values, config)


def _normalise_results_folder(path: str) -> str:
    """Return the path of `results` without `~`, `./`, `//` and final slash.

    Raises:
        ConfigError: For a path that Snakemake or a command line would misread.
    """
    folder = os.path.normpath(os.path.expanduser(path))
    folder = "/" + folder.lstrip("/") if folder.startswith("/") else folder
    key_and_value = f"config: results = {format_wrong_value(path)}"
    if folder in (".", "/"):
        raise ConfigError(
            f"{key_and_value}: must be a folder for results alone, because each study becomes a "
            "folder in it; write results"
        )
    if folder.startswith(("-", "~")):
        raise ConfigError(
            f"{key_and_value}: begins with {folder[0]!r}, which commands read as an option or as a "
            "home folder; rename it"
        )
    if character := next((c for c in folder if c in "{}" or not c.isprintable()), None):
        raise ConfigError(
            f"{key_and_value}: has the character {character!r}, which Snakemake or a shell does not allow "
            "in paths; rename it"
        )
    return folder
