"""The core imports no extension, but for a list of known imports that may only shrink."""

from __future__ import annotations

import sys
from graphlib import TopologicalSorter
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
sys.path.insert(0, str(ROOT / "docs"))

import architecture  # noqa: E402
import extensions  # noqa: E402
from extensions import MODULES, RULES  # noqa: E402
from stratbench.cell.extensions import installed  # noqa: E402

#: The number of known imports when the list was made. Lower it with the list; never raise it.
MAX_KNOWN = 70


def all_imports() -> dict[str, set[str]]:
    """Modules and rules files, each with the modules that it imports or starts."""
    imports = {name: set(targets) for name, targets in architecture.graph().items()}
    for path in architecture.rules():
        names = architecture.modules_named_by(path)
        imports[path.name] = imports.get(path.name, set()) | names
    return imports


def test_no_import_forbids_deleting_an_extension_but_the_known_ones():
    forbidden, known = extensions.find_forbidden(all_imports()), extensions.read_known()
    new = sorted(set(forbidden) - set(known))
    assert not new, f"new imports of extensions; let the extension register itself instead: {new}"
    gone = sorted(set(known) - set(forbidden))
    assert not gone, f"no longer there; delete these lines of {extensions.KNOWN_PATH.name}: {gone}"


def test_the_list_of_known_imports_only_shrinks():
    known = extensions.read_known()
    assert known == sorted(set(known))
    assert len(known) <= MAX_KNOWN


def test_extensions_need_each_other_in_no_circle():
    order = TopologicalSorter({name: e.needs for name, e in installed().items()}).static_order()
    assert set(order) == installed().keys() == MODULES.keys()


@pytest.mark.parametrize("name", MODULES)
def test_an_extension_names_modules_and_rules_that_exist(name):
    known = architecture.modules()
    rules = {path.name for path in architecture.rules()}
    assert set(MODULES[name]) <= known.keys()
    assert set(RULES.get(name, ())) <= rules


@pytest.mark.parametrize(
    ("importer", "imported", "is_forbidden"),
    [
        ("train.loop", "train.restarts.keeping", True),
        ("strategies", "strategies.deepspeed", True),
        ("train.smk", "plan.device_rates", True),
        ("plan.check", "plan.projection.study", True),
        ("plan.projection.study", "plan.check", False),
        ("analysis.race.noise", "statistics.moderated", False),
        ("train.loop", "train.job", False),
        ("plan.smk", "plan", False),
    ],
)
def test_imports_are_judged_by_who_may_be_deleted(importer, imported, is_forbidden):
    found = extensions.find_forbidden({importer: {imported}})
    assert found == ([f"{importer} -> {imported}"] if is_forbidden else [])
