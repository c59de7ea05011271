"""Reads a result set: a bundle, a study's results folder, or a version of the paper's tables."""

from __future__ import annotations

import functools
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pandas as pd

from stratbench.analysis.records.collect import Expectations, collect_records
from stratbench.analysis.records.columns import EPOCH_COLUMNS, read_cells, read_epochs
from stratbench.analysis.records.findings import AUDIT_COLUMNS
from stratbench.analysis.records.samples import Timeline
from stratbench.cell import record
from stratbench.cell.coordinates import CELL_PATTERN, Cell
from stratbench.cell.files import read_json, read_regular_file
from stratbench.cell.record import Record, RecordError
from stratbench.extensions.audit.audit import audit_cells, read_records, read_timelines
from stratbench.extensions.audit.rule import Key
from stratbench.extensions.paper import published
from stratbench.extensions.sets.archive import (
    MAX_MEMBER_BYTES,
    NAME,
    SetError,
    extract_bundle,
    quote_untrusted,
)
from stratbench.extensions.sets.keys import PAPER, VERSIONS


@dataclass(frozen=True, eq=False)
class ResultSet:
    """The results of one study: its cells, epochs, records and timelines."""

    #: Name of the set in a comparison.
    name: str
    #: Source that the user named: a path, or `paper:v1`.
    source: str
    study: str
    #: Table like cells.csv, with a row per cell, including cells without a record.
    cells: pd.DataFrame
    #: Table like epochs.csv, with a row per epoch.
    epochs: pd.DataFrame
    #: Records of the cells; empty for the paper's tables.
    records: tuple[Record, ...] = ()
    #: Timelines of the cells, by the audit's key of the cell.
    timelines: dict[Key, Timeline] = field(default_factory=dict)
    #: The resolved config, or None if unknown.
    config: dict[str, Any] | None = None
    #: The content of plan.json, or None without a plan.
    plan: dict[str, Any] | None = None
    #: The manifest of the bundle, or None if the set is no bundle.
    manifest: dict[str, Any] | None = None
    #: Accuracy that any working training reaches, by data set; only published tables need it.
    accuracy_floors: dict[str, float] = field(default_factory=dict)

    @functools.cached_property
    def findings(self) -> pd.DataFrame:
        """Findings of the audit, as a table like audit.csv."""
        audited = audit_cells(
            self.cells, self.records, self.accuracy_floors, timelines=self.timelines
        )
        frame = pd.DataFrame(audited, columns=list(AUDIT_COLUMNS))
        return frame.astype({"gpus": "Int64", "repeat": "Int64"})

    @property
    def is_published(self) -> bool:
        """Whether this is a published table, without records."""
        return self.source.startswith(PAPER)

    @property
    def has_replaced_hosts(self) -> bool:
        """Whether host names were replaced in the bundle of this set.

        Replaced names do not show whether two sets share a host.
        """
        return bool(self.manifest) and self.manifest["hosts"] == "replaced"

    @property
    def provenance(self) -> dict[str, str]:
        """Origin of the set as texts by label."""
        origin = {"source": self.source, "study": self.study}
        if self.manifest:
            product = self.manifest["product"]
            origin |= {
                "made by": f"{product['name']} {product['version']}",
                "newest record": self.manifest["created"],
                "sha256": self.manifest["sha256"],
                "hosts": self.manifest["hosts"],
            }
        return origin


def read_set(text: str, name: str | None = None, expected: Expectations | None = None) -> ResultSet:
    """Read a result set from a bundle, a folder `results/<study>`, or the paper's tables.

    Args:
        text: Path of a bundle or folder, or `paper:v1`.
        name: Name of the set, or None for the name of its study.
        expected: Expectations from the study's config, if available.

    Raises:
        SetError: If the source is none of these or cannot be read.
    """
    if text.startswith(PAPER):
        version = text.removeprefix(PAPER)
        if version not in VERSIONS:
            known = ", ".join(PAPER + v for v in VERSIONS)
            raise SetError(f"{quote_untrusted(text)} is no version of the paper; known: {known}")
        cells = published.make_cells_of_version(version)
        epochs = pd.DataFrame(columns=list(EPOCH_COLUMNS))
        study = f"paper-{version}"
        return ResultSet(
            name or study,
            text,
            study,
            cells,
            epochs,
            accuracy_floors=published.read_accuracy_floors(),
        )
    path = Path(text).expanduser()
    if path.is_dir():
        return _read_folder(path, text, name, None, expected)
    if not path.exists():
        raise SetError(
            f"{text} does not exist; a set is a bundle, a folder results/<study>, or {PAPER}{VERSIONS[0]}"
        )
    with tempfile.TemporaryDirectory(prefix="stratbench-set-") as folder:
        manifest = extract_bundle(path, Path(folder))
        return _read_folder(Path(folder), text, name, manifest, expected)


