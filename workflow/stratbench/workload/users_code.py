"""Imports users' code, hashes its files, and detects whether they have changed.

The Snakefile imports this module: neither torch nor a user's code is imported before the code is called.
"""

from __future__ import annotations

import ast
import hashlib
import importlib
import os
import re
import sys
import sysconfig
from collections.abc import Callable, Iterable, Mapping
from functools import cache
from importlib import util
from importlib.machinery import PathFinder
from pathlib import Path
from traceback import extract_tb
from types import ModuleType
from typing import Any, Protocol

from stratbench.cell.installation import PACKAGE
from stratbench.cell.text.words import format_names

#: Environment variable with the folders of the user's code, separated as in PATH.
CODE_VARIABLE = "STRATBENCH_CODE"
#: Packages whose versions are not part of the code's identity, since each record has them anyway.
RECORDED = frozenset({"torch", "torchvision", "numpy", "stratbench"})
#: Names of folders with installed packages.
_PACKAGES = {"site-packages", "dist-packages"}
#: Pattern of a user's class or function in config.yaml (a call): `module.name` or `module:name`.
_CALL = re.compile(r"[^\W\d]\w*(\.[^\W\d]\w*)*[.:][^\W\d]\w*(\.[^\W\d]\w*)*", re.ASCII)


#: What calls of a user's code may raise: a script ends by `sys.exit`.
ERRORS = (Exception, SystemExit)


class ModelError(RuntimeError):
    """A user's model or task cannot be built or trained; the message names the model or task."""


class Refused(ModelError):
    """A strategy cannot train a model. This is a result of the cell and not a failure."""


class Unsuitable(ValueError):
    """A model of a library cannot be built for a data set; the message has the reason."""


class UserCallable(Protocol):
    """A user's class or function that a config names, such as a model. `str` of it is for messages."""

    @property
    def call(self) -> str:
        """Text that names the class or function in the config, such as `my_net:MyNet`."""


def invalid_call_reason(call: str) -> str | None:
    """Return why the text of a call, such as `module:name`, is invalid. None if it is valid."""
    if _CALL.fullmatch(call):
        return None
    return "is not a module and a name within it; write my_net.MyNet or my_net:MyNet"


def get_top_level_module_name(call: str) -> str:
    """Return the top-level module or package in a call. For `my_net:MyNet`, it is `my_net`."""
    return re.split(r"[.:]", call, maxsplit=1)[0]


def list_code_folders() -> list[Path]:
    """Return the folders of the user's code, which an environment variable names."""
    return [Path(p) for p in os.environ.get(CODE_VARIABLE, "").split(os.pathsep) if p]


def find_source_files(call: str, code_folders: Iterable[Path]) -> dict[str, Path]:
    """Return the files of a called module or package. Files that these import are included.

    Only files in the user's folders count.

    Args:
        call: The call.
        code_folders: Folders of the user's code.

    Returns:
        The files by their paths relative to the folder; none if no folder has the module.
    """
    code_folders, by_path, seen = list(code_folders), {}, set()
    waiting = [get_top_level_module_name(call)]
    while waiting:
        name = waiting.pop()
        if name in seen:
            continue
        seen.add(name)
        for folder in code_folders:
            if files := _list_module_files(folder, name, accepts_namespace_package=len(seen) == 1):
                by_path |= {path.relative_to(folder).as_posix(): path for path in files}
                waiting += [top for path in files for top in _list_imported_module_names(path)]
                break
    return dict(sorted(by_path.items()))


def _list_module_files(
    folder: Path, module_name: str, accepts_namespace_package: bool
) -> list[Path]:
    package, module = folder / module_name, folder / f"{module_name}.py"
    if (package / "__init__.py").is_file():
        return sorted(package.rglob("*.py"))
    if module.is_file():
        return [module]
    return sorted(package.rglob("*.py")) if accepts_namespace_package and package.is_dir() else []


def _list_imported_module_names(path: Path) -> list[str]:
    """Return the top-level modules that a Python file imports. The list is empty if its syntax is invalid."""
    try:
        tree = ast.parse(path.read_bytes())
    except (SyntaxError, ValueError):
        return []  # a syntax error is reported when the file is imported
    modules = []
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            modules += [alias.name.partition(".")[0] for alias in node.names]
        elif isinstance(node, ast.ImportFrom) and node.module and not node.level:
            modules.append(node.module.partition(".")[0])
    return modules


