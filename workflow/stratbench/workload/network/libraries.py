"""Models that config.yaml names in transformers or timm: their entries become calls.

Imported on every parse of the Snakefile: the libraries' files are read, and neither is imported.
"""

from __future__ import annotations

import ast
import json
import re
from collections.abc import Iterable, Iterator, Mapping
from difflib import get_close_matches
from functools import cache
from importlib import util
from pathlib import Path
from typing import Any

from stratbench.cell.text.words import repr_of
from stratbench.workload.data.own_files import WEIGHTS, content_sha256
from stratbench.workload.data.sources import DataError
from stratbench.workload.users_code import Unsuitable

#: Keys that name a model in a library, each the name of its package.
LIBRARIES = ("transformers", "timm")
#: What builds a network of transformers, and says how it can be divided.
HERE = "stratbench.workload.network.hugging_face"
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
#: How a file of transformers says that its models take waveforms or what is made of these.
_TAKES_SOUND = re.compile(r"main_input_name = .input_(values|features)")
#: The call of a model that has a name alone: a trainer of the user's builds it.
NAME_ALONE = f"{__name__}:name_alone"
#: Why nothing here can build it.
BUILT_BY_COMMAND = (
    "it has a name alone, so only a trainer of your own (strategy `command`) builds it; give it `call`, "
    "`transformers` or `timm` for other strategies"
)


def as_call(spec: Mapping[str, Any], known: Path) -> dict[str, Any]:
    """Return the entry of `models` as one with a call.

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
    call = {
        key: spec[key] for key in ("wrap_classes", "tensor_plan", "num_heads", "pipeline_modules")
    }
    return call | (_of_transformers(spec, known) if kind == "transformers" else _of_timm(spec))


def name_alone() -> None:
    """Raise Unsuitable, in place of the call of a model with a name alone."""
    raise Unsuitable(BUILT_BY_COMMAND)


def _of_timm(spec: Mapping[str, Any]) -> dict[str, Any]:
    for key in ("weights", "lora"):
        if key in spec:
            raise ValueError(f".{key}: belongs to a model of transformers; remove it")
    kwargs = {"model_name": spec["timm"], **spec.get("arguments", {})}
    return {"call": "timm:create_model", "kwargs": kwargs}


def _of_transformers(spec: Mapping[str, Any], known: Path) -> dict[str, Any]:
    named, arguments = spec["transformers"], dict(spec.get("arguments", {}))
    path = Path(named).expanduser()
    name, config = _class_and_config(named, path)
    kwargs: dict[str, Any] = {"config": config} if config else {}
    if arguments:
        kwargs["arguments"] = arguments
    if spec.get("weights"):
        kwargs |= _weights_of(named, path, known)
    if spec.get("lora"):
        kwargs["lora"] = spec["lora"]
    made: dict[str, Any] = {"call": f"transformers:{name}", "kwargs": kwargs}
    for key in ("tensor_plan", "pipeline_modules"):
        if spec[key] is None:
            made[key] = f"{HERE}:{key}"
    if spec["num_heads"] is None:
        values = config | arguments
        counts = (values[key] for key in _HEADS if type(values.get(key)) is int)
        made["num_heads"] = next((n for n in counts if n > 0), None)
    return made


def task_of_entry(spec: Mapping[str, Any]) -> str | None:
    """Return the task that the model of an entry of `models` is for.

    Return None if its code alone knows.

    Raises:
        ValueError: The entry names a file that is no config, as `.key = value: why`.
    """
    if "timm" in spec:
        return "classification"
    if "transformers" not in spec:
        return None
    named = spec["transformers"]
    name, _ = _class_and_config(named, Path(named).expanduser())
    learns = tasks_of_head(f"transformers:{name}")
    if len(learns) < 2:
        return next(iter(learns), None)
    folder = _folder_of("transformers")
    file = folder and _file_of_class(folder, name)
    takes_sound = file is not None and _TAKES_SOUND.search(file.read_text(encoding="utf-8"))
    return "audio-classification" if takes_sound else "text-classification"


def tasks_of_head(call: str) -> tuple[str, ...]:
    """Return the tasks that a class of transformers has a head for.

    None of another call.
    """
    package, _, name = call.partition(":")
    if package != "transformers":
        return ()
    return next((learns for part, learns in HEADS.items() if part in name), ())


def stated_vocabulary(spec: Mapping[str, Any]) -> int | None:
    """Return the vocabulary of an entry of `models`.

    Return None if it follows from the data.
    """
    if "transformers" not in spec:
        return None
    named = spec["transformers"]
    _, config = _class_and_config(named, Path(named).expanduser())
    return (config | (spec.get("arguments") or {})).get("vocab_size")


def _class_and_config(named: str, path: Path) -> tuple[str, dict[str, Any]]:
    """Return the class of transformers that a name or config means, and the config's content."""
    if re.fullmatch(r"[A-Za-z]\w*", named, re.ASCII) and not path.exists():
        return named, {}
    config = _read_config(named, path)
    return _class_of(config), config


def _read_config(named: str, path: Path) -> dict[str, Any]:
    file = path / "config.json" if path.is_dir() else path
    where = f".transformers = {repr_of(named)}"
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


def _class_of(config: Mapping[str, Any]) -> str:
    """The class that a config names, if it has a head.

    Else the one that transformers takes for a text.
    """
    named = [*(config.get("architectures") or []), ""][0]
    return named if re.search(r"For[A-Z]|LMHead", named) else "AutoModelForCausalLM"


