"""Reads a result set: a bundle, a study's results folder, or a version of the paper's tables."""

from __future__ import annotations

import functools
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pandas as pd

from stratbench.analysis.records.collect import Expected, collect
from stratbench.analysis.records.columns import EPOCH_COLUMNS, read_cells, read_epochs
from stratbench.analysis.records.findings import AUDIT_COLUMNS
from stratbench.analysis.records.samples import Timeline
from stratbench.cell import record
from stratbench.cell.coordinates import CELL_PATTERN, Cell
from stratbench.cell.files import read_json, read_regular
from stratbench.cell.record import Record, RecordError
from stratbench.extensions.audit.audit import audit, read_records, read_timelines
from stratbench.extensions.audit.rule import Key
from stratbench.extensions.paper import published
from stratbench.extensions.sets.archive import MAX_MEMBER_BYTES, NAME, SetError, extract, shown_name
from stratbench.extensions.sets.keys import PAPER, VERSIONS


@dataclass(frozen=True, eq=False)
class ResultSet:
    """The records of one study from one site."""

    #: Its name among other sets.
    name: str
    #: The requested source: a path, or `paper:v1`.
    source: str
    study: str
    #: Like cells.csv: a row for each cell, including those without a record.
    cells: pd.DataFrame
    #: Like epochs.csv.
    epochs: pd.DataFrame
    #: None for the paper's tables.
    records: tuple[Record, ...] = ()
    #: By the audit's key of their cell.
    timelines: dict[Key, Timeline] = field(default_factory=dict)
    #: The resolved config, if it is known.
    config: dict[str, Any] | None = None
    #: plan.json, if there was a plan.
    plan: dict[str, Any] | None = None
    #: The manifest of a bundle.
    manifest: dict[str, Any] | None = None
    #: Accuracies that any working training reaches, by data set, for tables with too few fields.
    floors: dict[str, float] = field(default_factory=dict)

    @functools.cached_property
    def findings(self) -> pd.DataFrame:
        """The audit's findings, like audit.csv."""
        audited = audit(self.cells, self.records, self.floors, timelines=self.timelines)
        frame = pd.DataFrame(audited, columns=list(AUDIT_COLUMNS))
        return frame.astype({"gpus": "Int64", "repeat": "Int64"})

    @property
    def is_published(self) -> bool:
        """Whether this is a published table, without records."""
        return self.source.startswith(PAPER)

    @property
    def hosts_replaced(self) -> bool:
        """Whether its host names were replaced, so that they cannot be compared with another set's."""
        return bool(self.manifest) and self.manifest["hosts"] == "replaced"

    @property
    def provenance(self) -> dict[str, str]:
        """The origin of the set, in words."""
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


def read_set(text: str, name: str | None = None, expected: Expected | None = None) -> ResultSet:
    """Return a set: `paper:v1`, the path of a bundle, or a folder `results/<study>`.

    Args:
        text: Its source.
        name: Name of the set, or None for its own.
        expected: Expectations of the study's config, if available.

    Raises:
        SetError: If the source is none of these or cannot be read.
    """
    if text.startswith(PAPER):
        version = text.removeprefix(PAPER)
        if version not in VERSIONS:
            known = ", ".join(PAPER + v for v in VERSIONS)
            raise SetError(f"{shown_name(text)} is no version of the paper; known: {known}")
        cells = published.cells_of_version(version)
        epochs = pd.DataFrame(columns=list(EPOCH_COLUMNS))
        study = f"paper-{version}"
        return ResultSet(
            name or study, text, study, cells, epochs, floors=published.accuracy_floors()
        )
    path = Path(text).expanduser()
    if path.is_dir():
        return _read_folder(path, text, name, None, expected)
    if not path.exists():
        raise SetError(
            f"{text} is not there; a set is a bundle, a folder results/<study>, or {PAPER}{VERSIONS[0]}"
        )
    with tempfile.TemporaryDirectory(prefix="stratbench-set-") as folder:
        manifest = extract(path, Path(folder))
        return _read_folder(Path(folder), text, name, manifest, expected)


