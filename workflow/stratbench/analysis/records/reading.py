"""Interfaces for extensions' additions to decisions and the report."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from stratbench.analysis.records.columns import Row
from stratbench.cell.extensions import iter_imported_additions
from stratbench.cell.text import pages

if TYPE_CHECKING:
    import pandas as pd
    from markupsafe import Markup

    from stratbench.analysis.decision.constraints import Constraints
    from stratbench.analysis.decision.evidence import Evidence


@dataclass(frozen=True)
class ReportInput:
    """The input of a report: tables, and folders with further files."""

    #: The folder with the files of earlier stages: tables, figures and answers.
    folder: Path
    #: The folder results/STUDY, which contains the records.
    study_dir: Path
    cells: pd.DataFrame
    findings: pd.DataFrame
    #: The content of answers.json.
    answers_json: Mapping[str, Any]
    #: Path of each further file that the report shows, by the name of the extension that wrote it.
    evidence: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True)
class Section:
    """A section of the report as HTML, which an extension adds."""

    id: str
    html: Markup
    #: The section's title in the navigation; empty if it is not listed there.
    link_title: str = ""
    #: Whether the section is next to the answers, above the sections on experiments.
    is_beside_answers: bool = False


@dataclass(frozen=True)
class Reading:
    """The functions by which one extension adds to decisions and to the report.

    Attributes:
        list_notices: Returns sentences that precede all numbers, given the cells and the findings.
        list_sections: Returns the extension's sections of the report, none if the study has nothing to show.
        render_page: Returns a further page as HTML, given the input and the notices of the report.
        page_file_name: The page's file name.
        page_link_title: The page's title in the navigation.
        read_evidence: Returns evidence for decisions, from the path of the extension's file ("" without one)
            and the constraints.
    """

    list_notices: Callable[[pd.DataFrame, Sequence[Row]], Iterable[str]] | None = None
    list_sections: Callable[[ReportInput], Iterable[Section]] | None = None
    render_page: Callable[[ReportInput, Sequence[str]], str] | None = None
    page_file_name: str = ""
    page_link_title: str = ""
    read_evidence: Callable[[str, Constraints], Evidence] | None = None


def render_section(template: Path, **values: Any) -> Markup:
    """Return the HTML of a section. It is made from a template in the extension's folder and its values."""
    from markupsafe import Markup

    return Markup(pages.render_page(template.name, template.parent, values=values))


def map_readings_by_extension() -> dict[str, Reading]:
    """Return what each installed extension adds to decisions and the report, by extension."""
    return dict(iter_imported_additions("report_additions"))
