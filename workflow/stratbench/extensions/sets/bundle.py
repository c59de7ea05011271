"""Writes a study's results to one bundle: records, timelines, config, environment and plan."""

from __future__ import annotations

import csv
import io
import json
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

from stratbench.analysis.records.derived import get_field_by_path
from stratbench.cell import record
from stratbench.cell.coordinates import CELL_PATTERN, Cell
from stratbench.cell.files import read_json, read_regular_file
from stratbench.cell.record import Record
from stratbench.extensions.sets.archive import (
    MAX_MEMBER_BYTES,
    SUFFIX,
    SetError,
    write_bundle_archive,
)
from stratbench.extensions.sets.private import Replacements, collect_replacements, remove_secrets

#: Columns of timeline.csv with names of hosts and ids of GPUs.
COLUMNS_WITH_NAMES = ("node", "id")
#: Fields of a worker's provenance that are in environment.json, because workers of one machine share them.
ENVIRONMENT_FIELDS = (
    "host.os", "host.cpu_model", "gpu.name", "driver", "software", "flags", "environment",
)  # fmt: skip


def write_bundle(
    study_dir: Path, config: Mapping[str, Any], hosts: str = "named", out: Path | None = None
) -> tuple[Path, dict[str, Any]]:
    """Write the bundle of a study, and return its path and manifest.

    The time of creation is the end of the last cell, so that equal records give equal bytes.

    Args:
        study_dir: The folder results/<study>.
        config: The config with all defaults.
        hosts: `replaced` to replace the names of hosts and users, else `named`.
        out: Path of the bundle; by default results/<study>/<study>.stratbench.zip.

    Raises:
        SetError: The study has no record, or an invalid record.
    """
    records = dict(iter_records_by_path(study_dir))
    if not records:
        raise SetError(f"{study_dir} has no record; train the study's cells first")
    timelines = {
        name: read_timeline(study_dir / name) for name in list_timeline_paths(study_dir, records)
    }
    extra = {
        "config.json": remove_secrets(dict(config)),
        "cells.json": list_cell_coordinates(study_dir, records),
    }
    if (study_dir / "plan.json").exists():
        extra["plan.json"] = remove_secrets(_read_json_file(study_dir / "plan.json"))
    cleaned = {name: remove_secrets(record, is_record=True) for name, record in records.items()}
    study = next(iter(records.values()))["cell"]["study"]
    if hosts == "replaced":
        nodes = {node for text in timelines.values() for node in list_hosts_in_timeline(text)}
        words = collect_replacements(cleaned.values(), nodes)
        cleaned = {
            name: replace_names_in_record(name, record, words) for name, record in cleaned.items()
        }
        timelines = {
            name: replace_names_in_timeline(text, words) for name, text in timelines.items()
        }
        extra = {"cells.json": extra.pop("cells.json")} | {
            k: words.replace_names_in_value(v) for k, v in extra.items()
        }
    extra["environment.json"] = collect_worker_environments(cleaned.values())
    files = {
        name: json.dumps(record, indent=1) + "\n" for name, record in {**cleaned, **extra}.items()
    }
    created = max(
        (get_field_by_path(r, "provenance.finished") or "" for r in cleaned.values()), default=""
    )
    out = out or study_dir / f"{study}{SUFFIX}"
    return out, write_bundle_archive(out, files | timelines, study, created, hosts)


def iter_records_by_path(study_dir: Path) -> Iterator[tuple[str, Record]]:
    """Yield the path of each record below results/<study>, with the record.

    Records of cells that the study's config no longer has, and so cells.json does not list, are left out.
    """
    listed = study_dir / "cells.json"
    wanted = (
        {Cell(**listed_cell).path for listed_cell in _read_json_file(listed)}
        if listed.exists()
        else None
    )
    pattern = CELL_PATTERN.format(experiment="*", strategy="*", model="*", gpus="*", repeat="*")
    for path in sorted(study_dir.glob(f"cells/{pattern}/record.json")):
        if (
            wanted is not None
            and path.parent.relative_to(study_dir / "cells").as_posix() not in wanted
        ):
            continue
        try:
            yield path.relative_to(study_dir).as_posix(), record.read_measured_record(path)
        except record.RecordError as e:
            raise SetError(f"{e}; delete it to train its cell again") from e


def list_timeline_paths(study_dir: Path, records: Mapping[str, Record]) -> list[str]:
    """Return the path of each record's timeline below results/<study>, if it exists.

    Args:
        study_dir: The folder results/<study>.
        records: Records by their paths below this folder.
    """
    names = [name.replace("record.json", "timeline.csv") for name in records]
    return [name for name in names if (study_dir / name).is_file()]


def read_timeline(path: Path) -> str:
    """Return the content of a timeline.csv.

    Raises:
        SetError: The file is no text, or is too large.
    """
    try:
        return read_regular_file(path, MAX_MEMBER_BYTES).decode()
    except (OSError, ValueError) as e:
        raise SetError(f"{path} cannot be read as a timeline: {e}") from e


def list_cell_coordinates(study_dir: Path, records: Mapping[str, Record]) -> list[dict[str, Any]]:
    """Return the coordinates of all cells of a study, from cells.json.

    If this file does not exist, they are those of the records.
    """
    path = study_dir / "cells.json"
    return (
        _read_json_file(path) if path.exists() else [record["cell"] for record in records.values()]
    )


def replace_names_in_record(path: str, content: Record, replacements: Replacements) -> Record:
    """Return a record in which the names of hosts, GPUs and users are replaced.

    Args:
        path: Path of the record, for messages.
        content: The record.
        replacements: The replacement of each name.

    Raises:
        SetError: A name cannot be replaced, or the record is invalid afterwards.
    """
    try:
        replaced = replacements.replace_names_in_record(content)
        record.validate_record(replaced, path)
    except ValueError as e:
        raise SetError(f"{path}: {e}") from e
    return replaced


def list_hosts_in_timeline(timeline: str) -> set[str]:
    """Return the names of the hosts in the content of a timeline.csv."""
    rows = csv.DictReader(io.StringIO(timeline))
    return {row["node"] for row in rows if row.get("node")}


def replace_names_in_timeline(timeline: str, replacements: Replacements) -> str:
    """Return the content of a timeline.csv with replaced names of hosts and GPUs."""
    end = "\r\n" if "\r\n" in timeline else "\n"
    rows = csv.DictReader(io.StringIO(timeline, newline=""))
    out = io.StringIO(newline="")
    writer = csv.DictWriter(out, rows.fieldnames or (), extrasaction="ignore", lineterminator=end)
    writer.writeheader()
    for row in rows:
        writer.writerow(
            row
            | {
                name: replacements.replace_names(row[name])
                for name in COLUMNS_WITH_NAMES
                if row.get(name)
            }
        )
    return out.getvalue()


def collect_worker_environments(records: Iterable[Record]) -> dict[str, list[Any]]:
    """Return the distinct values of each field in ENVIRONMENT_FIELDS, over all workers of all records."""
    by_path: dict[str, list[Any]] = {path: [] for path in ENVIRONMENT_FIELDS}
    for worker in (worker for one in records for worker in one["workers"]):
        for path, values in by_path.items():
            value = get_field_by_path(worker["provenance"], path)
            if value is not None and value not in values:
                values.append(value)
    return by_path


def _read_json_file(path: Path) -> Any:
    try:
        return read_json(path)
    except (OSError, ValueError) as e:
        raise SetError(f"{path} cannot be read as JSON: {e}") from e