def _read_folder(
    folder: Path,
    source: str,
    name: str | None,
    manifest: dict[str, Any] | None,
    expected: Expected | None,
) -> ResultSet:
    """Return the set in a folder of results.

    In a bundle's folder every record must be valid.
    """

    def told(error: Exception | str) -> SetError:
        # Paths in the folder that a bundle was extracted to are shown as paths in the bundle.
        return SetError(
            f"{source}: {str(error).replace(f'{folder}/', '')}" if manifest else str(error)
        )

    cells = _cells_in(folder, manifest, told)
    if not cells:
        raise SetError(
            f"{source} holds no record and lists no cells; it is no folder results/<study>"
        )
    # Thousands of files, for the tables and for the audit.
    read = functools.cache(record.read_measured)
    with tempfile.TemporaryDirectory(prefix="stratbench-set-") as work:
        out, epochs_out = Path(work, "cells.csv"), Path(work, "epochs.csv")
        bad = [
            row
            for row in collect(cells, folder, out, epochs_out, expected, read)
            if row["status"] == "error"
        ]
        if manifest and bad:
            raise told(bad[0]["reason"])
        frame, epochs = read_cells(out), read_epochs(epochs_out)
    if not frame["record_path"].notna().any():
        raise SetError(f"{source} holds no record; train the study's cells first")
    try:
        records = tuple(read_records(frame, folder, read))
    except RecordError as e:
        raise told(e) from e
    if manifest:
        for path in folder.glob("cells/**/timeline.csv"):
            _check_timeline(path, told)
    study = cells[0].study
    if manifest and study != manifest["study"]:
        raise told(f"its records are of study {study}, and its manifest names {manifest['study']}")
    config, plan = (_object_in(folder / file, told) for file in ("config.json", "plan.json"))
    timelines = read_timelines(frame, folder)
    return ResultSet(
        name or study, source, study, frame, epochs, records, timelines, config, plan, manifest
    )


def _cells_in(folder: Path, manifest: dict[str, Any] | None, make_error: Any) -> list[Cell]:
    """Return the listed cells, followed by those with a record that are not listed."""
    listed = folder / "cells.json"
    has_list = listed.exists()
    cells = list(_listed_cells(listed, make_error)) if has_list else []
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
            continue  # of a matrix that the study no longer has
        try:
            content = read_json(path)
            cell = _cell_of(content["cell"])
        except (OSError, ValueError, KeyError, TypeError) as e:
            raise make_error(f"{path} is not a record: {e}") from e
        cells.append(cell)
        known.add(cell.path)
    return cells


def _listed_cells(path: Path, make_error: Any) -> Iterator[Cell]:
    try:
        listed = read_json(path)
        if not isinstance(listed, list):
            raise ValueError("it is no list")
        for coordinates in listed:
            yield _cell_of(coordinates)
    except (OSError, ValueError, TypeError) as e:
        raise make_error(f"{path} does not list cells: {e}") from e


def _cell_of(coordinates: Any) -> Cell:
    """Return a cell from untrusted coordinates.

    Raises:
        ValueError: If they are not a cell's.
    """
    if not isinstance(coordinates, dict) or coordinates.keys() != Cell.__dataclass_fields__.keys():
        raise ValueError("a cell has seven coordinates")
    cell = Cell(**coordinates)
    for part in (cell.study, cell.experiment, cell.strategy, cell.model, cell.dataset):
        if not isinstance(part, str) or not NAME.fullmatch(part):
            raise ValueError(f"{shown_name(part)} is no name of a part of a study")
    if (
        not all(type(n) is int and 0 <= n < 10**6 for n in (cell.gpus, cell.repeat))
        or not cell.gpus
    ):
        raise ValueError("gpus and repeat are whole numbers")
    return cell


def _object_in(path: Path, make_error: Any) -> dict[str, Any] | None:
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


def _check_timeline(path: Path, make_error: Any) -> None:
    """Refuse a timeline that is not a table of texts."""
    try:
        text = read_regular(path, MAX_MEMBER_BYTES).decode()
    except (OSError, ValueError) as e:
        raise make_error(f"{path} is no text: {e}") from e
    if "kind" not in text.partition("\n")[0].split(",") or "\0" in text:
        raise make_error(f"{path} is no timeline")
