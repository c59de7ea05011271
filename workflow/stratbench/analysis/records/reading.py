"""Extensions' additions to decisions and the report: evidence, notices, sections and pages."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from stratbench.analysis.records.columns import Row
from stratbench.cell.extensions import at
from stratbench.cell.text import pages

if TYPE_CHECKING:
    import pandas as pd
    from markupsafe import Markup

    from stratbench.analysis.decision.constraints import Constraints
    from stratbench.analysis.decision.evidence import Evidence


@dataclass(frozen=True)
class ReportInput:
    """Input of a report: tables, and folders of the other files."""

    #: Where the other stages' files are.
    folder: Path
    #: results/STUDY.
    study_dir: Path
    cells: pd.DataFrame
    findings: pd.DataFrame
    #: answers.json.
    decided: Mapping[str, Any]
    #: By extension, the path of a file that it shows and that does not lie in `folder`.
    evidence: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True)
class Section:
    """A section of the report, as HTML, and how the list of sections calls it."""

    id: str
    html: Markup
    #: Empty: the list does not name it.
    link: str = ""
    #: Whether it is above the experiments, next to the answers.
    answers: bool = False


@dataclass(frozen=True)
class Reading:
    """Additions of one extension to decisions and the report.

    Attributes:
        notices: cells and findings -> sentences that a reader must see before any number.
        sections: Returns none where the study has nothing of the kind.
        page: Returns a page next to the report as HTML; its second argument: the notices of the report.
        page_name: The page's file name.
        page_link: The page's title in the list of sections.
        evidence: The path of the extension's file ("" if there is none) and the constraints -> evidence on
            a decision's candidates.
    """

    notices: Callable[[pd.DataFrame, Sequence[Row]], Iterable[str]] | None = None
    sections: Callable[[ReportInput], Iterable[Section]] | None = None
    page: Callable[[ReportInput, Sequence[str]], str] | None = None
    page_name: str = ""
    page_link: str = ""
    evidence: Callable[[str, Constraints], Evidence] | None = None


def render_section(template: Path, **values: Any) -> Markup:
    """Fill in a section's template, a file in the folder of its extension."""
    from markupsafe import Markup

    return Markup(pages.render(template.name, template.parent, values=values))


def list_readings() -> dict[str, Reading]:
    """Return what each extension that is installed adds, in the order of the report's sections."""
    return dict(at("reading"))