def compute_code_fingerprint(
    call: str, code_folders: Iterable[Path], packages: Iterable[str] = ()
) -> dict[str, str | None]:
    """Return the `sha256` and the `version` that identify the code of a call.

    `sha256` is the hash of the user's files.

    The version is that of the called package, or of all packages that the files import, such as `peft 0.21.2,
    transformers 5.24.0`.

    Args:
        call: The call.
        code_folders: Folders of the user's code.
        packages: Further packages that the call uses.
    """
    if files := find_source_files(call, code_folders):
        own = {Path(name).parts[0].removesuffix(".py") for name in files}
        imported = {name for path in files.values() for name in _list_imported_module_names(path)}
        others = sorted(imported - own - RECORDED - sys.stdlib_module_names)
        versions = {name: _find_package_version(name) for name in others}
        text = ", ".join(f"{name} {version}" for name, version in versions.items() if version)
        return {"sha256": hash_named_files(files), "version": text or None}
    version, beside = (
        _find_package_version(get_top_level_module_name(call)),
        [f"{p} {_find_package_version(p)}" for p in packages],
    )
    return {"sha256": None, "version": ", ".join([str(version), *beside]) if beside else version}


def hash_named_files(files: Mapping[str, Path]) -> str:
    """Return the SHA-256 of the names and contents of files, in the given order."""
    digest = hashlib.sha256()
    for name, path in files.items():
        content = path.read_bytes()
        digest.update(f"{name}\0{len(content)}\0".encode() + content)
    return digest.hexdigest()


def unimportable_code_reason(call: str, code_folders: Iterable[Path]) -> str | None:
    """Return why a call cannot be imported, according to its files alone. None if it can.

    A package with several files is only located.

    Args:
        call: The call.
        code_folders: Folders of the user's code.
    """
    top = get_top_level_module_name(call)
    # Python also searches the working directory.
    code_folders = [*code_folders, Path.cwd()]
    file = next((f for f in (folder / f"{top}.py" for folder in code_folders) if f.is_file()), None)
    if fault := shadowed_module_reason(call, code_folders):
        return fault
    if file is None or any((folder / top / "__init__.py").is_file() for folder in code_folders):
        if find_source_files(call, code_folders) or util.find_spec(top) is not None:
            return None
        return (
            f"there is no {top}.py and no package {top}; name its folder in `code`, or install it"
        )
    try:
        tree = ast.parse(file.read_bytes())
    except SyntaxError as e:
        return f"{file.name}, line {e.lineno}: {e.msg}"
    except ValueError as e:
        return f"{file.name}: {e}"
    name = re.split(r"[.:]", call)[1]
    if _list_names_defined_in_module(tree) & {name, "*", "__getattr__", "globals"}:
        return None
    defined = [n.name for n in tree.body if isinstance(n, ast.ClassDef | ast.FunctionDef)]
    return (
        f"{file.name} has no {name!r}; it has {format_names(defined) or 'no class and no function'}"
    )


def shadowed_module_reason(call: str, code_folders: Iterable[Path]) -> str | None:
    """Return a message if a file of the user's code hides an installed module. Both have the same name.

    The result is None if no file does so.
    """
    for name in dict.fromkeys(
        path.partition("/")[0] for path in find_source_files(call, code_folders)
    ):
        if _is_installed_module(name.removesuffix(".py")):
            return f"{name} hides the installed module of the same name; rename it"
    return None


def _is_installed_module(name: str) -> bool:
    """Return whether Python or an installed package provides a module of the given name."""
    if name in sys.stdlib_module_names:
        return True
    places = {sysconfig.get_path(kind) for kind in ("purelib", "platlib")}
    spec = PathFinder.find_spec(name, [*places])
    return spec is not None and spec.origin is not None


