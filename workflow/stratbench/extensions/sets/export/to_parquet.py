"""Writes cells and epochs as typed Parquet tables, with units and definitions in their schemas."""

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

#: Whether only sets with records can be exported in this format.
NEEDS_RECORDS = False


def get_arrow_type(column: Column) -> pa.DataType:
    """Return the Arrow type of a column of cells.csv or epochs.csv. JSON has the type of texts."""
    if column.value_kind == "number":
        return pa.int64() if column.has_integer_values else pa.float64()
    return pa.bool_() if column.value_kind == "flag" else pa.string()


def make_arrow_table(
    frame: pd.DataFrame, columns: Mapping[str, Column], metadata: dict[str, str]
) -> pa.Table:
    """Return a typed table with the rows of cells.csv or epochs.csv.

    Args:
        frame: The rows.
        columns: Definition of each column, by its name.
        metadata: Metadata of the table.
    """
    fields, arrays = [], []
    for name, column in columns.items():
        meaning = {"unit": column.unit, "definition": column.definition, "kind": column.value_kind}
        fields.append(pa.field(name, get_arrow_type(column), metadata=meaning))
        arrays.append(
            pa.array(_convert_to_arrow_values(frame[name], column), type=get_arrow_type(column))
        )
    return pa.table(arrays, schema=pa.schema(fields, metadata=metadata))


def _convert_to_arrow_values(series: pd.Series, column: Column) -> list[Any]:
    present = series.astype(object).where(series.notna(), None)
    if column.value_kind == "flag":
        return [None if value is None else str(value) == "True" for value in present]
    return [float(v) if v is not None and column.value_kind == "number" else v for v in present]


def write_export(result_set: ResultSet, folder: Path) -> None:
    """Write cells.parquet and epochs.parquet to a folder."""
    about = {f"stratbench.{key}": value for key, value in result_set.provenance.items()}
    about |= {"stratbench.version": __version__}
    for name, frame, columns in (
        ("cells", result_set.cells, BY_NAME),
        ("epochs", result_set.epochs, EPOCH_BY_NAME),
    ):
        pq.write_table(make_arrow_table(frame, columns, about), folder / f"{name}.parquet")
