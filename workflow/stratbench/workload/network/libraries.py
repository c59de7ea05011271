"""Defines the interface to libraries of models, such as transformers and timm.

Extensions implement this interface. They convert entries of `models` in config.yaml into calls. The Snakefile
imports this module, so that it imports no library, and no extension that no entry needs.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, ClassVar

from stratbench.cell.extensions import import_attribute, load_extensions
from stratbench.cell.text.words import format_wrong_value
from stratbench.workload.users_code import Unsuitable, get_top_level_module_name

#: Libraries of models. An entry of `models` names a model by the key of its library.
LIBRARIES = ("transformers", "timm")
#: The `call` of a model that the user's own program builds. The config has only the model's name.
NAME_ALONE = f"{__name__}:raise_unbuildable_model"
#: Reason why stratbench cannot build a model of which the config has only the name.
BUILT_BY_COMMAND = (
    "it has a name alone, so only a trainer of your own (strategy `command`) builds it; give it `call`, "
    "`transformers` or `timm` for other strategies"
)


class Library:
    """Interface to a Python package with models. The base class is for packages without an extension."""

    #: Module of the extension that builds the library's models, or None if only the package is needed.
    built_by: ClassVar[str | None] = None

    def make_builder_call_entry(
        self, model_entry: Mapping[str, Any], hash_cache: Path
    ) -> dict[str, Any]:
        """Return the call that builds the model of an entry of `models`, with its arguments.

        The result also has what the library declares on dividing the model.

        Args:
            model_entry: The entry of `models`, with defaults filled in.
            hash_cache: File that caches the hash of the files with the model's weights.

        Raises:
            ValueError: The entry is invalid, as `.key = value: reason`.
        """
        (key,) = model_entry.keys() & set(LIBRARIES)
        raise ValueError(
            f".{key} = {format_wrong_value(model_entry[key])}: needs the extension `libraries`, which this "
            "installation does not have; restore it, or build the model by a function of your own (`call`)"
        )

    def invalid_call_reason(self, model_entry: Mapping[str, Any]) -> str | None:
        """Return why a call cannot build a model, according to the package's files. None if it can."""
        return None

    def list_additional_packages_for_call(self, model_entry: Mapping[str, Any]) -> list[str]:
        """Return the packages that a call needs in addition to the package that it names."""
        return []

    def list_tasks_of_model_class(self, call: str) -> tuple[str, ...]:
        """Return the names of the tasks that the model class of a call is for."""
        return ()

    def get_entry_task(self, model_entry: Mapping[str, Any]) -> str | None:
        """Return the name of the task that an entry's model is for. None if unknown.

        Raises:
            ValueError: The entry is invalid, as `.key = value: reason`.
        """
        return None

    def get_entry_vocabulary_size(self, model_entry: Mapping[str, Any]) -> int | None:
        """Return the vocabulary size that an entry states, or None if the data determine it."""
        return None

    def find_builder(self, called_object: Callable[..., Any]) -> Callable[..., Any]:
        """Return the function that builds a model. It follows from the called class or function."""
        return called_object

    def collect_data_arguments(
        self, kwargs: Mapping[str, Any], data_values: Mapping[str, Any]
    ) -> dict[str, Any]:
        """Return arguments that follow from the data set, for a class or function with `**kwargs`.

        Args:
            kwargs: The configured arguments.
            data_values: Values that follow from the data set, by role, such as `channels`.
        """
        return {}


def find_library_of_call(call: str) -> Library:
    """Return the interface to the library that a call names. For other packages, this is the base class."""
    package = get_top_level_module_name(call)
    names = (e.libraries[package] for e in load_extensions().values() if package in e.libraries)
    return import_attribute(next(names, f"{__name__}:Library"))()


def find_library_of_entry(model_entry: Mapping[str, Any]) -> Library:
    """Return the interface to the library of an entry of `models`."""
    return find_library_of_call(
        next((key for key in LIBRARIES if key in model_entry), model_entry.get("call", ""))
    )


def convert_entry_to_call(model_entry: Mapping[str, Any], hash_cache: Path) -> dict[str, Any]:
    """Convert an entry of `models` into one with a `call` that builds the model.

    The content of a config file becomes an argument of the call, so that a cell depends on the content and
    not on the file's path.

    Args:
        model_entry: The entry, with defaults filled in.
        hash_cache: File that caches the hash of the files with the model's weights.

    Raises:
        ValueError: The entry is invalid, as `.key = value: reason`.
    """
    sources = [key for key in ("call", *LIBRARIES) if key in model_entry]
    if not sources and not any(model_entry.values()):
        return {**model_entry, "call": NAME_ALONE}
    if len(sources) != 1:
        raise ValueError(
            f": has {' and '.join(sources) or 'no source'}; give exactly one of call, "
            f"{' and '.join(LIBRARIES)}"
        )
    (kind,) = sources
    if kind == "call":
        for key in ("arguments", "weights", "lora"):
            if key in model_entry:
                raise ValueError(
                    f".{key}: is only for models of transformers or timm; with `call` write kwargs"
                )
        return dict(model_entry)
    if model_entry["kwargs"]:
        raise ValueError(f".kwargs: is only for models with `call`; with `{kind}` write arguments")
    declared = ("wrap_classes", "tensor_plan", "num_heads", "pipeline_modules")
    return {key: model_entry[key] for key in declared} | find_library_of_call(
        kind
    ).make_builder_call_entry(model_entry, hash_cache)


def raise_unbuildable_model() -> None:
    """Raise Unsuitable, because stratbench cannot build the model. The config has only the model's name."""
    raise Unsuitable(BUILT_BY_COMMAND)
