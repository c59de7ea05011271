"""Checks a study's keys against each other: options of strategies, batches, models, stragglers."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import suppress
from dataclasses import asdict, fields
from itertools import chain
from pathlib import Path
from typing import Any, NamedTuple, get_type_hints

from stratbench.cell.extensions import iter_extension_keys
from stratbench.cell.options import list_json_types
from stratbench.cell.text.words import format_count, format_wrong_value
from stratbench.strategies import REGISTRY, get_mesh, get_strategy_class
from stratbench.strategies.mesh import Mesh
from stratbench.study.config.messages import (
    ConfigError,
    format_settings_source,
    format_strategy_remedy,
    format_wrong_value_message,
    suggest_closest_name,
)
from stratbench.study.config.schema import parse_text_as_json_type
from stratbench.workload import tasks, users_code
from stratbench.workload.data.dataset import Dataset
from stratbench.workload.data.datasets import DATASETS
from stratbench.workload.data.sources import DataError
from stratbench.workload.network import libraries, models, own

#: Maximum length of a cell's joined names. The file system limits a file name to 255 bytes.
MAX_NAME_BYTES = 240


def iter_variant_error_messages(study: str, values: Mapping[str, Any]) -> Iterator[str]:
    """Yield a message for each wrong name or option of a study's variants.

    A variant's name is wrong if a strategy has it. The name of its strategy is wrong if it is unknown.
    """
    for name, variant in values["variants"].items():
        where = f"studies.{study}.variants.{name}"
        if name in REGISTRY:
            yield f"config: {where}: {name!r} is a strategy; choose another name"
        base = variant["strategy"]
        if base not in REGISTRY:
            yield format_wrong_value_message(
                f"{where}.strategy", base, "is not a strategy", REGISTRY
            )
            continue
        options = get_strategy_class(base).Options
        allowed = [field.name for field in fields(options)]
        kinds = get_type_hints(options)
        for key in variant.keys() & set(allowed):
            if isinstance(variant[key], str):
                variant[key] = parse_text_as_json_type(
                    variant[key], {*list_json_types(kinds[key])} - {"string"}
                )
        set_options = {k: v for k, v in variant.items() if k not in ("strategy", "settings")}
        for key in (unknown := [key for key in set_options if key not in allowed]):
            yield (
                f"config: {where}.{key} = {format_wrong_value(set_options[key])}: {key!r} is not an option "
                f"of {base}.{suggest_closest_name(key, allowed)} Allowed: {', '.join(allowed) or 'none'}."
            )
        try:
            options(**{key: value for key, value in set_options.items() if key not in unknown})
        except ValueError as e:
            yield f"config: {where}.{e}"


def check_name_lengths(study: str, experiment: str, block: Mapping[str, Any]) -> None:
    """Raise ConfigError if a cell's names together exceed the length limit of file names.

    Args:
        study: Name of the study.
        experiment: Name of the experiment.
        block: The experiment's block of the config.
    """
    longest = {
        "study": study,
        "experiment": experiment,
        "strategy": max(block["strategies"], key=len),
        "model": max(block["models"], key=len),
    }
    # upper limit, because `stratbench verdict` may train more repeats than the config has
    repeat = 999
    length = len("_".join([*longest.values(), str(max(block["gpus"])), str(repeat)]))
    if length <= MAX_NAME_BYTES:
        return
    coordinate, name = max(longest.items(), key=lambda entry: len(entry[1]))
    raise ConfigError(
        f"config: studies.{study}.experiments.{experiment}: a cell's joined names have {length} letters, but "
        f"its folder of SLURM logs can have at most {MAX_NAME_BYTES}; choose a shorter name for the "
        f"{coordinate} {name!r}"
    )


def check_own_models(config: Mapping[str, Any]) -> None:
    """Raise ConfigError if the name or call of a user's model is invalid.

    Entries that name a model of a library are replaced by calls, in place. No code is imported.
    """
    hashes = Path(config["results"]) / "data" / ".hashes"
    for name, spec in config["models"].items():
        if name in models.MODELS:
            raise ConfigError(f"config: models.{name}: {name!r} is built in; choose another name")
        try:
            known = hashes / f"weights-{name}.json"
            spec = config["models"][name] = libraries.convert_entry_to_call(spec, known)
        except ValueError as e:
            raise ConfigError(f"config: models.{name}{e}") from e
        if reason := users_code.invalid_call_reason(spec["call"]):
            raise ConfigError(
                f"config: models.{name}.call = {format_wrong_value(spec['call'])}: {reason}"
            )
        for key in spec["kwargs"]:
            if not key.isidentifier():
                raise ConfigError(
                    f"config: models.{name}.kwargs: {key!r} is not a Python parameter name; rename it"
                )
    for folder in config["code"]:
        if not Path(folder).expanduser().is_dir():
            raise ConfigError(
                f"config: code = {format_wrong_value(folder)}: is not a folder; name the folders of your "
                "Python files, relative to the working directory"
            )
    folders = [Path(folder).expanduser() for folder in config["code"]]
    for name, spec in config["models"].items():
        if reason := users_code.shadowed_module_reason(spec["call"], folders):
            raise ConfigError(
                f"config: models.{name}.call = {format_wrong_value(spec['call'])}: {reason}"
            )


def check_decided_model(model: str | None, study_models: Iterable[str]) -> None:
    """Raise ConfigError if `decide.model` is not a model of the study.

    Args:
        model: Value of `decide.model`; None stands for all models.
        study_models: Models of the study.
    """
    allowed = list(dict.fromkeys(study_models))
    if model is not None and model not in allowed:
        problem = "is not a model of the study"
        raise ConfigError(format_wrong_value_message("decide.model", model, problem, allowed))


def iter_unknown_name_messages(
    where: str, block: Mapping[str, Any], study: Mapping[str, Any], config: Mapping[str, Any]
) -> Iterator[str]:
    """Yield a message for each unknown data set, strategy and model of an experiment.

    Args:
        where: Path of the experiment in the config, for messages.
        block: The experiment's block.
        study: The study's block.
        config: The whole config.
    """
    for key, what, known in (
        ("dataset", "data set", [*DATASETS, *config["datasets"]]),
        ("strategies", "strategy or variant", [*REGISTRY, *study["variants"]]),
        ("models", "model", [*models.MODELS, *config["models"]]),
    ):
        for value in block[key] if isinstance(block[key], list) else [block[key]]:
            if value in known or (key == "models" and value in own.list_torchvision_names()):
                continue
            message = format_wrong_value_message(f"{where}.{key}", value, f"is not a {what}", known)
            if key == "models":
                message += (
                    " Every classification model of torchvision is allowed, too. Declare your own models "
                    "under `models`."
                )
            yield message


def check_experiment(
    where: str,
    block: Mapping[str, Any],
    study: Mapping[str, Any],
    config: Mapping[str, Any],
    describe_data_set: Callable[[str], Dataset],
) -> None:
    """Raise ConfigError for the first value of an experiment that contradicts another.

    All names must be known (`iter_unknown_name_messages`).

    Args:
        where: Path of the experiment in the config, for messages.
        block: The experiment's block.
        study: The study's block.
        config: The whole config.
        describe_data_set: Returns the known metadata of a data set, by its name. Anything unknown is checked
            once the data set is prepared.
    """
    try:
        dataset = describe_data_set(block["dataset"])
    except DataError as e:
        raise ConfigError(f"config: {where}.dataset = {block['dataset']!r}: {e}") from e
    for changed, each in _iter_variant_settings_and_experiment(block, study):
        # Each check runs only if the checks before it have found nothing.
        faults = chain(
            _iter_task_faults(each, dataset),
            _iter_optimizer_faults(each),
            _iter_batch_faults(each, study, dataset),
            _join_faults_into_one_message(
                where,
                _iter_strategy_faults(
                    each, study, config["models"], config["cluster"]["gpus_per_node"]
                ),
            ),
            _iter_model_faults(each, dataset, config["models"]),
            _iter_slowdown_faults(each),
            *(
                _join_faults_into_one_message(where, keys.iter_contradictions(each, study))
                for _, keys in iter_extension_keys("experiment")
            ),
        )
        for fault in faults:
            source = format_settings_source(each["strategies"]) if changed else ""
            raise ConfigError(f"config: {where}{fault}{source}")


def _iter_variant_settings_and_experiment(
    block: Mapping[str, Any], study: Mapping[str, Any]
) -> Iterator[tuple[Mapping[str, Any], Mapping[str, Any]]]:
    """Yield each set of variant settings, and the experiment with only its strategies."""
    names: dict[str, list[str]] = {}
    for name in block["strategies"]:
        changed = study["variants"].get(name, {}).get("settings", {})
        names.setdefault(json.dumps(changed, sort_keys=True), []).append(name)
    for text, each in names.items():
        changed = json.loads(text)
        yield changed, {**block, **changed, "strategies": each}


def _iter_task_faults(block: Mapping[str, Any], dataset: Dataset) -> Iterator[str]:
    name, target = block["task"], block["target_score"]
    natural = dataset.shape and (dataset.task or tasks.get_default_task_name(dataset.shape))
    if name is not None and (fault := tasks.unsuitable_task_reason(name, natural)):
        yield f".task = {format_wrong_value(name)}: {fault}; remove it, or use another data set"
    elif dataset.values and (name is None or name in tasks.TASKS):
        reason = tasks.describe_unsuitable_targets(True)
        yield f".dataset = {block['dataset']!r}: its task is {natural}: {reason}"
    if (block["epochs"] is None) == (block["steps"] is None):
        yield (
            ": give either epochs or steps (which measures time and memory, without a score), and not both; "
            f"given: {_format_keys_with_values(block, 'epochs', 'steps')}"
        )
    if target is None:
        return
    if block["steps"] is not None:
        yield f".target_score = {target}: nothing is evaluated with steps; remove it, or give epochs"
    if name is None and dataset.shape is None:
        return  # the task of a user's own data set is unknown until the data are prepared
    task = tasks.TASKS.get(name or natural)
    if task is not None and (target <= 0 or (task.unit == "share" and target > 1)):
        within = "a share such as 0.9" if task.unit == "share" else f"more than 0 {task.unit}"
        yield f".target_score = {target}: the score is {task.score_name}; give {within}"


def check_score_tolerances(config: Mapping[str, Any]) -> None:
    """Raise ConfigError if `decide.score_tolerance` names an unknown score."""
    tolerances = config["decide"]["score_tolerance"]
    blocks = [e for s in config["studies"].values() for e in s["experiments"].values()]
    if any(block["task"] not in (None, *tasks.TASKS) for block in blocks):
        return  # the score of a user's own task is unknown until the task is imported
    names = [task.score_name for task in tasks.TASKS.values()]
    for name in tolerances:
        if name not in names:
            raise ConfigError(
                format_wrong_value_message("decide.score_tolerance", name, "is not a score", names)
            )


def _join_faults_into_one_message(where: str, faults: Iterator[str]) -> Iterator[str]:
    """Yield all messages joined into one, so that the user sees all of them."""
    if each := list(dict.fromkeys(faults)):
        yield f"\nconfig: {where}".join(each)


def fill_adamw_defaults(block: dict[str, Any]) -> None:
    """Set AdamW's momentum, betas and eps where they are not set.

    The momentum becomes 0, and betas and eps get torch's defaults. The function must run before the config's
    defaults are filled in.
    """
    if block.get("optimizer") == "adamw":
        for key, value in (("momentum", 0.0), ("betas", [0.9, 0.999]), ("eps", 1e-8)):
            if block.get(key) is None:
                block[key] = value


def _iter_optimizer_faults(block: Mapping[str, Any]) -> Iterator[str]:
    if block["optimizer"] == "adamw":
        for key in ("momentum", "nesterov"):
            if block[key]:
                yield (
                    f".{key} = {json.dumps(block[key])}: AdamW uses betas instead; remove {key}, or set "
                    "optimizer: sgd"
                )
    else:
        for key in ("betas", "eps"):
            if block[key] is not None:
                yield f".{key} = {block[key]}: only AdamW has it; remove it, or set optimizer: adamw"
    if block["precision"] == "fp16" and block["optimizer_impl"] != "fused":
        yield (
            f".optimizer_impl = {block['optimizer_impl']!r}: with precision: fp16 the host would wait in "
            "every step for the loss scaler to find overflows; set it to fused, or use bf16"
        )
    if block["final_lr"]:
        if block["schedule"] == "constant":
            yield f".final_lr = {block['final_lr']}: a constant schedule does not fall; remove it"
        elif block["final_lr"] > block["lr"]:
            yield (
                f".final_lr = {block['final_lr']}: is above lr = {block['lr']}, and a schedule only falls; "
                "lower it"
            )
    if block["nesterov"] and not block["momentum"]:
        yield ".nesterov = true: needs momentum > 0; set momentum, or remove nesterov"


def _format_keys_with_values(block: Mapping[str, Any], *keys: str) -> str:
    """Return the keys that have a value as `key = value`, or else `neither`."""
    values = [f"{key} = {block[key]}" for key in keys if block.get(key) is not None]
    return ", ".join(values) or "neither"


class StrategyOptions(NamedTuple):
    """A strategy or variant of an experiment: its name, base strategy and options."""

    name: str
    base_strategy: str
    options: dict[str, Any]


def iter_strategy_options(
    block: Mapping[str, Any], study: Mapping[str, Any]
) -> Iterator[StrategyOptions]:
    """Yield each strategy or variant's name, base strategy and options, for an experiment."""
    for name in block["strategies"]:
        variant = {"strategy": name} if name in REGISTRY else dict(study["variants"][name])
        base, _ = variant.pop("strategy"), variant.pop("settings", None)
        options = asdict(get_strategy_class(base).Options(**variant))
        yield StrategyOptions(name, base, options)


