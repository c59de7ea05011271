"""Reads files of an installed package without importing the package."""

from __future__ import annotations

import ast
from collections.abc import Iterable, Iterator
from difflib import get_close_matches
from functools import cache
from importlib import util
from pathlib import Path


@cache
def find_package_folder(package: str) -> Path | None:
    """Return the folder of an installed package, or None."""
    spec = util.find_spec(package)
    return Path(spec.origin).parent if spec is not None and spec.origin else None


def describe_missing_package(package: str) -> str:
    """Return the message that a package is not installed, with the command that installs it."""
    return f"the package {package} is not installed here; pip install {package}"


def format_name_suggestion(name: str, known_names: Iterable[str]) -> str:
    """Return "; did you mean 'NAME'?" for a wrong name. Return "" if no known name is similar.

    The suggestion is the shortest known name that contains all words of `name`, or else the most similar one.
    """
    words, ordered = (
        set(name.lower().split("_")),
        sorted(known_names, key=lambda key: (len(key), key)),
    )
    wider = [key for key in ordered if words <= set(key.lower().split("_"))]
    names = wider or get_close_matches(name, ordered, n=1, cutoff=0.5)
    return f"; did you mean {names[0]!r}?" if names else ""


def read_class_definitions(file: Path) -> dict[str, ast.ClassDef]:
    """Return the syntax trees of the classes that a Python file defines, by class name."""
    tree = ast.parse(file.read_text(encoding="utf-8"))
    return {node.name: node for node in tree.body if isinstance(node, ast.ClassDef)}


def iter_config_keys(config_class: ast.ClassDef) -> Iterator[str]:
    """Yield all keys that a config class of transformers accepts, including other names of keys."""
    for each in config_class.body:
        if isinstance(each, ast.AnnAssign) and isinstance(each.target, ast.Name):
            yield each.target.id
        elif isinstance(each, ast.FunctionDef) and each.name == "__init__":
            yield from (a.arg for a in (*each.args.args[1:], *each.args.kwonlyargs))
        elif (
            isinstance(each, ast.Assign)
            and isinstance(each.value, ast.Dict)
            and any(isinstance(t, ast.Name) and t.id == "attribute_map" for t in each.targets)
        ):
            yield from (str(k.value) for k in each.value.keys if isinstance(k, ast.Constant))