def _weights_of(named: str, folder: Path, known: Path) -> dict[str, Any]:
    """Return the folder of weights, and a hash of them, which distinguishes cells.

    Every start of a run needs it: files with the size and modification time in `known` are not read.
    """
    files = sorted(folder.glob("*.safetensors")) if folder.is_dir() else []
    if not files:
        raise ValueError(
            f".weights = true: {named} is no folder with *.safetensors, and no other file of weights is "
            "read; convert them with transformers (save_pretrained), or remove `weights`"
        )
    try:
        sha256 = content_sha256([file.resolve() for file in files], WEIGHTS, known)
    except DataError as e:
        raise ValueError(f".weights = true: {e}") from e
    return {"weights": str(folder.resolve()), "weights_sha256": sha256}


# --- what the files of an installed library say ----------------------------------------------------


def fault_of_library(spec: Mapping[str, Any]) -> str | None:
    """Return why a library's model cannot be built, by its files.

    Return None if it can.
    """
    package, _, name = spec["call"].partition(":")
    if package not in LIBRARIES:
        return None
    folder = _folder_of(package)
    if folder is None:
        return f"the package {package} is not installed here; pip install {package}"
    if package == "timm":
        return _fault_of_timm(folder, spec["kwargs"].get("model_name"))
    if name.startswith("Auto"):
        return None
    file = _file_of_class(folder, name)
    if file is None:
        known = _classes_with_heads(folder)
        return f"transformers has no {name!r}{_closest(name, known)}"
    keys = _keys_of_config(folder, file, name)
    for key in spec["kwargs"].get("arguments", {}):
        if keys and key not in keys:
            return f"arguments.{key}: its config has no {key!r}{_closest(key, keys)}"
    return _fault_of_lora(spec)


def _fault_of_timm(folder: Path, name: Any) -> str | None:
    if not isinstance(name, str):
        return None
    known = _names_of_timm(folder)
    network = name.partition(".")[0]  # what follows names weights
    if not known or network in known or ":" in name:
        return None
    return f"timm has no {network!r}{_closest(network, known)}"


@cache
def _names_of_timm(folder: Path) -> frozenset[str]:
    texts = (p.read_text(encoding="utf-8") for p in folder.glob("models/*.py"))
    pattern = re.compile(r"^@register_model\n(?:@.*\n)*def (\w+)", re.M)
    return frozenset(name for text in texts for name in pattern.findall(text))


def packages_beside(spec: Mapping[str, Any]) -> list[str]:
    """Return the packages that a call of a library needs besides its own."""
    is_adapted = spec["call"].startswith("transformers:") and "lora" in spec.get("kwargs", {})
    return ["peft"] if is_adapted else []


def _fault_of_lora(spec: Mapping[str, Any]) -> str | None:
    for package in packages_beside(spec):
        folder = _folder_of(package)
        if folder is None:
            return f"lora: the package {package} is not installed here; pip install {package}"
        keys: set[str] = set()
        for name in ("config.py", "tuners/lora/config.py"):
            tree = ast.parse((folder / name).read_text(encoding="utf-8"))
            named = ("PeftConfigMixin", "PeftConfig", "LoraConfig")
            classes = (n for n in tree.body if isinstance(n, ast.ClassDef) and n.name in named)
            keys |= {key for each in classes for key in _keys_of_class(each)}
        for key in spec["kwargs"]["lora"]:
            if keys and key not in keys:
                return f"lora.{key}: peft's LoraConfig has no {key!r}{_closest(key, keys)}"
    return None


def _closest(name: str, known: Iterable[str]) -> str:
    """Return the closest of some names as a question: first the shortest that has all words."""
    words, ordered = set(name.lower().split("_")), sorted(known, key=lambda key: (len(key), key))
    wider = [key for key in ordered if words <= set(key.lower().split("_"))]
    names = wider or get_close_matches(name, ordered, n=1, cutoff=0.5)
    return f"; did you mean {names[0]!r}?" if names else ""


@cache
def _folder_of(package: str) -> Path | None:
    spec = util.find_spec(package)
    return Path(spec.origin).parent if spec is not None and spec.origin else None


@cache
def _file_of_class(folder: Path, name: str) -> Path | None:
    """The file of transformers that defines a class.

    First those of families whose names begin its own.
    """

    def is_likely(path: Path) -> bool:
        return name.lower().startswith(path.parent.name.replace("_", ""))

    files = sorted(folder.glob("models/*/modeling_*.py"), key=is_likely, reverse=True)
    text = f"\nclass {name}("
    return next((f for f in files if text in f.read_text(encoding="utf-8")), None)


def _classes_with_heads(folder: Path) -> set[str]:
    auto = folder / "models" / "auto" / "modeling_auto.py"
    text = auto.read_text(encoding="utf-8") if auto.is_file() else ""
    return set(re.findall(r'"(\w+(?:For[A-Z]|LMHead)\w*)"', text))


@cache
def _keys_of_config(folder: Path, modeling: Path, name: str) -> frozenset[str]:
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
            tree = ast.parse(file.read_text(encoding="utf-8"))
            classes |= {n.name: n for n in tree.body if isinstance(n, ast.ClassDef)}
    keys, left = {"attn_implementation", "experts_implementation", "num_labels"}, [named[1]]
    while left:
        definition = classes.get(left.pop())
        if definition is None:  # made elsewhere
            return frozenset()
        keys |= set(_keys_of_class(definition))
        ours = [
            b.id for b in definition.bases if isinstance(b, ast.Name) and b.id.endswith("Config")
        ]
        left += ours if definition.name not in ("PreTrainedConfig", "PretrainedConfig") else []
    return frozenset(keys)


def _keys_of_class(node: ast.ClassDef) -> Iterator[str]:
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
            yield from (k.value for k in each.value.keys if isinstance(k, ast.Constant))
