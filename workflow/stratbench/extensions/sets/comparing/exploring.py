"""Writes an interactive page with the cells of several result sets."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import pandas as pd

from stratbench.analysis.records.reading import map_readings_by_extension
from stratbench.analysis.report.report import list_report_notices
from stratbench.cell.files import write_text_atomically
from stratbench.extensions.explore import explore
from stratbench.extensions.sets.keys import INDEX
from stratbench.extensions.sets.reading import ResultSet


def write_explore_page(sets: Sequence[ResultSet], path: Path) -> None:
    """Write an interactive page with all cells of some result sets."""
    cells = pd.concat([one.cells.assign(set=one.name) for one in sets], ignore_index=True)
    findings = [
        finding | {"set": one.name} for one in sets for finding in one.findings.to_dict("records")
    ]
    title = ", ".join(one.name for one in sets)
    notices = list_report_notices(
        cells, findings, map_readings_by_extension().values(), partial=False
    )
    data = explore.make_page_data(cells, findings)
    write_text_atomically(path, explore.render_explore_page(data, title, notices, INDEX))