def _list_strategy_meshes(
    block: Mapping[str, Any], study: Mapping[str, Any], workers: int
) -> set[Mesh]:
    """Return the meshes of the experiment's strategies on a number of workers.

    Strategies that cannot use this number are left out.
    """
    meshes = set()
    for _, base, options in iter_strategy_options(block, study):
        with suppress(ValueError):  # `_iter_strategy_faults` reports the error
            meshes.add(get_mesh(base, options, workers))
    return meshes


def _iter_batch_faults(
    block: Mapping[str, Any], study: Mapping[str, Any], dataset: Dataset
) -> Iterator[str]:
    batch, weak = block.get("global_batch"), block.get("per_worker_batch")
    if (batch is None) == (weak is None):
        yield (
            ": give either global_batch (split over the workers) or per_worker_batch, and not both; "
            f"given: {_format_keys_with_values(block, 'global_batch', 'per_worker_batch')}"
        )
        return
    key, value = ("global_batch", batch) if batch else ("per_worker_batch", weak)
    divided = {
        (n, mesh.replicas) for n in block["gpus"] for mesh in _list_strategy_meshes(block, study, n)
    }
    for n, copies in sorted(divided, key=lambda pair: (block["gpus"].index(pair[0]), -pair[1])):
        workers = format_count(n, "worker")
        if copies < n:
            workers = f"{format_count(copies, 'replica')} of the model on {workers}"
        together = batch or weak * n
        if together % copies:
            yield (
                f".{key} = {value}: the batch cannot be split evenly over {workers} "
                f"(gpus = {block['gpus']}); use a multiple of every worker count"
            )
        if dataset.has_known_metadata and together > dataset.train_samples:
            yield (
                f".{key} = {value}: a step of {workers} would take {together} samples, but the training set "
                f"of {block['dataset']} has {dataset.train_samples}; use a smaller batch"
            )
        steps = block["steps"]
        if steps is None and dataset.has_known_metadata:
            steps = block["epochs"] * (dataset.train_samples // together)
        if steps is not None and block["lr_warmup_steps"] >= steps:
            yield (
                f".lr_warmup_steps = {block['lr_warmup_steps']}: the training on {workers} has "
                f"{format_count(steps, 'step')}, so lr would never be reached; use fewer warm-up steps"
            )
        each, parts = together // copies, block["gradient_accumulation_steps"]
        if each % parts:
            yield (
                f".gradient_accumulation_steps = {parts}: a batch of {each} samples on each of {workers} "
                f"cannot be divided into {parts} equal parts; change it or the batch"
            )
        normalising = [
            m for m in block["models"] if m in models.MODELS and models.MODELS[m].batchnorm
        ]
        if together == copies * parts and normalising:
            within = (
                "" if parts == 1 else f" in each of {parts} parts (gradient_accumulation_steps)"
            )
            yield (
                f".{key} = {value}: each of {workers} has a batch of one sample{within}, but "
                f"{normalising[0]} normalises over the batch; use a larger batch or fewer workers"
            )


def _iter_strategy_faults(
    block: Mapping[str, Any],
    study: Mapping[str, Any],
    own_models: Mapping[str, Any],
    gpus_per_node: int,
) -> Iterator[str]:
    networks = {
        m: models.make_metadata_or_keep_name(m, models.get_model_specification(m, own_models))
        for m in block["models"]
    }
    name_alone = [
        m for m in block["models"] if own_models.get(m, {}).get("call") == libraries.NAME_ALONE
    ]
    for name, base, options in iter_strategy_options(block, study):
        strategy = get_strategy_class(base)
        if name_alone and strategy.kind != "own":
            yield f".strategies = {name!r}: {name_alone[0]}: {libraries.BUILT_BY_COMMAND}"
        max_workers = strategy.max_workers
        if max_workers is not None and min(block["gpus"]) > max_workers:
            yield (
                f".gpus = {block['gpus']}: {name} uses at most {format_count(max_workers, 'worker')}, so "
                f"it would have no cell; add {max_workers} to gpus, or remove {name} from strategies"
            )
        for n in block["gpus"]:
            if max_workers is None or n <= max_workers:
                weak = block.get("per_worker_batch")
                batch = weak * n if weak else block["global_batch"]
                try:
                    copies = get_mesh(base, options, n).replicas
                    strategy.check(base, options, n, batch // copies)
                    strategy.check_nodes(options, n, -(-n // -(-n // gpus_per_node)))
                except ValueError as e:
                    yield f".strategies = {name!r}: {e}"
        for reason in strategy.iter_refused_values(options, {**block, "networks": networks}):
            yield f"{reason}{format_strategy_remedy(name)}"


def _iter_model_faults(
    block: Mapping[str, Any], dataset: Dataset, own_models: Mapping[str, Any]
) -> Iterator[str]:
    for name in block["models"]:
        spec = models.get_model_specification(name, own_models)
        if dataset.vocabulary and spec is None:
            yield (
                f".models = {name!r}: it returns scores per token, but each text of the data set has one "
                "label; use a model for text-classification"
            )
            continue
        if spec and (fault := _explain_wrong_model_head(spec["call"], block, dataset)):
            yield f".models = {name!r}: {fault}"
            continue
        try:
            model = models.make_metadata_or_keep_name(name, spec)
            if dataset.shape is None:
                models.check_model_takes_sample_kind(
                    model, "texts" if dataset.is_text else "images"
                )
                continue
            shape = models.compute_input_shape(model, dataset.shape)
            if spec:
                facts = own.collect_data_values(dataset.classes, shape, dataset.vocabulary)
                try:
                    own.insert_data_values(spec["kwargs"], facts)
                except ValueError as e:
                    raise ValueError(f"models.{name}.kwargs: {e}") from e
        except ValueError as e:
            yield f".dataset = {block['dataset']!r}: {e}"
    for name in block["models"] if block["activation_checkpointing"] else ():
        if name in models.MODELS and models.MODELS[name].family == "vgg":
            mode = format_wrong_value(block["activation_checkpointing"])
            yield f".activation_checkpointing = {mode}: {name}: {models.NO_BLOCKS}"
    if (chunks := block["loss_chunks"]) > 1:
        if not dataset.is_text or dataset.task:
            yield (
                f".loss_chunks = {chunks}: the data set {block['dataset']!r} is not a text for next-token; "
                "set it to 1"
            )
        if block["task"] is not None and block["task"] not in tasks.TASKS:
            yield f".loss_chunks = {chunks}: your own task needs the model's whole output; set it to 1"
        if block["compile"]:
            yield f".loss_chunks = {chunks}: is not supported with compile: true; remove one of the two"
    if block["augment"] and not (dataset.crop_padding or dataset.has_random_flips):
        yield f".augment = true: the data set {block['dataset']!r} has no augmentation; remove the key"


def _explain_wrong_model_head(call: str, block: Mapping[str, Any], dataset: Dataset) -> str | None:
    """Return a message if a model class of transformers has the head of another task.

    Otherwise, the result is None.

    Args:
        call: The model's call.
        block: The experiment's block.
        dataset: The experiment's data set.
    """
    learns = libraries.find_library_of_call(call).list_tasks_of_model_class(call)
    task = (
        block["task"]
        or dataset.task
        or (dataset.shape and tasks.get_default_task_name(dataset.shape))
    )
    if not learns or task not in tasks.TASKS or task in learns:
        return None
    return (
        f"{call} has a head for {' or '.join(learns)}, but the task of the data set {block['dataset']!r} is "
        f"{task}; use the model's class for {task}, or another data set"
    )


def _iter_slowdown_faults(block: Mapping[str, Any]) -> Iterator[str]:
    slowdown = block["slowdown"]
    if slowdown is None:
        return
    if ("workers" in slowdown) != ("factor" in slowdown):
        yield f".slowdown = {slowdown}: workers and factor need each other; give both or neither"
    elif not slowdown or slowdown.get("workers") == []:
        yield f".slowdown = {slowdown}: slows no worker; give workers and factor, or sigma"
    for rank in slowdown.get("workers", []):
        if rank >= max(block["gpus"]):
            yield (
                f".slowdown.workers = {slowdown['workers']}: no cell has a worker of rank {rank} "
                f"(gpus = {block['gpus']}); ranks begin at 0"
            )