def _list_names_defined_in_module(module_tree: ast.Module) -> set[str]:
    """Return all names that a file defines, imports or uses. A star import adds `*`."""
    names = set()
    for node in ast.walk(module_tree):
        if isinstance(node, ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
            names.add(node.name)
        elif isinstance(node, ast.alias):
            names.add(node.asname or node.name.partition(".")[0])
        elif isinstance(node, ast.Name):
            names.add(node.id)
    return names


@cache
def _find_package_version(package_name: str) -> str | None:
    # This import is here because it takes as long as all other imports of the module.
    from importlib import metadata

    try:
        return metadata.version(package_name)
    except metadata.PackageNotFoundError:  # the package may be installed under another name
        names = metadata.packages_distributions().get(package_name)
        return metadata.version(names[0]) if names else None


def check_user_code_unchanged(label: str, spec: Mapping[str, Any]) -> None:
    """Raise ModelError if a user's code has changed since the run was started.

    This compares the hash of its files.

    Args:
        label: Name of the model or task in messages.
        spec: Specification with the call and the hash of its files.
    """
    now = compute_code_fingerprint(spec["call"], list_code_folders())["sha256"]
    if spec["sha256"] != now:
        raise ModelError(
            f"{label} ({spec['call']}): its code has changed since the run was started, or is not in the "
            "folders of `code` on this machine; start the run again"
        )


def import_user_callable(user_callable: UserCallable) -> Callable[..., Any]:
    """Return the class or function that a call names. Raise ModelError if the import fails."""
    target = import_user_object(user_callable, user_callable.call)
    if not callable(target):
        raise ModelError(
            f"{user_callable}: is a {type(target).__name__}, which cannot be called; name a class or function"
        )
    return target


def import_user_object(user_callable: UserCallable, object_path: str) -> Any:
    """Import an object of the user's code, given as `module:NAME` or `module.NAME`, and return it.

    Raises:
        ModelError: If it cannot be imported.
    """
    # Python must not write files (`__pycache__`) to the user's folders.
    sys.dont_write_bytecode = True
    for folder in reversed(list_code_folders()):
        if str(folder) not in sys.path:
            sys.path.insert(0, str(folder))
    module, colon, name = object_path.partition(":")
    known, names = (
        (module, name.split("."))
        if colon
        else (get_top_level_module_name(object_path), object_path.split(".")[1:])
    )
    target: Any = _import_user_module(user_callable, known)
    for name in names:
        if not hasattr(target, name) and isinstance(target, ModuleType):
            inner = f"{target.__name__}.{name}"
            if hasattr(target, "__path__") and util.find_spec(inner) is not None:
                target = _import_user_module(user_callable, inner)
                continue
        if not hasattr(target, name):
            raise ModelError(
                f"{user_callable}: {getattr(target, '__name__', known)} has no {name!r}; correct the name"
            )
        target = getattr(target, name)
    return target


def _import_user_module(user_callable: UserCallable, module_name: str) -> ModuleType:
    try:
        return importlib.import_module(module_name)
    except ERRORS as e:
        missing = isinstance(e, ModuleNotFoundError) and e.name == module_name.partition(".")[0]
        remedy = "; name its folder in `code`, or install it" if missing else ""
        raise ModelError(
            f"{user_callable}: importing {module_name} raised {format_user_error(e)}{remedy}"
        ) from e


def describe_different_group_calls(model: str, strategy: str, step_name: str) -> str:
    """Return the message that workers called different shard groups of a model in one step.

    Args:
        model: Name of the model.
        strategy: Name of the strategy.
        step_name: The step, such as `step 7`, or `the evaluation`.
    """
    return (
        f"model {model!r}: {strategy} cannot train it: in {step_name} the workers called different "
        "shard groups, or in another order, so that they gathered and summed unrelated tensors; call all "
        "groups in each forward, and choose with torch.where or a factor of 0 or 1"
    )


def format_user_error(e: BaseException) -> str:
    """Return an exception as one line of text. It names the file and line of the user's code."""
    lines = str(e).strip().splitlines()
    text = f"{type(e).__name__}: {lines[0]}" if lines else type(e).__name__
    return text + _format_user_code_place(e)


def _format_user_code_place(e: BaseException) -> str:
    """Return text with the file and line of the user's code that raised an exception.

    If no line of the user's code is in the traceback, it is a line of an installed package other than
    PyTorch.
    """
    own, packages = "", ""
    for frame in extract_tb(e.__traceback__):
        path, place = Path(frame.filename), f" ({Path(frame.filename).name}, line {frame.lineno})"
        if path.is_relative_to(PACKAGE) or path.name.startswith("<") or "torch" in path.parts:
            continue
        if _PACKAGES & set(path.parts):
            packages = place
        elif not path.is_relative_to(sysconfig.get_path("stdlib")):
            own = place
    return own or packages
