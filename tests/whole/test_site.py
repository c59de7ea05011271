"""The site: every page is in a table of contents, and every link to a file leads to one.

`make site` builds it, and checks anchors as well.
"""

from __future__ import annotations

import re
from importlib import import_module
from pathlib import Path

import pytest
import yaml

ROOT = Path(__file__).parents[2]
DOCS = ROOT / "docs"
PAGES = sorted(page for page in DOCS.rglob("*.md") if "_build" not in page.parts)
AT_THE_TOP = [ROOT / name for name in ("README.md", "CONTRIBUTING.md", "ARCHITECTURE.md")]
#: The first page, and one that is a list of modules.
WITHOUT_PURPOSE = ("index.md", "modules.md")
CODE = re.compile(r"^(`{3,}).*?^\1$|`[^`\n]+`", re.MULTILINE | re.DOTALL)


def listed_pages() -> set[Path]:
    """Return the pages that a table of contents names."""
    listed = {DOCS / "index.md"}
    for page in PAGES:
        text = page.read_text(encoding="utf-8")
        for table in re.findall(r"^```\{toctree\}\n(.*?)^```$", text, re.MULTILINE | re.DOTALL):
            entries = (line for line in table.splitlines() if line and not line.startswith(":"))
            for entry in entries:
                listed |= {found.resolve() for found in page.parent.glob(f"{entry}.md")}
    return listed


def missing_targets(page: Path) -> list[str]:
    """Return the links of a page that lead to no file."""
    text = CODE.sub("", page.read_text(encoding="utf-8"))
    targets = re.findall(r"\]\(([^)\s]+)\)", text)
    files = (t.partition("#")[0] for t in targets if not re.match(r"[a-z]+:", t))
    return [file for file in files if file and not (page.parent / file).exists()]


def test_every_page_is_in_a_table_of_contents():
    assert set(PAGES) - listed_pages() == set()


@pytest.mark.parametrize(
    "page", [*PAGES, *AT_THE_TOP], ids=lambda page: page.relative_to(ROOT).as_posix()
)
def test_links_of_a_page_lead_to_files(page):
    assert missing_targets(page) == []


@pytest.mark.parametrize(
    "page",
    [page for page in PAGES if page.relative_to(DOCS).as_posix() not in WITHOUT_PURPOSE],
    ids=lambda page: page.relative_to(ROOT).as_posix(),
)
def test_the_first_sentence_of_a_page_names_its_kind(page):
    title, _, rest = page.read_text(encoding="utf-8").partition("\n\n")
    assert title.startswith("# ")
    assert re.match(r"This (tutorial|how-to|explanation|reference|page) ", rest)


def test_a_link_that_leads_nowhere_is_found(tmp_path):
    page = tmp_path / "page.md"
    page.write_text("[a](gone.md#x), [b](page.md), `[c](no.md)`, [d](https://x.org), [e](#here)")
    assert missing_targets(page) == ["gone.md"]


def test_what_the_pages_describe_from_code_is_there():
    named = re.compile(r"^\.\. auto(?:class|function):: ([\w.]+)\.(\w+)$", re.MULTILINE)
    for page in PAGES:
        for module, name in named.findall(page.read_text(encoding="utf-8")):
            assert hasattr(import_module(module), name), f"{page.name}: {module}.{name}"


def test_every_build_of_the_site_fails_on_a_warning():
    """What publishes the site builds it as `make site` does."""
    read_the_docs = yaml.safe_load((ROOT / ".readthedocs.yaml").read_text(encoding="utf-8"))
    [command] = read_the_docs["build"]["jobs"]["build"]["html"]
    for line in (command, (ROOT / "Makefile").read_text(encoding="utf-8")):
        assert re.search(r"-m sphinx .*--fail-on-warning --keep-going -c docs .*\. ", line)


def test_workflows_call_targets_of_the_makefile():
    targets = re.findall(
        r"^([a-z-]+):", (ROOT / "Makefile").read_text(encoding="utf-8"), re.MULTILINE
    )
    commands = [
        step["run"]
        for path in (ROOT / ".github/workflows").glob("*.yml")
        for job in yaml.safe_load(path.read_text(encoding="utf-8"))["jobs"].values()
        for step in job["steps"]
        if "run" in step
    ]
    assert {"make test", "make lint", "make site"} <= set(commands)
    assert {command.removeprefix("make ") for command in commands} <= set(targets)
