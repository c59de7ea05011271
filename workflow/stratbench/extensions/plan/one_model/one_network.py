"""Makes the study behind `stratbench plan --model NAME`, for a model that no study names."""

from __future__ import annotations

from collections.abc import Mapping
from itertools import product
from pathlib import Path
from typing import Any

import yaml

from stratbench.study.config.config import Study, load_config
from stratbench.study.config.messages import (
    ConfigError,
    remove_strategy_remedy,
    suggest_closest_name,
)
from stratbench.workload.data.datasets import DATASETS, SPECS
from stratbench.workload.network import models
from stratbench.workload.network.libraries import find_library_of_entry
from stratbench.workload.network.own import list_torchvision_names

TEMPLATE = Path(__file__).parent / "templates" / "one_network.yaml"
#: Keys of config.yaml that also apply to the plan of a single model.
KEPT = ("results", "cluster", "models", "code", "data", "datasets")
#: Keys of an experiment that also apply to the plan of its model alone.
OF_AN_EXPERIMENT = ("dataset", "task", "optimizer")


def make_model_study(
    config: Mapping[str, Any],
    model: str,
    dataset: str | None = None,
    sequence: int | None = None,
    overrides: Mapping[str, Any] | None = None,
) -> tuple[dict[str, Any], Study, list[str]]:
    """Return a config and a study of one model, and reasons for left-out strategies.

    Args:
        config: Raw config with models, data sets and cluster; it may be empty.
        model: Name of the model.
        dataset: Data set for the model. None: data of a usual size and shape; for a model of the
            config, that of its first experiment.
        sequence: Tokens per text; None for the data set's own length.
        overrides: Content of a template in place of TEMPLATE.

    Raises:
        ConfigError: If the model or data set is unknown.
    """
    overrides = overrides or yaml.safe_load(TEMPLATE.read_text(encoding="utf-8"))
    whole = {key: config[key] for key in KEPT if key in config}
    # A data set of the template is left out if the extension that makes it is not installed.
    usual = {name: e for name, e in overrides["datasets"].items() if e["source"] in SPECS}
    whole["datasets"] = usual | (whole.get("datasets") or {})
    known = (*DATASETS, *whole["datasets"])
    if dataset is not None and dataset not in known:
        raise ConfigError(
            f"--dataset {dataset}: is not a data set.{suggest_closest_name(dataset, known)} Allowed: "
            f"{', '.join(known)}, and those that you add to `datasets` of config.yaml"
        )
    block = overrides["experiment"] | {"models": [model]}
    block |= _find_data_and_optimizer(config, model, overrides) | (
        {"dataset": dataset} if dataset else {}
    )
    if "dataset" not in block:
        raise ConfigError(
            f"--model {model}: may take images or texts, and no experiment of config.yaml uses it; name its "
            f"data by --dataset, one of {', '.join(known)}"
        )
    entry = (config.get("models") or {}).get(model) or {}
    if vocabulary := find_library_of_entry(entry).get_entry_vocabulary_size(entry):
        for values in usual.values():
            if "vocabulary" in values:
                values["vocabulary"] = vocabulary
    if sequence is not None:
        _set_tokens_per_text(whole["datasets"], block["dataset"], sequence)

    def load_study_of_experiments(experiments: Mapping[str, Any]) -> tuple[dict[str, Any], Study]:
        study = {"variants": overrides["variants"], "experiments": experiments}
        name = f"model-{model}"
        return load_config(whole | {"study": name, "studies": {name: study}})

    def find_config_error(values: Mapping[str, Any]) -> str | None:
        try:
            load_study_of_experiments({"network": values})
        except ConfigError as error:
            message = remove_strategy_remedy(str(error))
            return message.partition(".experiments.network.")[2] or message
        return None

    first = next(iter(overrides["numbers"].values()))["strategies"][:1]
    # Loading a single experiment raises ConfigError for mistakes that all experiments share.
    one = {"strategies": first, "gpus": [1], "global_batch": 2}
    _, alone = load_study_of_experiments({"network": block | one})
    dataset_metadata = alone.get_dataset(block["dataset"])
    numbers = overrides["numbers"]
    samples = dataset_metadata.train_samples
    if samples is not None and samples < block["global_batch"]:
        block, numbers = _fit_batch_to_samples(block, numbers, samples)
    if "optimizer" not in block and dataset_metadata.is_text:
        block |= {"optimizer": overrides["trained_on"]["next-token"]["optimizer"]}
    experiments: dict[str, Any] = {}
    left_out: dict[str, list[str]] = {}
    for (kind, change), (group, matrix) in product(overrides["each"].items(), numbers.items()):
        name, values = f"{kind}-{group}", block | matrix | change
        if find_config_error(values) is not None:
            reason = {
                s: find_config_error(values | {"strategies": [s]}) for s in values["strategies"]
            }
            values["strategies"] = [s for s in reason if reason[s] is None]
            for strategy, text in reason.items():
                if text is not None and strategy not in left_out.setdefault(text, []):
                    left_out[text].append(strategy)
        if values["strategies"]:
            experiments[name] = values
    reasons = [f"{', '.join(strategies)}: {text}" for text, strategies in left_out.items()]
    return *load_study_of_experiments(experiments), reasons


