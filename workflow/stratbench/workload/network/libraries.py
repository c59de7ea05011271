"""Defines the interface to model libraries; extensions turn a library's entries in config.yaml into calls.

Imported on every parse of the Snakefile: no library is imported, nor an extension that no entry needs.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, ClassVar

from stratbench.cell.extensions import import_attribute, load_extensions
from stratbench.cell.text.words import format_wrong_value
from stratbench.workload.users_code import Unsuitable, get_top_module

#: Keys of an entry that name a model in a library, each the name of the library's package.
LIBRARIES = ("transformers", "timm")
#: The `call` of a model that has only a name, because a user's program builds the model.
NAME_ALONE = f"{__name__}:raise_unbuildable_model"
#: Reason why stratbench cannot build a model that has only a name.
BUILT_BY_COMMAND = (
    "it has a name alone, so only a trainer of your own (strategy `command`) builds it; give it `call`, "
    "`transformers` or `timm` for other strategies"
)


class Library:
    """A Python package with models. The base class handles calls of packages without a library."""

    #: The module that builds the library's models, which takes long to import; None if it is the package
    #: alone.
    built_by: ClassVar[str | None] = None

    def make_call(self, spec: Mapping[str, Any], known: Path) -> dict[str, Any]:
        """Return the call, keyword arguments and declarations for an entry of `models` in the config.

        Args:
            spec: The entry of `models`, with defaults filled in.
            known: File that caches the hash of the model's weights.

        Raises:
            ValueError: The entry is invalid, as `.key = value: reason`.
        """
        (key,) = spec.keys() & set(LIBRARIES)
        raise ValueError(
            f".{key} = {format_wrong_value(spec[key])}: needs the extension `libraries`, which was deleted "
            "here; put it back, or give `call`"
        )

    def invalid_call_reason(self, spec: Mapping[str, Any]) -> str | None:
        """Return why a call cannot build a model, by the package's files. None if it can."""
        return None

    def list_further_packages(self, spec: Mapping[str, Any]) -> list[str]:
        """Return the packages that a call needs besides the package that it names."""
        return []

    def list_head_tasks(self, call: str) -> tuple[str, ...]:
        """Return the tasks for which the class that a call names has a head."""
        return ()

    def get_entry_task(self, spec: Mapping[str, Any]) -> str | None:
        """Return the task of an entry of `models`. None if only its code determines the task.

        Raises:
            ValueError: The entry is invalid, as `.key = value: reason`.
        """
        return None

    def get_entry_vocabulary(self, spec: Mapping[str, Any]) -> int | None:
        """Return the vocabulary size that an entry of `models` states. None if the data determine it."""
        return None

    def find_builder(self, named: Callable[..., Any]) -> Callable[..., Any]:
        """Return the function that builds a model from the object that a call names."""
        return named

    def list_data_arguments(
        self, kwargs: Mapping[str, Any], facts: Mapping[str, Any]
    ) -> dict[str, Any]:
        """Return arguments that follow from the data, for a callable with `**kwargs`.

        Args:
            kwargs: The configured arguments.
            facts: Values that follow from the data, by role.
        """
        return {}


def find_library_of_call(call: str) -> Library:
    """Return the library of a call, by the package that the call names."""
    package = get_top_module(call)
    names = (e.libraries[package] for e in load_extensions().values() if package in e.libraries)
    return import_attribute(next(names, f"{__name__}:Library"))()


def find_library_of_entry(spec: Mapping[str, Any]) -> Library:
    """Return the library of an entry of `models`."""
    return find_library_of_call(
        next((key for key in LIBRARIES if key in spec), spec.get("call", ""))
    )


def convert_entry_to_call(spec: Mapping[str, Any], known: Path) -> dict[str, Any]:
    """Return an entry of `models` as an entry with a `call`, which builds the model.

    ValueError for an invalid one, as `.key = value: why`. The content of a config file becomes an argument,
    so that cells depend on it and not on its path. `known`: the file that caches the hash of its weights.
    """
    sources = [key for key in ("call", *LIBRARIES) if key in spec]
    if not sources and not any(spec.values()):
        return {**spec, "call": NAME_ALONE}
    if len(sources) != 1:
        raise ValueError(
            f": give one of call, {' and '.join(LIBRARIES)}; given: {', '.join(sources) or 'none'}"
        )
    (kind,) = sources
    if kind == "call":
        for key in ("arguments", "weights", "lora"):
            if key in spec:
                raise ValueError(
                    f".{key}: belongs to a model of transformers or timm; with `call` write kwargs"
                )
        return dict(spec)
    if spec["kwargs"]:
        raise ValueError(f".kwargs: belongs to `call`; with `{kind}` write arguments")
    declared = ("wrap_classes", "tensor_plan", "num_heads", "pipeline_modules")
    return {key: spec[key] for key in declared} | find_library_of_call(kind).make_call(spec, known)


def raise_unbuildable_model() -> None:
    """Raise Unsuitable when a model is built that the config declares by name only."""
    raise Unsuitable(BUILT_BY_COMMAND)
