"""Reads a result set: a bundle, a study's results folder, or a version of the paper's tables."""

from __future__ import annotations

import functools
import tempfile
from collections.abc import Callable, Iterator
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
from stratbench.extensions.audit.rule import CellKey
from stratbench.extensions.paper import published
from stratbench.extensions.sets.archive import (
    MAX_MEMBER_BYTES,
    NAME,
    SetError,
    extract_bundle,
    quote_untrusted_value,
)
from stratbench.extensions.sets.keys import PAPER, VERSIONS

#: A function from an exception or a text to a SetError with the source of the set.
SetErrorMaker = Callable[[Exception | str], SetError]


@dataclass(frozen=True, eq=False)
class ResultSet:
    """The results of one study: its cells, epochs, records and timelines."""

    #: Name of the set in a comparison.
    name: str
    #: Source that the user named: a path, or `paper:v1`.
    source: str
    study: str
    #: Table like cells.csv. It has a row per cell, also for cells without a record.
    cells: pd.DataFrame
    #: Table like epochs.csv, with a row per epoch.
    epochs: pd.DataFrame
    #: Records of the cells; empty for the paper's tables.
    records: tuple[Record, ...] = ()
    #: Timeline of each cell, by the cell's key in the audit.
    timelines: dict[CellKey, Timeline] = field(default_factory=dict)
    #: Config of the study with all defaults, or None if unknown.
    config: dict[str, Any] | None = None
    #: Manifest of the bundle, or None if the set is no bundle.
    manifest: dict[str, Any] | None = None
    #: Accuracy of the simplest models on each data set, from 0 to 1. Only the paper's tables have it.
    accuracy_floors: dict[str, float] = field(default_factory=dict)

    @functools.cached_property
    def findings(self) -> pd.DataFrame:
        """Findings of the audit on this set, as a table like audit.csv."""
        audited = audit_cells(
            self.cells, self.records, self.accuracy_floors, timelines=self.timelines
        )
        frame = pd.DataFrame(audited, columns=list(AUDIT_COLUMNS))
        return frame.astype({"gpus": "Int64", "repeat": "Int64"})

    @property
    def is_published(self) -> bool:
        """Whether this set is the paper's tables, which have no records."""
        return self.source.startswith(PAPER)

    @property
    def has_replaced_host_names(self) -> bool:
        """Whether the names of hosts are replaced in this set.

        Replaced names do not show whether two sets have a host in common.
        """
        return bool(self.manifest) and self.manifest["hosts"] == "replaced"

    @property
    def provenance(self) -> dict[str, str]:
        """Texts on the origin of the set by label, such as `study` and `source`."""
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


def read_set(
    source: str, name: str | None = None, expected: Expectations | None = None
) -> ResultSet:
    """Read a result set from a bundle, a folder `results/<study>`, or the paper's tables.

    Args:
        source: Path of a bundle or folder, or `paper:v1`.
        name: Name of the set, or None for the name of its study.
        expected: What the records must have according to the study's config, if this is known.

    Raises:
        SetError: The source is none of these, or cannot be read.
    """
    if source.startswith(PAPER):
        version = source.removeprefix(PAPER)
        if version not in VERSIONS:
            known = " or ".join(PAPER + v for v in VERSIONS)
            raise SetError(
                f"{quote_untrusted_value(source)} is no version of the paper; use {known}"
            )
        cells = published.make_cells_from_paper(version)
        epochs = pd.DataFrame(columns=list(EPOCH_COLUMNS))
        study = f"paper-{version}"
        return ResultSet(
            name or study,
            source,
            study,
            cells,
            epochs,
            accuracy_floors=published.read_accuracy_floors(),
        )
    path = Path(source).expanduser()
    if path.is_dir():
        return _read_folder(path, source, name, None, expected)
    if not path.exists():
        raise SetError(
            f"{source} does not exist; name a bundle, a folder results/<study>, or {PAPER}{VERSIONS[0]}"
        )
    with tempfile.TemporaryDirectory(prefix="stratbench-set-") as folder:
        manifest = extract_bundle(path, Path(folder))
        return _read_folder(Path(folder), source, name, manifest, expected)


