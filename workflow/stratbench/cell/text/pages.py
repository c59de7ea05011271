"""Fills in the templates of pages: in HTML every value is escaped, and a missing one is an error.

Characters that are not printable are never shown: a bundle's could reverse the neighbouring text.
"""

from __future__ import annotations

import base64
import hashlib
import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

from stratbench.cell.text.words import printable

if TYPE_CHECKING:
    from markupsafe import Markup

#: Common parts of all pages: their colours, their style and the sorting of tables.
SHARED = Path(__file__).parent / "templates"


def render(
    template: str,
    *folders: Path,
    values: dict[str, Any],
    filters: dict[str, Callable[..., Any]] | None = None,
) -> str:
    """Return a page: the template filled in with these values.

    Templates may include those of SHARED. A template `*.txt.j2` gives a text for a terminal, in which nothing
    is escaped.

    Args:
        template: File name of the template.
        folders: Folders to search it in.
        values: Values by name.
        filters: Filters of templates by name.
    """
    import jinja2  # not where workers train

    in_terminal = template.endswith(".txt.j2")
    shown = printable if in_terminal else unbroken
    environment = jinja2.Environment(
        loader=jinja2.FileSystemLoader([*folders, SHARED]),
        autoescape=not in_terminal,
        undefined=jinja2.StrictUndefined,
        finalize=lambda value: shown(value) if type(value) is str else value,  # not of Markup
        trim_blocks=True,
        lstrip_blocks=True,
    )
    environment.filters |= {"breakable": breakable} | (filters or {})
    return environment.get_template(template).render(values)


def unbroken(text: str) -> str:
    """Return a printable text without line breaks before `%` or in `ddp × 8`."""
    return re.sub(r"(?<=\d) (?=%)| (?=× \d)|(?<=×) (?=\d)", "\u00a0", printable(text))


def breakable(name: str) -> Markup:
    """Return a name that may be broken after `_`, `.` and `/`, as after a hyphen."""
    from markupsafe import Markup, escape

    return Markup(re.sub(r"([_./])", r"\1<wbr>", str(escape(printable(name)))))


def as_json(data: Any) -> str:
    """JSON that no HTML parser reads as markup, whatever texts it holds."""
    text = printable(json.dumps(data, ensure_ascii=False, allow_nan=False, separators=(",", ":")))
    return text.replace("<", "\\u003c").replace(">", "\\u003e").replace("&", "\\u0026")


def script_values(path: Path) -> dict[str, str]:
    """Return a page's one script, after what all such scripts share, and its hash for the page's policy."""
    script = "".join(p.read_text(encoding="utf-8") for p in (SHARED / "interactive.js", path))
    digest = base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()
    return {"script": script, "script_hash": f"sha256-{digest}"}
