"""The code that a user brings, and its models: what is called, with which arguments, from which files.

The Snakefile imports this: neither torch nor a user's code is imported before a model is built.
"""

from __future__ import annotations

import ast
import hashlib
import importlib
import inspect
import os
import re
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from importlib import util
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING, Any, Protocol

if TYPE_CHECKING:
    from torch import nn

#: The environment variable with the folders of the user's code, as PATH has its own.
CODE_VARIABLE = "STRATBENCH_CODE"
#: How a call is written.
_CALL = re.compile(r"[^\W\d]\w*(\.[^\W\d]\w*)*[.:][^\W\d]\w*(\.[^\W\d]\w*)*", re.ASCII)
#: What follows from the data, and the arguments that it is given to by name.
ROLES = {
    "classes": ("num_classes", "classes", "n_classes"),
    "channels": ("in_channels", "in_chans", "channels"),
    "size": ("image_size", "img_size"),
    "vocabulary": ("vocab_size", "vocabulary"),
    "sequence": ("sequence", "block_size", "max_length", "seq_len"),
}
#: Of these, one that may mean something else, too: it is given only where there is no default.
_DOUBTFUL = "channels"


class ModelError(RuntimeError):
    """A user's model or task cannot be built, or cannot be trained: one sentence, with its name."""


class Refused(ModelError):
    """A strategy cannot train a network, though others may: a result of its cell, and no failure."""


class Called(Protocol):
    """What a user names by a call; as a text it is what errors call it."""

    @property
    def call(self) -> str: ...


@dataclass(frozen=True)
class OwnModel:
    """What a user says of a model; `shard` are class names, None where the rule by size is taken."""

    name: str
    call: str
    kwargs: dict[str, Any]
    shard: list[str] | None

    def __str__(self) -> str:
        return f"model {self.name!r} ({self.call})"

    @property
    def torchvision_name(self) -> str | None:
        """The name of the classification network of torchvision that it is; None for any other."""
        module, _, name = self.call.replace(":", ".").rpartition(".")
        return name if module == "torchvision.models" and name in torchvision_names() else None


@cache
def torchvision_names() -> frozenset[str]:
    """The names of torchvision's classification networks, read from its files without importing it."""
    found = util.find_spec("torchvision")
    if found is None or found.origin is None:
        return frozenset()
    texts = (p.read_text(encoding="utf-8") for p in Path(found.origin).parent.glob("models/*.py"))
    pattern = re.compile(r"^@register_model\(\)\n(?:@.*\n)*def (\w+)", re.M)
    return frozenset(name for text in texts for name in pattern.findall(text))


def fault_of_call(call: str) -> str | None:
    """What is wrong with how a call is written, in words; nothing is imported."""
    if _CALL.fullmatch(call):
        return None
    return "is not a module and a name in it; write my_net.MyNet or my_net:MyNet"


# --- the arguments -------------------------------------------------------------------------------


def facts_of_data(classes: int, shape: Sequence[int]) -> dict[str, Any]:
    """What follows from the data, by role. The shape is (channels, height, width) or (length,)."""
    if len(shape) == 1:
        return {"classes": classes, "vocabulary": classes, "sequence": shape[0]}
    channels, height, width = shape
    size = height if height == width else [height, width]
    return {"classes": classes, "channels": channels, "size": size}


def with_facts(value: Any, facts: Mapping[str, Any]) -> Any:
    """`value` with each `$role` in it replaced. ValueError for one that the data do not have."""
    if isinstance(value, dict):
        return {key: with_facts(inner, facts) for key, inner in value.items()}
    if isinstance(value, list):
        return [with_facts(inner, facts) for inner in value]
    if isinstance(value, str) and value.startswith("$"):
        if value[1:] not in facts:
            known = ", ".join(f"${role}" for role in facts)
            raise ValueError(f"{value!r} does not follow from these data; what does: {known}")
        return facts[value[1:]]
    return value


def arguments(own: OwnModel, classes: int, shape: Sequence[int]) -> dict[str, Any]:
    """The arguments of the call: those given, and what follows from the data where it is taken by name.

    A callable that only passes keywords on (torchvision's, timm's) is given `num_classes`; timm's
    `in_chans`, too.
    """
    function = named(own)
    facts = facts_of_data(classes, shape)
    given = with_facts(own.kwargs, facts)
    try:
        parameters = inspect.signature(function).parameters
    except (TypeError, ValueError):  # one written in C
        return given
    kinds = (inspect.Parameter.POSITIONAL_OR_KEYWORD, inspect.Parameter.KEYWORD_ONLY)
    takes = {
        key
        for key, p in parameters.items()
        if p.kind in kinds and (key != _DOUBTFUL or p.default is inspect.Parameter.empty)
    }
    filled = {
        key: facts[role]
        for role in facts
        for key in ROLES[role]
        if key in takes and key not in given
    }
    if any(p.kind is inspect.Parameter.VAR_KEYWORD for p in parameters.values()):
        top = top_of(own.call)
        if not takes.intersection(ROLES["classes"] + ROLES["vocabulary"]):
            filled.setdefault("num_classes", classes)
        if top == "timm" and "channels" in facts:
            filled.setdefault("in_chans", facts["channels"])
    return filled | _for_torchvision(own, shape) | given