def _read_folder(
    folder: Path,
    source: str,
    name: str | None,
    manifest: dict[str, Any] | None,
    expected: Expectations | None,
) -> ResultSet:
    """Read a result set from the folder of a study or of an extracted bundle.

    Args:
        folder: The folder.
        source: Source of the set that the user named.
        name: Name of the set, or None for the name of its study.
        manifest: Manifest of the bundle, or None for a folder of results. Every record of a bundle must be
            valid.
        expected: What the records must have according to the study's config, if this is known.
    """

    def make_set_error(error: Exception | str) -> SetError:
        # The message shows the path in the bundle, and not the path in the temporary folder.
        return SetError(
            f"{source}: {str(error).replace(f'{folder}/', '')}" if manifest else str(error)
        )

    cells = _list_cells_of_set(folder, manifest, make_set_error)
    if not cells:
        raise SetError(
            f"{source} has no record and no list of cells; name a folder results/<study>"
        )
    # The tables and the audit both read the records, which may be thousands of files, so each is read once.
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
            f"the records are of study {study}, but the manifest names study {manifest['study']}"
        )
    config = _read_json_object(folder / "config.json", make_set_error)
    _read_json_object(folder / "plan.json", make_set_error)  # a set with a damaged plan is refused
    timelines = read_timelines(frame, folder)
    return ResultSet(
        name or study, source, study, frame, epochs, records, timelines, config, manifest
    )


def _list_cells_of_set(
    folder: Path, manifest: dict[str, Any] | None, make_error: SetErrorMaker
) -> list[Cell]:
    """Return a set's cells: first those in cells.json, then others with a record.

    Args:
        folder: Folder of the set.
        manifest: Manifest of the bundle, or None for a folder of results.
        make_error: Returns the SetError with a given text.
    """
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
            continue  # cells.json does not list this cell: it was removed from the study's config.
        try:
            content = read_json(path)
            cell = _parse_cell(content["cell"])
        except (OSError, ValueError, KeyError, TypeError) as e:
            raise make_error(f"{path} is not a record: {e}") from e
        cells.append(cell)
        known.add(cell.path)
    return cells


def _read_cell_list(path: Path, make_error: SetErrorMaker) -> Iterator[Cell]:
    """Yield the cells that a file cells.json lists."""
    try:
        listed = read_json(path)
        if not isinstance(listed, list):
            raise ValueError("the file is not a JSON list")
        for coordinates in listed:
            yield _parse_cell(coordinates)
    except (OSError, ValueError, TypeError) as e:
        raise make_error(f"{path} does not list cells: {e}") from e


def _parse_cell(coordinates: Any) -> Cell:
    """Make a cell from a JSON value of a bundle, which may be anything.

    Raises:
        ValueError: The value has no valid coordinates of a cell.
    """
    if not isinstance(coordinates, dict) or coordinates.keys() != Cell.__dataclass_fields__.keys():
        raise ValueError(
            f"a cell has exactly the seven coordinates {', '.join(Cell.__dataclass_fields__)}"
        )
    cell = Cell(**coordinates)
    for part in (cell.study, cell.experiment, cell.strategy, cell.model, cell.dataset):
        if not isinstance(part, str) or not NAME.fullmatch(part):
            raise ValueError(
                f"{quote_untrusted_value(part)} cannot be the name of a study, experiment, strategy, model "
                "or data set"
            )
    if (
        not all(type(n) is int and 0 <= n < 10**6 for n in (cell.gpus, cell.repeat))
        or not cell.gpus
    ):
        raise ValueError(
            "gpus and repeat must be whole numbers below a million, and gpus at least 1"
        )
    return cell


def _read_json_object(path: Path, make_error: SetErrorMaker) -> dict[str, Any] | None:
    """Return the JSON object in a file, or None if the file does not exist."""
    if not path.exists():
        return None
    try:
        content = read_json(path)
    except (OSError, ValueError) as e:
        raise make_error(f"{path} is not JSON: {e}") from e
    if not isinstance(content, dict):
        raise make_error(f"{path} is no JSON object")
    return content


def _check_timeline(path: Path, make_error: SetErrorMaker) -> None:
    """Raise an error if a file is no timeline. A timeline is a CSV file with the column `kind`."""
    try:
        text = read_regular_file(path, MAX_MEMBER_BYTES).decode()
    except (OSError, ValueError) as e:
        raise make_error(f"{path} cannot be read as text: {e}") from e
    if "kind" not in text.partition("\n")[0].split(",") or "\0" in text:
        raise make_error(f"{path} is not a timeline: it has no column `kind`")
