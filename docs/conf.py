"""Settings of the site, which Sphinx builds from these pages; `make docs` runs it, and needs no network."""

from __future__ import annotations

import os
import re
import sys
from pathlib import Path

from sphinx.ext.napoleon import Config, GoogleDocstring

ROOT = Path(__file__).parent.parent
sys.path.insert(0, str(ROOT / "workflow"))

from stratbench import __version__  # noqa: E402

project = "stratbench"
copyright = "the authors of stratbench"
version = release = __version__
extensions = ["myst_parser", "sphinx.ext.autodoc"]
source_suffix = {".md": "markdown"}
# The repository is the source, so that pages link to evidence and to files beside docs as they do on GitHub.
root_doc = "docs/index"
include_patterns = ["docs/**", "*.md", "benchmarks/**.md", "tests/software_gpu/README.md"]
exclude_patterns = ["docs/_build", "README.md", ".*", "results", "build", "workflow", "profiles"]
# Tools write the files of evidence, some of them as a table without a title.
suppress_warnings = ["myst.header", "toc.no_title"]
html_theme = "furo"
html_title = "stratbench"
html_show_sourcelink = False
templates_path = ["_templates"]
html_additional_pages = {"index": "to_first_page.html"}

# GitHub renders the same files, so that only these extensions of Markdown are in use.
myst_enable_extensions = ["colon_fence", "deflist"]
myst_heading_anchors = 4

# The extension API is read without PyTorch: the environment of the site stays small.
autodoc_mock_imports = ["torch", "torchvision", "numpy", "pandas", "scipy", "psutil"]
autodoc_member_order = "bysource"
autodoc_typehints = "signature"
autodoc_default_options = {"members": True, "show-inheritance": True}
# The pages' own links must hold. Types of other packages are links only where their inventories can be read.
nitpicky = True
nitpick_ignore_regex = [("py:.*", ".*")]

if os.environ.get("READTHEDOCS"):
    extensions.append("sphinx.ext.intersphinx")
    intersphinx_mapping = {
        "python": ("https://docs.python.org/3", None),
        "torch": ("https://docs.pytorch.org/docs/stable", None),
    }


def convert_docstring(app, what: str, name: str, obj, options, lines: list[str]) -> None:
    """Turn Google's sections and Markdown's code in a docstring into reStructuredText.

    Sphinx's own extension would take what stands before a colon in an attribute's text for its type.
    """
    if what not in ("attribute", "data", "property"):
        lines[:] = GoogleDocstring(lines, Config(), app, what, name, obj, options).lines()
    text = re.sub(r"(?<![`:])`([^`]+)`(?![`_])", r"``\1``", "\n".join(lines))
    lines[:] = text.split("\n")


def setup(app) -> None:
    """Register what this file adds to Sphinx."""
    app.connect("autodoc-process-docstring", convert_docstring)