def _fit_batch_to_samples(
    block: Mapping[str, Any], numbers: Mapping[str, Any], samples: int
) -> tuple[dict[str, Any], dict[str, Any]]:
    """Return an experiment that fits a small training set, and its numbers of workers.

    Args:
        block: The experiment of the template.
        numbers: Strategies and numbers of workers of the template, by group.
        samples: Number of samples of the training set.

    Raises:
        ConfigError: If no number of workers is left.
    """
    batch = block["global_batch"]
    while batch > samples:
        batch //= 2
    counts = {n for matrix in numbers.values() for n in matrix["gpus"]}
    # Each of several workers has two samples or more, since a model may normalise over its batch.
    fitting = {n for n in counts if batch % n == 0 and (n == 1 or batch > n)}
    if not fitting:
        raise ConfigError(
            f"--dataset {block['dataset']}: has {samples} training samples, too few for a step on "
            f"{max(counts)} GPUs; name a larger data set, or fewer GPUs"
        )
    # The largest number is part of every group: plan.html shows sharding between two workers and the most.
    kept = {
        group: matrix | {"gpus": sorted(fitting & {*matrix["gpus"], max(fitting)})}
        for group, matrix in numbers.items()
    }
    return dict(block) | {"global_batch": batch}, kept


def _set_tokens_per_text(datasets: dict[str, Any], dataset: str, tokens_per_text: int) -> None:
    """Set the number of tokens per text of a data set.

    Raises:
        ConfigError: If the data set's length is fixed.
    """
    values = datasets.get(dataset) or {}
    if "sequence" not in values:
        text_datasets = ", ".join(key for key, entry in datasets.items() if "sequence" in entry)
        raise ConfigError(
            f"--sequence {tokens_per_text}: the data set {dataset} has no texts of variable length; remove "
            f"--sequence, or choose texts by --dataset: {text_datasets}"
        )
    datasets[dataset] = {**values, "sequence": tokens_per_text}


def _find_data_and_optimizer(
    config: Mapping[str, Any], model: str, overrides: Mapping[str, Any]
) -> dict[str, Any]:
    """Return the keys of an experiment for a model: its data set, task and optimizer.

    A model of the config has those of the first experiment that trains it. Any other model has the usual
    ones for its task, from the template. The result is empty if the task is unknown.

    Args:
        config: Raw config.
        model: Name of the model.
        overrides: Content of the template.

    Raises:
        ConfigError: If the model is invalid.
    """
    own = config.get("models") or {}
    known = [*models.MODELS, *own]
    if model not in known and model not in list_torchvision_names():
        raise ConfigError(
            f"--model {model}: is not a model.{suggest_closest_name(model, known)} Allowed: "
            f"{', '.join(known)}, every classification network of torchvision, and those that you add to "
            "`models` of config.yaml"
        )
    if model in own:
        for study in (config.get("studies") or {}).values():
            for block in study["experiments"].values():
                if model in block["models"]:
                    return {key: block[key] for key in OF_AN_EXPERIMENT if key in block}
    try:
        entry = own.get(model) or {}
        task = find_library_of_entry(entry).get_entry_task(entry)
    except ValueError as error:
        raise ConfigError(f"config: models.{model}{error}") from None
    if task is not None:
        return overrides["trained_on"][task]
    spec = models.get_model_specification(model, own)
    named = models.make_metadata_or_keep_name(
        model, spec and {"kwargs": {}, "wrap_classes": None} | spec
    )
    reads_text = (models.MODELS[named] if isinstance(named, str) else named).reads_text
    if reads_text is None:
        return {}
    return overrides["trained_on"]["next-token" if reads_text else "classification"]
