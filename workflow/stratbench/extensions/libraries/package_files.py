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


def missing_package_reason(package: str) -> str:
    """Return the message on a package that is not installed."""
    return f"the package {package} is not installed here; pip install {package}"


def suggest_name(name: str, known: Iterable[str]) -> str:
    """Return a question such as "; did you mean 'NAME'?", or an empty text.

    The suggested name is the shortest that contains all words, or else the closest one.
    """
    words, ordered = set(name.lower().split("_")), sorted(known, key=lambda key: (len(key), key))
    wider = [key for key in ordered if words <= set(key.lower().split("_"))]
    names = wider or get_close_matches(name, ordered, n=1, cutoff=0.5)
    return f"; did you mean {names[0]!r}?" if names else ""


def read_classes(file: Path) -> dict[str, ast.ClassDef]:
    """Return the classes of a file, by name."""
    tree = ast.parse(file.read_text(encoding="utf-8"))
    return {node.name: node for node in tree.body if isinstance(node, ast.ClassDef)}


def iter_config_keys(node: ast.ClassDef) -> Iterator[str]:
    """Yield all keys that a transformers config class accepts, including aliases."""
    for each in node.body:
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
