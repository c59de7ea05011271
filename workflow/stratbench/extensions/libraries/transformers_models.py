"""Checks models of transformers in config.yaml by reading the package's files, without importing it."""

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
    find_package_folder,
    iter_config_keys,
    missing_package_reason,
    read_classes,
    suggest_name,
)
from stratbench.workload.data.kinds import Samples
from stratbench.workload.data.own_files import hash_files
from stratbench.workload.data.sources import DataError
from stratbench.workload.network.libraries import Library

#: Module that builds a network of transformers, and says how it can be divided.
BUILDER = "stratbench.extensions.libraries.hugging_face"
#: Keys of a config, transformers' names and older ones, that say how many heads keys and values have.
_HEADS = ("num_key_value_heads", "num_attention_heads", "n_head", "num_heads", "n_heads")
#: A part of the names of transformers' classes with a head, and the tasks that it is for.
HEADS = {
    "ForCausalLM": ("next-token",),
    "LMHead": ("next-token",),
    "ForMaskedLM": ("masked-token",),
    "ForSequenceClassification": ("text-classification", "audio-classification"),
    "ForAudioClassification": ("audio-classification",),
    "ForImageClassification": ("classification",),
}
WEIGHTS = Samples("file of weights", (".safetensors",))
#: How a file of transformers says that its models take waveforms or what is made of these.
_TAKES_SOUND = re.compile(r"main_input_name = .input_(values|features)")


class Transformers(Library):
    """Library transformers: an entry in `models` names a config.json, its folder, or a class."""

    built_by: ClassVar[str | None] = BUILDER

    def make_call(self, spec: Mapping[str, Any], known: Path) -> dict[str, Any]:
        """Return the call that builds a model, as a dict with class, config and arguments."""
        named, arguments = spec["transformers"], dict(spec.get("arguments", {}))
        name, config = _resolve_class_and_config(named)
        kwargs: dict[str, Any] = {"config": config} if config else {}
        if arguments:
            kwargs["arguments"] = arguments
        if spec.get("weights"):
            kwargs |= _describe_weights(named, known)
        if spec.get("lora"):
            kwargs["lora"] = spec["lora"]
        made: dict[str, Any] = {"call": f"transformers:{name}", "kwargs": kwargs}
        for key in ("tensor_plan", "pipeline_modules"):
            if spec[key] is None:
                made[key] = f"{BUILDER}:{key}"
        if spec["num_heads"] is None:
            values = config | arguments
            counts = (values[key] for key in _HEADS if type(values.get(key)) is int)
            made["num_heads"] = next((n for n in counts if n > 0), None)
        return made

    def invalid_call_reason(self, spec: Mapping[str, Any]) -> str | None:
        """Return why transformers cannot build the model with its config or adapters, or None."""
        name = _find_class_of_call(spec["call"])
        if name is None:
            return None
        folder = find_package_folder("transformers")
        if folder is None:
            return missing_package_reason("transformers")
        if name.startswith("Auto"):
            return None
        file = _find_file_of_class(folder, name)
        if file is None:
            known = _list_classes_with_heads(folder)
            return f"transformers has no {name!r}{suggest_name(name, known)}"
        keys = _read_config_keys(folder, file, name)
        for key in spec["kwargs"].get("arguments", {}):
            if keys and key not in keys:
                return f"arguments.{key}: its config has no {key!r}{suggest_name(key, keys)}"
        return self._find_lora_fault(spec)

    def _find_lora_fault(self, spec: Mapping[str, Any]) -> str | None:
        for package in self.list_further_packages(spec):
            folder = find_package_folder(package)
            if folder is None:
                return f"lora: {missing_package_reason(package)}"
            keys: set[str] = set()
            for name in ("config.py", "tuners/lora/config.py"):
                for class_name, definition in read_classes(folder / name).items():
                    if class_name in ("PeftConfigMixin", "PeftConfig", "LoraConfig"):
                        keys |= set(iter_config_keys(definition))
            for key in spec["kwargs"]["lora"]:
                if keys and key not in keys:
                    return f"lora.{key}: peft's LoraConfig has no {key!r}{suggest_name(key, keys)}"
        return None

    def list_further_packages(self, spec: Mapping[str, Any]) -> list[str]:
        """Return ["peft"] if the model is trained with LoRA adapters, else an empty list."""
        return (
            ["peft"]
            if _find_class_of_call(spec["call"]) and "lora" in spec.get("kwargs", {})
            else []
        )

    def list_head_tasks(self, call: str) -> tuple[str, ...]:
        """Return the tasks that a model's head supports, by a part of its class name."""
        name = _find_class_of_call(call) or ""
        return next((learns for part, learns in HEADS.items() if part in name), ())

    def get_entry_task(self, spec: Mapping[str, Any]) -> str | None:
        """Return the task for which a transformers entry's model class has a head, or None."""
        if "transformers" not in spec:
            return None
        name, _ = _resolve_class_and_config(spec["transformers"])
        learns = self.list_head_tasks(f"transformers:{name}")
        if len(learns) < 2:
            return next(iter(learns), None)
        folder = find_package_folder("transformers")
        file = folder and _find_file_of_class(folder, name)
        takes_sound = file is not None and _TAKES_SOUND.search(file.read_text(encoding="utf-8"))
        return "audio-classification" if takes_sound else "text-classification"

    def get_entry_vocabulary(self, spec: Mapping[str, Any]) -> int | None:
        """Return the vocabulary size by an entry's arguments or config, or None if unknown."""
        if "transformers" not in spec:
            return None
        _, config = _resolve_class_and_config(spec["transformers"])
        return (config | (spec.get("arguments") or {})).get("vocab_size")

    def find_builder(self, named: Callable[..., Any]) -> Callable[..., Any]:
        """Return a function that builds a class from its config. Other callables are returned unchanged."""
        if not isinstance(named, type):
            return named
        return partial(import_module(BUILDER).network, named)


