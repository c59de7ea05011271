"""Parquet: cells and epochs as typed tables, with units and definitions in their schemas."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pandas as pd
import pyarrow as pa
import pyarrow.parquet as pq

from stratbench import __version__
from stratbench.analysis.records.columns import BY_NAME, EPOCH_BY_NAME, Column
from stratbench.extensions.sets.reading import ResultSet

#: Whether this format can hold only cells with a record.
OF_RECORDS = False


def type_of(column: Column) -> pa.DataType:
    """Return the Arrow type of a column; a column of JSON holds it as text."""
    if column.kind == "number":
        return pa.int64() if column.is_whole else pa.float64()
    return pa.bool_() if column.kind == "flag" else pa.string()


def table_of(frame: pd.DataFrame, columns: Mapping[str, Column], about: dict[str, str]) -> pa.Table:
    """Return a typed table from a frame like cells.csv or epochs.csv.

    Args:
        frame: The frame.
        columns: Columns by name.
        about: Metadata of the table.
    """
    fields, arrays = [], []
    for name, column in columns.items():
        meaning = {"unit": column.unit, "definition": column.definition, "kind": column.kind}
        fields.append(pa.field(name, type_of(column), metadata=meaning))
        arrays.append(pa.array(_values(frame[name], column), type=type_of(column)))
    return pa.table(arrays, schema=pa.schema(fields, metadata=about))


def _values(series: pd.Series, column: Column) -> list[Any]:
    present = series.astype(object).where(series.notna(), None)
    if column.kind == "flag":
        return [None if value is None else str(value) == "True" for value in present]
    return [float(v) if v is not None and column.kind == "number" else v for v in present]


def write(result_set: ResultSet, folder: Path) -> None:
    """Write cells.parquet and epochs.parquet."""
    about = {f"stratbench.{key}": value for key, value in result_set.provenance.items()}
    about |= {"stratbench.version": __version__}
    for name, frame, columns in (
        ("cells", result_set.cells, BY_NAME),
        ("epochs", result_set.epochs, EPOCH_BY_NAME),
    ):
        pq.write_table(table_of(frame, columns, about), folder / f"{name}.parquet")
