"""Code that a user brings: what is called, from which files, and whether these have changed.

The Snakefile imports this: neither torch nor a user's code is imported before it is called."""

from __future__ import annotations

import ast
import hashlib
import importlib
import os
import re
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from importlib import util
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING, Any, Protocol

if TYPE_CHECKING:
    pass

#: The environment variable with the folders of the user's code, as PATH has its own.
CODE_VARIABLE = "STRATBENCH_CODE"
#: How a call is written.
_CALL = re.compile(r"[^\W\d]\w*(\.[^\W\d]\w*)*[.:][^\W\d]\w*(\.[^\W\d]\w*)*", re.ASCII)


class ModelError(RuntimeError):
    """A user's model or task cannot be built, or cannot be trained: one sentence, with its name."""


class Refused(ModelError):
    """A strategy cannot train a network, though others may: a result of its cell, and no failure."""


class Called(Protocol):
    """What a user names by a call; as a text it is what errors call it."""

    @property
    def call(self) -> str: ...


def fault_of_call(call: str) -> str | None:
    """What is wrong with how a call is written, in words; nothing is imported."""
    if _CALL.fullmatch(call):
        return None
    return "is not a module and a name in it; write my_net.MyNet or my_net:MyNet"


def top_of(call: str) -> str:
    """The first part of a call: its module, or the package of it."""
    return re.split(r"[.:]", call, maxsplit=1)[0]


def code_folders() -> list[Path]:
    """The folders of the user's code, as the job's environment names them."""
    return [Path(p) for p in os.environ.get(CODE_VARIABLE, "").split(os.pathsep) if p]


def sources(call: str, folders: Iterable[Path]) -> dict[str, Path]:
    """The files of a call's module or package in `folders`, and of what they import from there.

    By their paths below the folder. Empty where the module is not in one of them.
    """
    folders, found, seen = list(folders), {}, set()
    waiting = [top_of(call)]
    while waiting:
        name = waiting.pop()
        if name in seen:
            continue
        seen.add(name)
        for folder in folders:
            if files := _files_of(folder, name, namespace=len(seen) == 1):
                found |= {path.relative_to(folder).as_posix(): path for path in files}
                waiting += [top for path in files for top in _imported(path)]
                break
    return dict(sorted(found.items()))


#: The largest file that counts as a part of a command: what is larger is data.
_LARGEST_BYTES = 1 << 20


def files_of_command(arguments: Iterable[str]) -> dict[str, Path]:
    """The user's files that a command names, and what its Python files import from beside them.

    By their names in the command, or below their folder. A module after `-m` is looked for here. Programs
    and other files that are no text, files above 1 MiB and installed packages do not count.
    """
    found: dict[str, Path] = {}
    before = ""
    for argument in arguments:
        path = Path(argument).expanduser()
        if before == "-m":
            found |= sources(argument, [Path.cwd()])
        elif path.is_file() and path.stat().st_size <= _LARGEST_BYTES and _is_text(path):
            beside = sources(path.stem, [path.parent]) if path.suffix == ".py" else {}
            found |= {name: p for name, p in beside.items() if p != path} | {argument: path}
        before = argument
    return dict(sorted(found.items()))


def _is_text(path: Path) -> bool:
    return b"\0" not in path.read_bytes()


def _files_of(folder: Path, name: str, namespace: bool) -> list[Path]:
    package, module = folder / name, folder / f"{name}.py"
    if (package / "__init__.py").is_file():
        return sorted(package.rglob("*.py"))
    if module.is_file():
        return [module]
    return sorted(package.rglob("*.py")) if namespace and package.is_dir() else []


def _imported(path: Path) -> list[str]:
    """The first parts of what a file imports; none where it cannot be read as Python."""
    try:
        tree = ast.parse(path.read_bytes())
    except (SyntaxError, ValueError):
        return []  # whoever imports it says so
    found = []
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            found += [alias.name.partition(".")[0] for alias in node.names]
        elif isinstance(node, ast.ImportFrom) and node.module and not node.level:
            found.append(node.module.partition(".")[0])
    return found


def fingerprint(call: str, folders: Iterable[Path]) -> dict[str, str | None]:
    """What a model's code is known by: `sha256` of its files in `folders`, else the package's `version`."""
    if files := sources(call, folders):
        return {"sha256": digest_of(files), "version": None}
    return {"sha256": None, "version": _version_of(top_of(call))}


def digest_of(files: Mapping[str, Path]) -> str:
    """SHA-256 of the names and contents of some files, in their order."""
    digest = hashlib.sha256()
    for name, path in files.items():
        content = path.read_bytes()
        digest.update(f"{name}\0{len(content)}\0".encode() + content)
    return digest.hexdigest()


def _version_of(package: str) -> str | None:
    from importlib import metadata  # takes as long as all other imports of this file

    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:  # one whose distribution has another name
        names = metadata.packages_distributions().get(package)
        return metadata.version(names[0]) if names else None


def check_unchanged(what: str, spec: Mapping[str, Any]) -> None:
    """ModelError where the files of `what` are no longer those that the cell was planned with."""
    now = fingerprint(spec["call"], code_folders())["sha256"]
    if spec["sha256"] != now:
        raise ModelError(
            f"{what} ({spec['call']}): its code has changed, or is not in the folders of `code` "
            "here, since the run was started; start it again"
        )


def callable_of(own: Called) -> Callable[..., Any]:
    """What the call names. ModelError, in one sentence, where it cannot be imported."""
    found = named(own, own.call)
    if not callable(found):
        raise ModelError(f"{own}: is a {type(found).__name__}, which cannot be called")
    return found


def named(own: Called, path: str) -> Any:
    """What `module:NAME` or `module.NAME` names in the user's code. ModelError where it is not there."""
    sys.dont_write_bytecode = True  # nothing is left in the user's folders
    for folder in reversed(code_folders()):
        if str(folder) not in sys.path:
            sys.path.insert(0, str(folder))
    module, colon, name = path.partition(":")
    known, names = (module, name.split(".")) if colon else (top_of(path), path.split(".")[1:])
    found: Any = _imported_module(own, known)
    for name in names:
        if not hasattr(found, name) and isinstance(found, ModuleType):
            inner = f"{found.__name__}.{name}"
            if hasattr(found, "__path__") and util.find_spec(inner) is not None:
                found = _imported_module(own, inner)
                continue
        if not hasattr(found, name):
            raise ModelError(f"{own}: {getattr(found, '__name__', known)} has no {name!r}")
        found = getattr(found, name)
    return found


def _imported_module(own: Called, name: str) -> ModuleType:
    try:
        return importlib.import_module(name)
    except (Exception, SystemExit) as e:
        missing = isinstance(e, ModuleNotFoundError) and e.name == name.partition(".")[0]
        remedy = "; name its folder in `code`, or install it" if missing else ""
        raise ModelError(f"{own}: importing {name} raised {error_text(e)}{remedy}") from e


def error_text(e: BaseException) -> str:
    """An exception in one line."""
    lines = str(e).strip().splitlines()
    return f"{type(e).__name__}: {lines[0]}" if lines else type(e).__name__


def listed(names: Sequence[str]) -> str:
    """Names in a sentence; of many the first four."""
    shown = ", ".join(names[:4])
    return shown if len(names) <= 4 else f"{shown} and {len(names) - 4} more"