def _find_class_of_call(call: str) -> str | None:
    """Return the name of the transformers class that `call` names, or None for other packages."""
    package, _, name = call.partition(":")
    return name if package == "transformers" else None


def _resolve_class_and_config(named: str) -> tuple[str, dict[str, Any]]:
    """Return the name of a model's class, and its config ({} for a class name)."""
    path = Path(named).expanduser()
    if re.fullmatch(r"[A-Za-z]\w*", named, re.ASCII) and not path.exists():
        return named, {}
    config = _read_config(named, path)
    return _find_class_of_config(config), config


def _read_config(named: str, path: Path) -> dict[str, Any]:
    file = path / "config.json" if path.is_dir() else path
    where = f".transformers = {format_wrong_value(named)}"
    if not file.is_file():
        raise ValueError(
            f"{where}: there is no file {file}; name a config.json, a folder with one, or a class such as "
            "LlamaForCausalLM (nothing is downloaded)"
        )
    try:
        config = json.loads(file.read_text(encoding="utf-8"))
    except ValueError as e:
        raise ValueError(f"{where}: {file} is no JSON: {e}") from e
    if not isinstance(config, dict) or not isinstance(config.get("model_type"), str):
        raise ValueError(f"{where}: {file} has no model_type; name the config.json of a model")
    return config


def _find_class_of_config(config: Mapping[str, Any]) -> str:
    """Return the model class that a config names, if the class has a head.

    Otherwise the result is AutoModelForCausalLM.
    """
    named = [*(config.get("architectures") or []), ""][0]
    return named if re.search(r"For[A-Z]|LMHead", named) else "AutoModelForCausalLM"


def _describe_weights(named: str, known: Path) -> dict[str, Any]:
    """Return the folder of a model's weights, and a hash that distinguishes cells.

    Every start of a run needs the hash: files with the size and modification time in `known` are not read.
    """
    folder = Path(named).expanduser()
    files = sorted(folder.glob("*.safetensors")) if folder.is_dir() else []
    if not files:
        raise ValueError(
            f".weights = true: {named} is no folder with *.safetensors, and no other file of weights is "
            "read; convert them with transformers (save_pretrained), or remove `weights`"
        )
    try:
        sha256 = hash_files([file.resolve() for file in files], WEIGHTS, known)
    except DataError as e:
        raise ValueError(f".weights = true: {e}") from e
    return {"weights": str(folder.resolve()), "weights_sha256": sha256}


@cache
def _find_file_of_class(folder: Path, name: str) -> Path | None:
    """The file of transformers that defines a class.

    First those of families whose names begin its own.
    """

    def is_likely(path: Path) -> bool:
        return name.lower().startswith(path.parent.name.replace("_", ""))

    files = sorted(folder.glob("models/*/modeling_*.py"), key=is_likely, reverse=True)
    text = f"\nclass {name}("
    return next((f for f in files if text in f.read_text(encoding="utf-8")), None)


def _list_classes_with_heads(folder: Path) -> set[str]:
    auto = folder / "models" / "auto" / "modeling_auto.py"
    text = auto.read_text(encoding="utf-8") if auto.is_file() else ""
    return set(re.findall(r'"(\w+(?:For[A-Z]|LMHead)\w*)"', text))


@cache
def _read_config_keys(folder: Path, modeling: Path, name: str) -> frozenset[str]:
    """Return the keys that the config of a model's class takes.

    Empty where its files do not show them.
    """
    text = modeling.read_text(encoding="utf-8").partition(f"\nclass {name}(")[2]
    named = re.search(r"\bconfig: (\w+)", text.partition("\nclass ")[0])
    if named is None:
        return frozenset()
    configs = modeling.with_name(modeling.name.replace("modeling_", "configuration_"))
    classes: dict[str, ast.ClassDef] = {}
    for file in (folder / "configuration_utils.py", configs):
        if file.is_file():
            classes |= read_classes(file)
    keys, left = {"attn_implementation", "experts_implementation", "num_labels"}, [named[1]]
    while left:
        definition = classes.get(left.pop())
        # The class is not defined in the files of transformers that were read.
        if definition is None:
            return frozenset()
        keys |= set(iter_config_keys(definition))
        ours = [
            b.id for b in definition.bases if isinstance(b, ast.Name) and b.id.endswith("Config")
        ]
        left += ours if definition.name not in ("PreTrainedConfig", "PretrainedConfig") else []
    return frozenset(keys)
