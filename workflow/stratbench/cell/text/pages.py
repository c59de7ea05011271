"""Fills in the templates of pages; in HTML every value is escaped, and a missing value is an error.

Characters that are not printable are replaced, because a character in a bundle could reverse the text after
it.
"""

from __future__ import annotations

import base64
import hashlib
import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

from stratbench.cell.text.words import replace_control_characters

if TYPE_CHECKING:
    from markupsafe import Markup

#: The folder with the common parts of all pages: colours, style and the sorting of tables.
SHARED = Path(__file__).parent / "templates"


def render_page(
    template: str,
    *folders: Path,
    values: dict[str, Any],
    filters: dict[str, Callable[..., Any]] | None = None,
) -> str:
    """Return a page as text, by filling values into a template.

    Templates may include templates of SHARED. A template `*.txt.j2` gives a text for a terminal, without
    escapes.

    Args:
        template: File name of the template.
        folders: Folders that may contain the template.
        values: Values by name.
        filters: Further filters by name.
    """
    import jinja2  # imported here, because machines that only train may lack this package

    in_terminal = template.endswith(".txt.j2")
    shown = replace_control_characters if in_terminal else insert_no_break_spaces
    # Values of type Markup, a subclass of str, are HTML already.
    environment = jinja2.Environment(
        loader=jinja2.FileSystemLoader([*folders, SHARED]),
        autoescape=not in_terminal,
        undefined=jinja2.StrictUndefined,
        finalize=lambda value: shown(value) if type(value) is str else value,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    environment.filters |= {"breakable": allow_line_breaks} | (filters or {})
    return environment.get_template(template).render(values)


def insert_no_break_spaces(text: str) -> str:
    """Return a printable text with no-break spaces before `%` and in `ddp × 8`."""
    return re.sub(
        r"(?<=\d) (?=%)| (?=× \d)|(?<=×) (?=\d)", "\u00a0", replace_control_characters(text)
    )


def allow_line_breaks(name: str) -> Markup:
    """Return a name in which a line may break after `_`, `.` and `/`."""
    from markupsafe import Markup, escape

    return Markup(re.sub(r"([_./])", r"\1<wbr>", str(escape(replace_control_characters(name)))))


def format_html_safe_json(data: Any) -> str:
    """Return data as JSON that contains no characters of HTML markup."""
    text = replace_control_characters(
        json.dumps(data, ensure_ascii=False, allow_nan=False, separators=(",", ":"))
    )
    return text.replace("<", "\\u003c").replace(">", "\\u003e").replace("&", "\\u0026")


def read_page_script(path: Path) -> dict[str, str]:
    """Return a page's complete script, and its hash for the content security policy."""
    script = "".join(p.read_text(encoding="utf-8") for p in (SHARED / "interactive.js", path))
    digest = base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()
    return {"script": script, "script_hash": f"sha256-{digest}"}
