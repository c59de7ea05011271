"""Writes a study's results as one file: records, timelines, config, environment, and the plan."""

from __future__ import annotations

import csv
import io
import json
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

from stratbench.analysis.records.derived import value_at
from stratbench.cell import record
from stratbench.cell.coordinates import CELL_PATTERN, Cell
from stratbench.cell.files import read_json, read_regular
from stratbench.cell.record import Record
from stratbench.extensions.sets.archive import MAX_MEMBER_BYTES, SUFFIX, SetError, write_archive
from stratbench.extensions.sets.private import Replacements, replacements_for, without_secrets

#: Columns of a timeline that name hosts and GPUs.
NAMING = ("node", "id")
#: Parts of a worker's provenance that describe its environment, not its rank.
ENVIRONMENT = (
    "host.os", "host.cpu_model", "gpu.name", "driver", "software", "flags", "environment",
)  # fmt: skip


def write_bundle(
    study_dir: Path, config: Mapping[str, Any], hosts: str = "named", out: Path | None = None
) -> tuple[Path, dict[str, Any]]:
    """Write results/<study>/<study>.stratbench.zip; return its path and its manifest.

    Equal records give equal bytes: the end of the last cell is the time of creation.

    Args:
        study_dir: The folder results/<study>.
        config: The config.
        hosts: `named` or `replaced`.
        out: File to write in its place.

    Raises:
        SetError: If there is no record, or an invalid one.
    """
    records = dict(read_all_records(study_dir))
    if not records:
        raise SetError(f"{study_dir} holds no record; train the study's cells first")
    timelines = {
        name: read_timeline(study_dir / name) for name in timeline_names(study_dir, records)
    }
    extra = {
        "config.json": without_secrets(dict(config)),
        "cells.json": listed_cells(study_dir, records),
    }
    if (study_dir / "plan.json").exists():
        extra["plan.json"] = without_secrets(_json(study_dir / "plan.json"))
    cleaned = {name: without_secrets(record, is_record=True) for name, record in records.items()}
    study = next(iter(records.values()))["cell"]["study"]
    if hosts == "replaced":
        nodes = {node for text in timelines.values() for node in nodes_in(text)}
        words = replacements_for(cleaned.values(), nodes)
        cleaned = {name: with_words(name, record, words) for name, record in cleaned.items()}
        timelines = {name: replaced_timeline(text, words) for name, text in timelines.items()}
        extra = {"cells.json": extra.pop("cells.json")} | {
            k: words.value(v) for k, v in extra.items()
        }
    extra["environment.json"] = environment_of(cleaned.values())
    files = {
        name: json.dumps(record, indent=1) + "\n" for name, record in {**cleaned, **extra}.items()
    }
    created = max((value_at(r, "provenance.finished") or "" for r in cleaned.values()), default="")
    out = out or study_dir / f"{study}{SUFFIX}"
    return out, write_archive(out, files | timelines, study, created, hosts)


def read_all_records(study_dir: Path) -> Iterator[tuple[str, Record]]:
    """Yield the records of the study's cells, by path below results/<study>, in a fixed order.

    Cells that cells.json does not list belong to a matrix that the study no longer has.
    """
    listed = study_dir / "cells.json"
    wanted = (
        {Cell(**listed_cell).path for listed_cell in _json(listed)} if listed.exists() else None
    )
    pattern = CELL_PATTERN.format(experiment="*", strategy="*", model="*", gpus="*", repeat="*")
    for path in sorted(study_dir.glob(f"cells/{pattern}/record.json")):
        if (
            wanted is not None
            and path.parent.relative_to(study_dir / "cells").as_posix() not in wanted
        ):
            continue
        try:
            yield path.relative_to(study_dir).as_posix(), record.read_measured(path)
        except record.RecordError as e:
            raise SetError(f"{e}; delete it to train its cell again") from e


def timeline_names(study_dir: Path, records: Mapping[str, Record]) -> list[str]:
    """Return the names of the timelines next to the records; some records have none."""
    names = [name.replace("record.json", "timeline.csv") for name in records]
    return [name for name in names if (study_dir / name).is_file()]


def read_timeline(path: Path) -> str:
    try:
        return read_regular(path, MAX_MEMBER_BYTES).decode()
    except (OSError, ValueError) as e:
        raise SetError(f"{path} is no timeline that can be read: {e}") from e


def listed_cells(study_dir: Path, records: Mapping[str, Record]) -> list[dict[str, Any]]:
    """Return the coordinates of the config's cells, or without a list, of those with a record."""
    path = study_dir / "cells.json"
    return _json(path) if path.exists() else [record["cell"] for record in records.values()]


def with_words(name: str, found: Record, words: Replacements) -> Record:
    """Return a record with its names replaced.

    Args:
        name: Name of the record.
        found: The record.
        words: Replacements.

    Raises:
        SetError: If that fails, or makes the record invalid.
    """
    try:
        replaced = words.record(found)
        record.validate(replaced, name)
    except ValueError as e:
        raise SetError(f"{name}: {e}") from e
    return replaced


def nodes_in(timeline: str) -> set[str]:
    """Return the names of the hosts in a timeline."""
    rows = csv.DictReader(io.StringIO(timeline))
    return {row["node"] for row in rows if row.get("node")}


def replaced_timeline(text: str, words: Replacements) -> str:
    """Return a timeline with its names replaced, in the columns that hold names."""
    end = "\r\n" if "\r\n" in text else "\n"
    rows = csv.DictReader(io.StringIO(text, newline=""))
    out = io.StringIO(newline="")
    writer = csv.DictWriter(out, rows.fieldnames or (), extrasaction="ignore", lineterminator=end)
    writer.writeheader()
    for row in rows:
        writer.writerow(row | {name: words.text(row[name]) for name in NAMING if row.get(name)})
    return out.getvalue()


def environment_of(records: Iterable[Record]) -> dict[str, list[Any]]:
    """Return the environment of the workers of all records: the distinct values of each kind."""
    by_path: dict[str, list[Any]] = {path: [] for path in ENVIRONMENT}
    for worker in (worker for one in records for worker in one["workers"]):
        for path, values in by_path.items():
            value = value_at(worker["provenance"], path)
            if value is not None and value not in values:
                values.append(value)
    return by_path


def _json(path: Path) -> Any:
    try:
        return read_json(path)
    except (OSError, ValueError) as e:
        raise SetError(f"{path} is not JSON that can be read: {e}") from e
