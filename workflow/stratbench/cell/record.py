"""Reads, writes and validates records: JSON files with the measurements of a cell (a training run)."""

from __future__ import annotations

import json
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

from stratbench.cell import software_gpu
from stratbench.cell.coordinates import Cell
from stratbench.cell.extensions import load_extensions
from stratbench.cell.files import read_json, write_text_atomically
from stratbench.cell.installation import SCHEMAS
from stratbench.cell.settings import Settings, build_settings_schema
from stratbench.cell.text.help_page import format_help_address

Record = dict[str, Any]
SCHEMA_PATH = SCHEMAS / "record.schema.json"
SCHEMA_VERSION = 2
#: The file with the reason of a failure, which the launcher writes into the cell's log folder.
FAILURE_FILE = "failure.json"


class RecordError(ValueError):
    """A file is not a valid record; the message names the file, the field and the error."""


@cache
def load_schema() -> dict[str, Any]:
    """Return the JSON Schema of a record, including the schema of its settings."""
    whole = json.loads(SCHEMA_PATH.read_text(encoding="utf-8"))
    whole["properties"]["settings"] |= build_settings_schema()
    return whole


@cache
def compile_record_validator(detailed: bool = False) -> Callable[[Record], Record] | None:
    """Return the compiled validator of records, or None if no validator is installed.

    Args:
        detailed: Whether the validator's exceptions name the field and the value. Such a validator takes
            three times as long to compile, in every process that reads or writes a record.
    """
    try:
        import fastjsonschema
    except ImportError:
        return None
    # fastjsonschema is 20 times as fast as jsonschema.
    return fastjsonschema.compile(load_schema(), detailed_exceptions=detailed)


def can_validate_records() -> bool:
    """Return whether the package that validates records is installed. Machines that only train may lack it.

    Call this before a long training, so that a missing package is found early.
    """
    return compile_record_validator() is not None


def validate_record(record: Record, source: str | Path = "record") -> None:
    """Raise RecordError with the first violation of the schema in `record`, if any.

    Violations are not detected if no validator is installed.
    """
    validate = compile_record_validator()
    if validate is None:
        return
    from fastjsonschema import JsonSchemaValueException

    try:
        try:
            validate(record)
        except JsonSchemaValueException:
            compile_record_validator(detailed=True)(record)
    except JsonSchemaValueException as e:
        field_path = ".".join(e.path[1:]) or "top level"
        violation = e.message.removeprefix(e.name).strip()[:200]
        if field_path == "settings.more" and isinstance(e.value, dict):
            missing = ", ".join(sorted(e.value.keys() - load_extensions().keys()))
            violation = f"needs the extension {missing}, which is not installed"
        if not isinstance(e.value, dict | list):
            violation += f", and is {e.value!r:.80}"
        raise RecordError(f"{source} is not a valid record: {field_path}: {violation}") from e


def write_record(path: str | Path, record: Record) -> None:
    """Write a record to `path` atomically. Raise RecordError if the record is invalid."""
    validate_record(record, path)
    write_text_atomically(path, json.dumps(record, indent=1, allow_nan=False) + "\n")


def read_record(path: str | Path) -> Record:
    """Return the record in `path`. Raise RecordError, which names the file, for an invalid record."""
    try:
        record = read_json(path)
        validate_record(record, path)
    except OSError as e:
        raise RecordError(f"{path} cannot be read: {e.strerror}") from e
    except RecordError:
        raise
    except ValueError as e:
        raise RecordError(f"{path} is not JSON, or has values that no record has: {e}") from e
    return record


def read_measured_record(path: str | Path) -> Record:
    """Return the record in `path`, unless it comes from the software GPU of the tests.

    Raises:
        RecordError: The record is invalid, or comes from the tests' software GPU, which measures nothing.
    """
    record = read_record(path)
    if software_gpu.was_trained_on_software_gpu(record):
        raise RecordError(f"{path} was {software_gpu.WHY}")
    return record


def read_failure_reason(log_dir: Path) -> str | None:
    """Return why a cell without a record failed. None if its log folder shows no failure."""
    path = log_dir / FAILURE_FILE
    try:
        reason = read_json(path)["reason"]
    except FileNotFoundError:
        return None
    except OSError as e:
        return f"failed; {path} cannot be read: {e.strerror}"
    except (ValueError, KeyError, TypeError) as e:
        return f"failed; {path} does not say why ({type(e).__name__}: {e})"
    return reason if isinstance(reason, str) and reason else "failed; see its log"


def is_valid_record_of_cell(path: str | Path, cell_json: str, settings_json: str) -> bool:
    """Return whether a file is a valid record of a cell with certain settings.

    Args:
        path: Path of the file.
        cell_json: The cell as JSON.
        settings_json: The settings as JSON.
    """
    try:
        record = read_record(path)
    except (OSError, RecordError):
        return False
    is_of_cell = record["cell"] == json.loads(cell_json)
    return is_of_cell and record["settings"] == json.loads(settings_json)


def describe_settings_differences(record: Record, settings: Settings) -> str | None:
    """Return a sentence on how a record's settings differ from the config's. None if equal."""
    wanted = json.loads(settings.as_json())
    recorded = record["settings"]
    keys = dict.fromkeys([*wanted, "more"])
    differing = [key for key in keys if recorded.get(key) != wanted.get(key)]
    if not differing:
        return None
    each = (f"{key} {recorded.get(key)} (config: {wanted.get(key)})" for key in differing)
    text = f"was trained with {', '.join(each)}; delete it to train its cell again"
    return f"{text} {format_help_address('delete it to train its cell again')}"


def get_cell(record: Record) -> Cell:
    """Return the cell that a record belongs to."""
    return Cell(**record["cell"])
