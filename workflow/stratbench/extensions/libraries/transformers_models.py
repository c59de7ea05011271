"""Checks models of transformers that config.yaml names, without importing transformers."""

from __future__ import annotations

import ast
import json
import re
from collections.abc import Callable, Mapping
from functools import cache, partial
from importlib import import_module
from pathlib import Path
from typing import Any, ClassVar

from stratbench.cell.text.words import format_wrong_value
from stratbench.extensions.libraries.package_files import (
    describe_missing_package,
    find_package_folder,
    format_name_suggestion,
    iter_config_keys,
    read_class_definitions,
)
from stratbench.workload.data.kinds import SampleFileKind
from stratbench.workload.data.own_files import hash_sample_files
from stratbench.workload.data.sources import DataError
from stratbench.workload.network.libraries import Library

#: Module that builds models of transformers, and declares how workers can divide them.
BUILDER = "stratbench.extensions.libraries.hugging_face"
#: Keys of a config.json that may hold the number of attention heads, in the order of precedence.
_HEADS = ("num_key_value_heads", "num_attention_heads", "n_head", "num_heads", "n_heads")
#: Tasks of a model class of transformers, by a part of the class name.
HEADS = {
    "ForCausalLM": ("next-token",),
    "LMHead": ("next-token",),
    "ForMaskedLM": ("masked-token",),
    "ForSequenceClassification": ("text-classification", "audio-classification"),
    "ForAudioClassification": ("audio-classification",),
    "ForImageClassification": ("classification",),
}
WEIGHTS = SampleFileKind("file of weights", (".safetensors",))
#: Pattern in a file of transformers whose models take waveforms or spectrograms.
_TAKES_SOUND = re.compile(r"main_input_name = .input_(values|features)")


class Transformers(Library):
    """The library transformers. An entry of `models` names a config.json, its folder, or a class."""

    built_by: ClassVar[str | None] = BUILDER

    def make_builder_call_entry(
        self, model_entry: Mapping[str, Any], hash_cache: Path
    ) -> dict[str, Any]:
        """Return the call that builds a model. It is a dict with the class, its config and its arguments."""
        named, arguments = model_entry["transformers"], dict(model_entry.get("arguments", {}))
        name, config = _find_class_name_and_config(named)
        kwargs: dict[str, Any] = {"config": config} if config else {}
        if arguments:
            kwargs["arguments"] = arguments
        if model_entry.get("weights"):
            kwargs |= _make_weights_arguments(named, hash_cache)
        if model_entry.get("lora"):
            kwargs["lora"] = model_entry["lora"]
        made: dict[str, Any] = {"call": f"transformers:{name}", "kwargs": kwargs}
        for key in ("tensor_plan", "pipeline_modules"):
            if model_entry[key] is None:
                made[key] = f"{BUILDER}:{key}"
        if model_entry["num_heads"] is None:
            values = config | arguments
            counts = (values[key] for key in _HEADS if type(values.get(key)) is int)
            made["num_heads"] = next((n for n in counts if n > 0), None)
        return made

    def invalid_call_reason(self, model_entry: Mapping[str, Any]) -> str | None:
        """Return why transformers cannot build the model with its config or adapters, or None."""
        name = _get_called_class_name(model_entry["call"])
        if name is None:
            return None
        folder = find_package_folder("transformers")
        if folder is None:
            return describe_missing_package("transformers")
        if name.startswith("Auto"):
            return None
        file = _find_class_file(folder, name)
        if file is None:
            known = _list_names_of_classes_with_heads(folder)
            return f"transformers has no {name!r}{format_name_suggestion(name, known)}"
        keys = _read_config_keys(folder, file, name)
        for key in model_entry["kwargs"].get("arguments", {}):
            if keys and key not in keys:
                return (
                    f"arguments.{key}: its config has no {key!r}{format_name_suggestion(key, keys)}"
                )
        return self._invalid_lora_reason(model_entry)

    def _invalid_lora_reason(self, model_entry: Mapping[str, Any]) -> str | None:
        for package in self.list_additional_packages_for_call(model_entry):
            folder = find_package_folder(package)
            if folder is None:
                return f"lora: {describe_missing_package(package)}"
            keys: set[str] = set()
            for name in ("config.py", "tuners/lora/config.py"):
                for class_name, definition in read_class_definitions(folder / name).items():
                    if class_name in ("PeftConfigMixin", "PeftConfig", "LoraConfig"):
                        keys |= set(iter_config_keys(definition))
            for key in model_entry["kwargs"]["lora"]:
                if keys and key not in keys:
                    return f"lora.{key}: peft's LoraConfig has no {key!r}{format_name_suggestion(key, keys)}"
        return None

    def list_additional_packages_for_call(self, model_entry: Mapping[str, Any]) -> list[str]:
        """Return ["peft"] if the model is trained with LoRA adapters, else an empty list."""
        return (
            ["peft"]
            if _get_called_class_name(model_entry["call"])
            and "lora" in model_entry.get("kwargs", {})
            else []
        )

    def list_tasks_of_model_class(self, call: str) -> tuple[str, ...]:
        """Return the tasks that a called model class is for, according to the class name."""
        name = _get_called_class_name(call) or ""
        return next((learns for part, learns in HEADS.items() if part in name), ())

    def get_entry_task(self, model_entry: Mapping[str, Any]) -> str | None:
        """Return the task that the model class of a `models` entry is for. None if unknown."""
        if "transformers" not in model_entry:
            return None
        name, _ = _find_class_name_and_config(model_entry["transformers"])
        learns = self.list_tasks_of_model_class(f"transformers:{name}")
        if len(learns) < 2:
            return next(iter(learns), None)
        folder = find_package_folder("transformers")
        file = folder and _find_class_file(folder, name)
        takes_sound = file is not None and _TAKES_SOUND.search(file.read_text(encoding="utf-8"))
        return "audio-classification" if takes_sound else "text-classification"

    def get_entry_vocabulary_size(self, model_entry: Mapping[str, Any]) -> int | None:
        """Return the vocabulary size in an entry's arguments or config. None if neither has it."""
        if "transformers" not in model_entry:
            return None
        _, config = _find_class_name_and_config(model_entry["transformers"])
        return (config | (model_entry.get("arguments") or {})).get("vocab_size")

    def find_builder(self, called_object: Callable[..., Any]) -> Callable[..., Any]:
        """Return a function that builds a model of the called class; other callables stay unchanged."""
        if not isinstance(called_object, type):
            return called_object
        return partial(import_module(BUILDER).build_network, called_object)