def _read_folder(
    folder: Path,
    source: str,
    name: str | None,
    manifest: dict[str, Any] | None,
    expected: Expectations | None,
) -> ResultSet:
    """Read the set in a folder of results. If the folder comes from a bundle, every record must be valid."""

    def make_set_error(error: Exception | str) -> SetError:
        # Paths in the folder that a bundle was extracted to are shown as paths in the bundle.
        return SetError(
            f"{source}: {str(error).replace(f'{folder}/', '')}" if manifest else str(error)
        )

    cells = _find_cells(folder, manifest, make_set_error)
    if not cells:
        raise SetError(
            f"{source} has no record and no list of cells; name a folder results/<study>"
        )
    # The tables and the audit both need the records, which may be thousands of files.
    read = functools.cache(record.read_measured_record)
    with tempfile.TemporaryDirectory(prefix="stratbench-set-") as work:
        out, epochs_out = Path(work, "cells.csv"), Path(work, "epochs.csv")
        bad = [
            row
            for row in collect_records(cells, folder, out, epochs_out, expected, read)
            if row["status"] == "error"
        ]
        if manifest and bad:
            raise make_set_error(bad[0]["reason"])
        frame, epochs = read_cells(out), read_epochs(epochs_out)
    if not frame["record_path"].notna().any():
        raise SetError(f"{source} has no record; train the study's cells first")
    try:
        records = tuple(read_records(frame, folder, read))
    except RecordError as e:
        raise make_set_error(e) from e
    if manifest:
        for path in folder.glob("cells/**/timeline.csv"):
            _check_timeline(path, make_set_error)
    study = cells[0].study
    if manifest and study != manifest["study"]:
        raise make_set_error(
            f"its records are of study {study}, but its manifest names {manifest['study']}"
        )
    config, plan = (
        _read_json_object(folder / file, make_set_error) for file in ("config.json", "plan.json")
    )
    timelines = read_timelines(frame, folder)
    return ResultSet(
        name or study, source, study, frame, epochs, records, timelines, config, plan, manifest
    )


def _find_cells(folder: Path, manifest: dict[str, Any] | None, make_error: Any) -> list[Cell]:
    """Return the cells that cells.json lists, followed by other cells with a record."""
    listed = folder / "cells.json"
    has_list = listed.exists()
    cells = list(_read_cell_list(listed, make_error)) if has_list else []
    if len({cell.study for cell in cells}) > 1:
        raise make_error("cells.json lists cells of more than one study")
    known = {cell.path for cell in cells}
    if len(known) < len(cells):
        raise make_error("cells.json lists a cell twice")
    pattern = CELL_PATTERN.format(experiment="*", strategy="*", model="*", gpus="*", repeat="*")
    for path in sorted(folder.glob(f"cells/{pattern}/record.json")):
        if path.parent.relative_to(folder / "cells").as_posix() in known:
            continue
        if has_list and not manifest:
            continue  # the study's config no longer has this cell
        try:
            content = read_json(path)
            cell = _parse_cell(content["cell"])
        except (OSError, ValueError, KeyError, TypeError) as e:
            raise make_error(f"{path} is not a record: {e}") from e
        cells.append(cell)
        known.add(cell.path)
    return cells


def _read_cell_list(path: Path, make_error: Any) -> Iterator[Cell]:
    """Yield the cells that a file cells.json lists."""
    try:
        listed = read_json(path)
        if not isinstance(listed, list):
            raise ValueError("it is no list")
        for coordinates in listed:
            yield _parse_cell(coordinates)
    except (OSError, ValueError, TypeError) as e:
        raise make_error(f"{path} does not list cells: {e}") from e


def _parse_cell(coordinates: Any) -> Cell:
    """Make a cell from untrusted coordinates.

    Raises:
        ValueError: If the values are not coordinates of a cell.
    """
    if not isinstance(coordinates, dict) or coordinates.keys() != Cell.__dataclass_fields__.keys():
        raise ValueError("a cell needs exactly seven coordinates")
    cell = Cell(**coordinates)
    for part in (cell.study, cell.experiment, cell.strategy, cell.model, cell.dataset):
        if not isinstance(part, str) or not NAME.fullmatch(part):
            raise ValueError(f"{quote_untrusted(part)} cannot be a name in a study")
    if (
        not all(type(n) is int and 0 <= n < 10**6 for n in (cell.gpus, cell.repeat))
        or not cell.gpus
    ):
        raise ValueError(
            "gpus and repeat must be whole numbers below a million, and gpus at least 1"
        )
    return cell


def _read_json_object(path: Path, make_error: Any) -> dict[str, Any] | None:
    """Read the JSON object in a file.

    The result is None if the file does not exist.
    """
    if not path.exists():
        return None
    try:
        content = read_json(path)
    except (OSError, ValueError) as e:
        raise make_error(f"{path} is not JSON: {e}") from e
    if not isinstance(content, dict):
        raise make_error(f"{path} is no JSON object")
    return content


def _check_timeline(path: Path, make_error: Any) -> None:
    """Raise an error if a file is not a timeline.

    A timeline is a table with the column `kind`.
    """
    try:
        text = read_regular_file(path, MAX_MEMBER_BYTES).decode()
    except (OSError, ValueError) as e:
        raise make_error(f"{path} cannot be read as text: {e}") from e
    if "kind" not in text.partition("\n")[0].split(",") or "\0" in text:
        raise make_error(f"{path} is not a timeline: it lacks the column kind")
