"""Expands the studies in config.yaml into cells (training runs) with resolved settings, after validation.

Imported on every parse of the Snakefile, so nothing heavy is imported here.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from stratbench.cell.coordinates import Cell, expand_cells
from stratbench.cell.settings import GIVEN, Settings
from stratbench.strategies import (
    REGISTRY,
    get_mesh,
    get_option_defaults,
    get_strategy_class,
    resolve_options,
)
from stratbench.study.config.consistency import check_experiment
from stratbench.study.config.data_sets import DataSets
from stratbench.study.config.messages import ConfigError
from stratbench.study.config.schema import collect_extension_values
from stratbench.study.config.validation import validate_config
from stratbench.study.config.yaml_traps import check_duplicate_yaml_keys
from stratbench.workload import tasks, users_code
from stratbench.workload.data.dataset import Dataset
from stratbench.workload.data.own_data import is_own_data_set
from stratbench.workload.network import models
from stratbench.workload.network.libraries import find_library_of_call


@dataclass(frozen=True)
class Experiment:
    """One validated experiment: its cells and the settings of each."""

    name: str
    values: Mapping[str, Any]
    #: Keyword arguments of `coordinates.expand_cells`, which lists the cells.
    expand_cells_arguments: dict[str, Any]
    cells: tuple[Cell, ...]


class Study:
    """One validated study of the config."""

    def __init__(self, config: Mapping[str, Any], name: str) -> None:
        self.name = name
        self._study = config["studies"][name]
        self.description = self._study.get("description", "")
        self.seed: int = self._study["seed"]
        self._own = {key: config[key] for key in ("models", "code") if config.get(key)}
        self._folders = [Path(folder).expanduser() for folder in config.get("code") or []]
        self._own_code: dict[str, dict[str, Any] | None] = dict(config.get("own_code", {}))
        self._data = DataSets(config)
        self.experiments = {}
        for key, values in self._study["experiments"].items():
            matrix = self._build_expand_cells_arguments(key, values)
            self.experiments[key] = Experiment(key, values, matrix, tuple(expand_cells(**matrix)))

    @property
    def cells(self) -> list[Cell]:
        return [cell for e in self.experiments.values() for cell in e.cells]

    @property
    def datasets(self) -> list[str]:
        return sorted({e.values["dataset"] for e in self.experiments.values()})

    def resolve_base_strategy(self, name: str) -> tuple[str, dict[str, Any]]:
        """Return the base strategy of a strategy or variant, and its options in the config."""
        if name in REGISTRY:
            return name, {}
        variant = dict(self._study["variants"][name])
        variant.pop("settings", None)
        return variant.pop("strategy"), variant

    def get_experiment_config(self, cell: Cell) -> Mapping[str, Any]:
        """Return the config of a cell's experiment, with the settings of the cell's variant applied."""
        variant = self._study["variants"].get(cell.strategy, {})
        return {**self.experiments[cell.experiment].values, **variant.get("settings", {})}

    def get_strategy_kind(self, name: str) -> str:
        """Return the kind of a strategy: `collective` or `server`."""
        return get_strategy_class(self.resolve_base_strategy(name)[0]).kind

    def settings(self, cell: Cell) -> Settings:
        """Return the resolved settings of a cell of this study."""
        values = self.get_experiment_config(cell)
        base, set_options = self.resolve_base_strategy(cell.strategy)
        weak = values.get("per_worker_batch")
        batch = weak * cell.gpus if weak else values["global_batch"]
        options = resolve_options(base, set_options, cell.gpus) | self.hash_strategy_files(
            cell.strategy
        )
        data = self._data.describe_data_set_from_identity(cell.dataset)
        return Settings(
            strategy=base,
            options=options,
            model=cell.model,
            dataset=cell.dataset,
            gpus=cell.gpus,
            seed=compute_cell_seed(self.seed, cell.model, cell.repeat),
            own_model=self._get_own_model_for_data(cell.model, data),
            task=data.task,
            data_spec=self._data.compute_data_set_identity(cell.dataset),
            own_task=self.get_own_task_specification(values["task"]),
            global_batch=batch,
            per_worker_batch=batch // get_mesh(base, options, cell.gpus).replicas,
            more=collect_extension_values("experiment", values, values),
            **{key: values[key] for key in GIVEN},
        )

    def explain_cell_refusal(self, config: Mapping[str, Any], cell: Cell) -> str | None:
        """Return why the config does not allow a cell. None if the study could have it.

        The study need not have the cell.

        Args:
            config: The validated config.
            cell: A cell of one of the study's experiments, with any strategy, model and worker count.
        """
        values = config["studies"][self.name]
        overrides = {"gpus": [cell.gpus], "strategies": [cell.strategy], "models": [cell.model]}
        block = {**self.experiments[cell.experiment].values, **overrides}
        try:
            check_experiment("cell", block, values, config, self.get_dataset)
        except ConfigError as error:
            return str(error).removeprefix("config: cell.")
        return None

    def get_own_model_specification(self, name: str) -> dict[str, Any] | None:
        """Return the specification of a user's model, or None for a built-in model.

        It has the model's call, its sharding and the fingerprint of its code.
        """
        return self._add_code_fingerprint(
            name, models.get_model_specification(name, self._own.get("models", {}))
        )

    def _get_own_model_for_data(self, name: str, data: Dataset) -> dict[str, Any] | None:
        """Return the specification of a user's model, with the size of the data set's vocabulary.

        The vocabulary is added only where it differs from the number of classes.
        """
        spec, vocabulary = self.get_own_model_specification(name), data.vocabulary
        return spec | {"vocabulary": vocabulary} if spec and vocabulary else spec

    def get_own_task_specification(self, name: str | None) -> dict[str, Any] | None:
        """Return the specification of a user's task, or None for a built-in task.

        It has the task's call and the fingerprint of its code.
        """
        if name is None or name in tasks.TASKS:
            return None
        return self._add_code_fingerprint(f"task {name}", {"call": name})

    def hash_strategy_files(self, strategy: str) -> dict[str, Any]:
        """Return `{"sha256": ...}` of the user's files that a strategy's options name.

        Return an empty mapping if the options name no file.
        """
        key = f"strategy {strategy}"
        if key not in self._own_code:
            base, options = self.resolve_base_strategy(strategy)
            files = get_strategy_class(base).list_user_files(get_option_defaults(base) | options)
            self._own_code[key] = {"sha256": users_code.hash_named_files(files)} if files else None
        return self._own_code[key] or {}

    def _add_code_fingerprint(self, key: str, spec: dict[str, Any] | None) -> dict[str, Any] | None:
        if key not in self._own_code:
            self._own_code[key] = spec and spec | users_code.compute_code_fingerprint(
                spec["call"],
                self._folders,
                find_library_of_call(spec["call"]).list_additional_packages_for_call(spec),
            )
        return self._own_code[key]

    def describe_own_code(self) -> dict[str, dict[str, Any]]:
        """Return the specifications of the study's own models and tasks, with code fingerprints.

        A config that has the result as `own_code` saves `Study` from reading the code again.
        """
        for cell in self.cells:
            self.get_own_model_specification(cell.model)
            self.hash_strategy_files(cell.strategy)
        for experiment in self.experiments.values():
            self.get_own_task_specification(experiment.values["task"])
        return {name: spec for name, spec in self._own_code.items() if spec}

    def list_import_errors(self, cells: Iterable[Cell]) -> list[str]:
        """Return a sentence for each user's model or task whose files cannot be imported."""
        faults = {}
        for cell in cells:
            task = self.get_own_task_specification(self.experiments[cell.experiment].values["task"])
            for what, spec in (
                (f"model {cell.model!r}", self.get_own_model_specification(cell.model)),
                ("task", task),
            ):
                named = f"{what} ({spec['call']})" if spec else ""
                if spec and named not in faults:
                    call = spec["call"]
                    fault = find_library_of_call(call).invalid_call_reason(spec)
                    faults[named] = fault or users_code.unimportable_code_reason(
                        call, self._folders
                    )
        return [f"{named}: {fault}" for named, fault in faults.items() if fault]

    def get_dataset(self, name: str) -> Dataset:
        """Return the metadata of a data set.

        Most fields of a user's own data set are unknown until it is prepared.
        """
        return self._data.describe_data_set(name)

    def data_specs(self) -> dict[str, dict[str, Any]]:
        """Return, by name, the identity of each data set, which determines its samples.

        The values are `data_spec` of the settings. Data sets whose name determines the samples are left out.
        As `data_specs` in a config, the result replaces its `datasets`, and saves `Study` from hashing a
        user's files again.
        """
        specs = {name: self._data.compute_data_set_identity(name) for name in self.datasets}
        return {name: identity for name, identity in specs.items() if identity}

    def list_own_data_sets(self) -> list[str]:
        """Return the names of the user's own data sets in the study."""
        return [name for name, spec in self.data_specs().items() if is_own_data_set(spec)]

    def time_limit_s(self, cell: Cell) -> float | None:
        return self.experiments[cell.experiment].values["time_limit_s"]

    def build_training_config(self) -> dict[str, Any]:
        """Return a config of this study alone, without keys that do not affect training.

        `Study` can read it.
        """
        experiments = {
            name: {
                key: e.values[key]
                for key in e.values
                if key not in self._list_keys_without_effect(e.values)
            }
            for name, e in self.experiments.items()
        }
        study = {key: value for key, value in self._study.items() if key != "description"}
        trained = {"study": self.name, "studies": {self.name: study | {"experiments": experiments}}}
        return (
            trained | self._own
            if self.describe_own_code() or self.list_own_data_sets()
            else trained
        )

    @staticmethod
    def _list_keys_without_effect(values: Mapping[str, Any]) -> set[str]:
        """Return the keys of an experiment that do not affect the training of its cells.

        `target_score` is one of them, unless an extension's keys make a training end at this score.
        """
        without = {**values, "target_score": None}
        own, other = (collect_extension_values("experiment", v, v) for v in (values, without))
        return {"time_limit_s"} | ({"target_score"} if own == other else set())

    def get_target_scores(self) -> dict[str, float]:
        """Return the target score of each experiment that has a target score."""
        targets = {e: x.values["target_score"] for e, x in self.experiments.items()}
        return {e: target for e, target in targets.items() if target is not None}

    def _build_expand_cells_arguments(
        self, experiment: str, values: Mapping[str, Any]
    ) -> dict[str, Any]:
        return {
            "study": self.name,
            "experiment": experiment,
            "dataset": values["dataset"],
            "strategies": [
                (name, get_strategy_class(self.resolve_base_strategy(name)[0]).max_workers)
                for name in values["strategies"]
            ],
            "models": values["models"],
            "gpus": values["gpus"],
            "repeats": values.get("repeats", self._study["repeats"]),
        }


def compute_cell_seed(study_seed: int, model: str, repeat: int) -> int:
    """Return a cell's random seed, which is equal for all strategies and worker counts.

    Args:
        study_seed: Seed of the study.
        model: Name of the model.
        repeat: Number of the repeat.
    """
    digest = hashlib.sha256(f"{study_seed}/{model}/{repeat}".encode()).digest()
    return int.from_bytes(digest[:4], "big") >> 1


def load_config(
    raw: Mapping[str, Any], files: Iterable[str | Path] = ()
) -> tuple[dict[str, Any], Study]:
    """Return the validated config and its chosen study.

    Args:
        raw: The config as read from YAML.
        files: The YAML files, for messages.

    Raises:
        ConfigError: If the config is invalid; the message has all mistakes that can be found at once.
    """
    for file in files:
        check_duplicate_yaml_keys(file)
    config = validate_config(raw)
    return config, Study(config, config["study"])