def _get_called_class_name(call: str) -> str | None:
    """Return the class name in a call such as `transformers:NAME`, or None for other packages."""
    package, _, name = call.partition(":")
    return name if package == "transformers" else None


def _find_class_name_and_config(class_or_path: str) -> tuple[str, dict[str, Any]]:
    """Return the name of a model class, and the config of the model.

    Args:
        class_or_path: Name of the class, whose config is then {}, or path of a config.json or of its folder.
    """
    path = Path(class_or_path).expanduser()
    if re.fullmatch(r"[A-Za-z]\w*", class_or_path, re.ASCII) and not path.exists():
        return class_or_path, {}
    config = _read_config_file(class_or_path, path)
    return _get_class_name_in_config(config), config


def _read_config_file(class_or_path: str, config_path: Path) -> dict[str, Any]:
    file = config_path / "config.json" if config_path.is_dir() else config_path
    where = f".transformers = {format_wrong_value(class_or_path)}"
    if not file.is_file():
        raise ValueError(
            f"{where}: there is no file {file}; name a config.json, a folder with one, or a class such as "
            "LlamaForCausalLM (nothing is downloaded)"
        )
    try:
        config = json.loads(file.read_text(encoding="utf-8"))
    except ValueError as e:
        raise ValueError(f"{where}: {file} is not JSON ({e}); correct the file") from e
    if not isinstance(config, dict) or not isinstance(config.get("model_type"), str):
        raise ValueError(
            f"{where}: {file} has no key model_type; name the config.json of a model of transformers"
        )
    return config


def _get_class_name_in_config(config: Mapping[str, Any]) -> str:
    """Return the name of the model class for a config.

    If the config names no class with a head, the result is AutoModelForCausalLM.
    """
    named = [*(config.get("architectures") or []), ""][0]
    return named if re.search(r"For[A-Z]|LMHead", named) else "AutoModelForCausalLM"


def _make_weights_arguments(weights_folder: str, hash_cache: Path) -> dict[str, Any]:
    """Return the arguments for a model's weights: their folder, and a hash of their files.

    Every start of a run needs the hash: files with the size and modification time in `hash_cache` are not
    read.
    """
    folder = Path(weights_folder).expanduser()
    files = sorted(folder.glob("*.safetensors")) if folder.is_dir() else []
    if not files:
        raise ValueError(
            f".weights = true: {weights_folder} is no folder with *.safetensors, and no other file of "
            "weights is read; convert them with transformers (save_pretrained), or remove `weights`"
        )
    try:
        sha256 = hash_sample_files([file.resolve() for file in files], WEIGHTS, hash_cache)
    except DataError as unreadable_file_error:
        raise ValueError(f".weights = true: {unreadable_file_error}") from unreadable_file_error
    return {"weights": str(folder.resolve()), "weights_sha256": sha256}


@cache
def _find_class_file(package_folder: Path, class_name: str) -> Path | None:
    """Return the file of transformers that defines a model class, or None.

    Files of model families with whose name the class name begins are read first.
    """

    def may_define_class(path: Path) -> bool:
        return class_name.lower().startswith(path.parent.name.replace("_", ""))

    files = sorted(
        package_folder.glob("models/*/modeling_*.py"), key=may_define_class, reverse=True
    )
    text = f"\nclass {class_name}("
    return next((f for f in files if text in f.read_text(encoding="utf-8")), None)


def _list_names_of_classes_with_heads(package_folder: Path) -> set[str]:
    auto = package_folder / "models" / "auto" / "modeling_auto.py"
    text = auto.read_text(encoding="utf-8") if auto.is_file() else ""
    return set(re.findall(r'"(\w+(?:For[A-Z]|LMHead)\w*)"', text))


@cache
def _read_config_keys(package_folder: Path, modeling_file: Path, class_name: str) -> frozenset[str]:
    """Return the keys that the config of a model class accepts.

    The set is empty if the files of transformers do not show these keys.
    """
    text = modeling_file.read_text(encoding="utf-8").partition(f"\nclass {class_name}(")[2]
    named = re.search(r"\bconfig: (\w+)", text.partition("\nclass ")[0])
    if named is None:
        return frozenset()
    configs = modeling_file.with_name(modeling_file.name.replace("modeling_", "configuration_"))
    classes: dict[str, ast.ClassDef] = {}
    for file in (package_folder / "configuration_utils.py", configs):
        if file.is_file():
            classes |= read_class_definitions(file)
    keys, left = {"attn_implementation", "experts_implementation", "num_labels"}, [named[1]]
    while left:
        definition = classes.get(left.pop())
        if definition is None:  # another file defines this config class
            return frozenset()
        keys |= set(iter_config_keys(definition))
        ours = [
            b.id for b in definition.bases if isinstance(b, ast.Name) and b.id.endswith("Config")
        ]
        left += ours if definition.name not in ("PreTrainedConfig", "PretrainedConfig") else []
    return frozenset(keys)
