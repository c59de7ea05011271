"""Checks that data and code match a cell's settings, and describes them."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from stratbench.cell.settings import Settings
from stratbench.cell.text.words import format_names
from stratbench.strategies import get_strategy_class
from stratbench.telemetry.git import read_git_state
from stratbench.train.job import Job
from stratbench.workload import tasks, users_code
from stratbench.workload.data import prepared
from stratbench.workload.data.own_data import is_own_data_set
from stratbench.workload.data.placement import BUFFERED_BATCHES
from stratbench.workload.data.sources import DataError
from stratbench.workload.network import models
from stratbench.workload.users_code import ModelError


def check_code_and_data(data: Path, s: Settings) -> None:
    """Check that the user's code and the prepared data match the cell's settings.

    Raises:
        ModelError: If the user's code has changed.
        DataError: If the prepared data do not match or do not suit the settings.
    """
    files = get_strategy_class(s.strategy).list_user_files(s.options)
    if files and users_code.hash_named_files(files) != s.options["sha256"]:
        names = format_names(list(files))
        raise ModelError(
            f"strategy {s.strategy!r}: files that its options name ({names}) have changed since the run was "
            "started; start the run again"
        )
    for what, spec in ((f"model {s.model!r}", s.own_model), ("its task", s.own_task)):
        if spec:
            users_code.check_user_code_unchanged(what, spec)
    check_prepared_data(data, s)


def check_prepared_data(folder: Path, s: Settings) -> None:
    """Check, by the metadata of the prepared data, that they match the settings.

    For a user's own data, the sizes are also checked. They are unknown until the data are prepared.

    Raises:
        DataError: If the prepared data do not match or do not suit the settings.
    """
    meta = prepared.read_unverified_metadata(folder)
    check_data_spec(meta, folder, s)
    if not is_own_data_set(s.data_spec):
        return
    if s.global_batch > meta["train_samples"]:
        raise DataError(
            f"a step of {s.gpus} workers would take {s.global_batch} samples, but the data set {s.dataset!r} "
            f"has only {meta['train_samples']} training samples; use a smaller batch"
        )
    try:
        models.compute_input_shape(models.get_model_or_name(s), tuple(meta["shape"]))
    except ValueError as e:
        raise DataError(f"data set {s.dataset!r}: {e}") from e


def check_data_spec(meta: Mapping[str, Any], folder: Path, s: Settings) -> None:
    """Check that a folder contains the data set that the settings define.

    The folder may contain another data set with the same name: an older version, or one of another config
    with the same `results`.

    Args:
        meta: Meta data of the prepared data set.
        folder: Folder of the prepared data set.
        s: Settings of the cell.

    Raises:
        DataError: If the folder has another data set.
    """
    wanted = {"format": prepared.FORMAT, "name": s.dataset, "spec": s.data_spec}
    if other := [key for key, value in wanted.items() if meta.get(key) != value]:
        differences = "; ".join(
            f"{key} {meta.get(key)!r} in place of {wanted[key]!r}" for key in other
        )
        raise DataError(
            f"{folder}: the data set here is not that of the cell's settings ({differences}); start the run "
            "again, which prepares the data set. If two configs share `results`, give different data sets "
            "different names"
        )


def build_data_entry(job: Job, meta: dict[str, Any]) -> dict[str, Any]:
    """Return the entry `data` of the record."""
    buffered = job.settings.data_placement == "host"
    return {
        "name": job.cell.dataset,
        "sha256": meta["sha256"],
        "train_samples": meta["train_samples"],
        "test_samples": meta["test_samples"],
        "synthetic": meta["generated"],
        **({"buffered_batches": BUFFERED_BATCHES} if buffered else {}),
        **build_user_data_entry(job),
    }


def build_model_entry_without_worker(job: Job) -> dict[str, Any]:
    """Return the record's entry `model` if no worker has built the model."""
    return {
        "parameters": None,
        "trainable_parameters": None,
        "initial_weights_sha256": None,
        "input_shape": list(
            models.compute_input_shape(models.get_model_or_name(job.settings), job.data_shape)
        ),
        "classes": job.data["classes"],
        "batchnorm": None,
        "dropout": None,
    }


def build_model_entry(job: Job, model_facts: dict[str, Any] | None) -> dict[str, Any]:
    """Return the entry `model` of the record.

    For a user's own model the entry also has files and git revision.

    Args:
        job: Job of the cell.
        model_facts: A worker's description of the model, or None if no worker has built the model.
    """
    model_facts, spec = model_facts or build_model_entry_without_worker(job), job.settings.own_model
    if spec is None:
        return model_facts
    declared = {"arguments": None, "sharding": None} | model_facts.get("own", {})
    return model_facts | {"own": declared | build_code_entry(spec)}


def build_task_entry(job: Job, worker: dict[str, Any], meta: dict[str, Any]) -> dict[str, Any]:
    """Return the entry `task` of the record.

    For a user's own task the entry also has files and git revision.

    Args:
        job: Job of the cell.
        worker: Results of a worker.
        meta: Meta data of the data set.
    """
    s, shape = job.settings, job.data_shape
    facts = worker.get("task") or tasks.describe_task(
        tasks.get_task(s, shape),
        tasks.get_task_name(s, shape),
        meta["classes"],
        shape,
        meta.get("least_loss"),
    )
    return facts | {"own": s.own_task and build_code_entry(s.own_task)}


def build_code_entry(spec: dict[str, Any]) -> dict[str, Any]:
    """Return the record's description of a user's code: call, hash, files and git revision."""
    files = users_code.find_source_files(spec["call"], users_code.list_code_folders())
    return {key: spec[key] for key in ("call", "sha256", "version")} | build_files_entry(files)


def build_files_entry(files: Mapping[str, Path]) -> dict[str, Any]:
    """Return the record's description of a user's files: names and git revision."""
    git = read_git_state(next(iter(files.values())).parent) if files else None
    return {"files": list(files), "git": git}


def build_user_data_entry(job: Job) -> dict[str, Any]:
    """Return the entry `own` on a user's own data set, for `data` in the record."""
    spec = job.settings.data_spec
    if not is_own_data_set(spec):
        return {}
    if "call" in spec:
        return {"own": {"kind": spec["kind"], "kwargs": spec["kwargs"]} | build_code_entry(spec)}
    return {"own": {key: spec[key] for key in ("kind", "sha256")}}