def _for_torchvision(own: OwnModel, shape: Sequence[int]) -> dict[str, Any]:
    """What some of torchvision's networks need beside the classes: their size, one output only."""
    name = own.torchvision_name or ""
    if name.startswith("vit_"):
        return {"image_size": shape[1]}
    if name == "maxvit_t":
        return {"input_size": list(shape[1:])}
    if name in ("googlenet", "inception_v3"):
        return {"aux_logits": False, "init_weights": True}
    return {}


# --- the code ------------------------------------------------------------------------------------


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
        digest = hashlib.sha256()
        for name, path in files.items():
            content = path.read_bytes()
            digest.update(f"{name}\0{len(content)}\0".encode() + content)
        return {"sha256": digest.hexdigest(), "version": None}
    return {"sha256": None, "version": _version_of(top_of(call))}


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


def named(own: Called) -> Callable[..., Any]:
    """What the call names. ModelError, in one sentence, where it cannot be imported."""
    sys.dont_write_bytecode = True  # nothing is left in the user's folders
    for folder in reversed(code_folders()):
        if str(folder) not in sys.path:
            sys.path.insert(0, str(folder))
    module, colon, path = own.call.partition(":")
    known, names = (
        (module, path.split(".")) if colon else (top_of(own.call), own.call.split(".")[1:])
    )
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
    if not callable(found):
        raise ModelError(f"{own}: is a {type(found).__name__}, which cannot be called")
    return found


def _imported_module(own: Called, name: str) -> ModuleType:
    try:
        return importlib.import_module(name)
    except (Exception, SystemExit) as e:
        missing = isinstance(e, ModuleNotFoundError) and e.name == name.partition(".")[0]
        remedy = "; name its folder in `code`, or install it" if missing else ""
        raise ModelError(f"{own}: importing {name} raised {told(e)}{remedy}") from e


# --- the network ---------------------------------------------------------------------------------


def build(own: OwnModel, classes: int, shape: Sequence[int]) -> nn.Module:
    """The network. ModelError where the call fails or returns no network."""
    from torch import nn

    given: dict[str, Any] = {}
    try:
        given = arguments(own, classes, shape)
        made = named(own)(**given)
    except (MemoryError, ModelError):
        raise
    except Exception as e:
        _raise_out_of_memory(e)
        called = ", ".join(f"{key}={value!r}" for key, value in given.items())
        raise ModelError(
            f"{own}: called with ({called}), it raised {told(e)}{_not_of_data(own, shape, e)}"
        ) from e
    if not isinstance(made, nn.Module):
        raise ModelError(f"{own}: returned {_kind(made)}, which is no torch.nn.Module")
    for name, p in made.named_parameters():
        if nn.parameter.is_lazy(p):
            raise ModelError(f"{own}: {name} has no shape yet; use the layer that is not lazy")
    if not any(p.requires_grad for p in made.parameters()):
        raise ModelError(f"{own}: has no parameter to train")
    return made


def _not_of_data(own: OwnModel, shape: Sequence[int], e: Exception) -> str:
    """What an error about arguments of `own` wants, and data of this kind do not have; or nothing."""
    wanted = [
        key
        for role in ROLES.keys() - facts_of_data(0, shape).keys()
        for key in ROLES[role]
        if f"'{key}'" in str(e)
    ]
    if not isinstance(e, TypeError) or not wanted:
        return ""
    kind = "texts" if len(shape) == 1 else "images"
    return f"; the data are {kind}, which have no {' and no '.join(sorted(wanted))}"


def _raise_out_of_memory(e: Exception) -> None:
    """An error that is no fault of the model stays what it is."""
    import torch

    if isinstance(e, torch.OutOfMemoryError):
        raise e


def _kind(value: Any) -> str:
    return f"a {type(value).__name__}"


def told(e: BaseException) -> str:
    """An exception in one line."""
    lines = str(e).strip().splitlines()
    return f"{type(e).__name__}: {lines[0]}" if lines else type(e).__name__


def listed(names: Sequence[str]) -> str:
    """Names in a sentence; of many the first four."""
    shown = ", ".join(names[:4])
    return shown if len(names) <= 4 else f"{shown} and {len(names) - 4} more"
