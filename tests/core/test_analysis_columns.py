"""The table of columns: each has a definition and a source that the record's schema knows."""

from __future__ import annotations

import copy
from pathlib import Path

import fixture_records as fixture
import pandas as pd
import pytest

from stratbench.analysis.figures.figure_list import PLOTS
from stratbench.analysis.figures.plots import CHARTS, OTHERS
from stratbench.analysis.records import columns, groups
from stratbench.analysis.records.findings import AUDIT_COLUMNS
from stratbench.analysis.records.measures import FACTORS, MEASURES
from stratbench.analysis.records.score import Score
from stratbench.cell.installation import PACKAGE
from stratbench.cell.record import RecordError


def test_every_column_has_a_definition_and_fields_are_those_of_the_schema():
    assert len(columns.BY_NAME) == len(columns.CELL_COLUMNS)
    for column in columns.CELL_COLUMNS:
        assert column.definition.strip(), column.name
        assert column.value_kind in ("text", "json", "number", "flag")
        if isinstance(column.source, str) and not column.source.startswith(
            ("timeline: ", "time.step_ms.", "time.breakdown_ms.")
        ):
            assert columns.find_field_description(column.source), column.name


def test_a_measure_shows_its_column_in_a_unit_that_there_is_a_factor_for():
    for measure in MEASURES.values():
        column = columns.BY_NAME[measure.column]
        assert column.value_kind == "number"
        assert (
            measure.unit == column.unit
            or measure.baseline
            or (column.unit, measure.unit) in FACTORS
        )
        assert measure.definition
        shown_as_it_is = not (measure.baseline or measure.is_per_worker)
        assert not shown_as_it_is or measure.definition == column.definition


def test_every_plot_has_a_title_a_column_and_somebody_who_draws_it():
    for plot in PLOTS.values():
        assert plot.format_title(Score())
        assert plot.required_column in columns.BY_NAME
        assert plot.is_per_worker_count or (plot.name in OTHERS) != (
            plot.name in MEASURES and plot.chart_kind in CHARTS
        )


def test_text_stays_text_whatever_it_holds(tmp_path):
    row = dict.fromkeys(columns.COLUMNS) | {"model": "1e3", "strategy": "007", "gpus": 2}
    pd.DataFrame([row]).to_csv(tmp_path / "cells.csv", index=False)
    (read,) = columns.read_cells(tmp_path / "cells.csv").to_dict("records")
    assert (read["model"], read["strategy"], read["gpus"]) == ("1e3", "007", 2)
    assert pd.isna(read["reason"])


@pytest.mark.parametrize("path", ["setup_s", "eval_s"])
def test_a_number_that_is_none_is_refused_with_its_column(path):
    record = copy.deepcopy(fixture.make_record(fixture.expand(("ddp",), ("vgg16",), (2,))[0]))
    record["time"][path] = float("inf")
    with pytest.raises(RecordError, match=f"{path} is 'inf'"):
        columns.build_row_from_record(record, Path("none"))


def test_groups_of_repeats_have_one_order_and_findings_name_all_of_it():
    defined = [p.name for p in PACKAGE.rglob("*.py") if "\nGROUP = " in p.read_text()]
    assert defined == ["groups.py"]
    assert list(groups.Group._fields) == groups.GROUP
    assert set(groups.GROUP) < set(AUDIT_COLUMNS)
    frame = pd.DataFrame([("e", "ddp", "m", 2)] * 2, columns=groups.GROUP)
    ((group, rows),) = groups.map_rows_by_group(frame).items()
    assert (group.experiment, group.strategy, group.model, group.gpus) == ("e", "ddp", "m", 2)
    assert len(rows) == 2
    assert group.copy_with_gpu_count(4).copy_with_strategy("fsdp") == ("e", "fsdp", "m", 4)
