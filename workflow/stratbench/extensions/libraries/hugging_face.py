"""Models of transformers: built from a config, with their own declarations.

`libraries` names this in the entries that it makes. Importing this file imports torch and transformers.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import Tensor, nn
from transformers import CONFIG_MAPPING, PreTrainedConfig, PreTrainedModel

from stratbench.workload.network.pieces import Plan
from stratbench.workload.torch_internals import get_children
from stratbench.workload.users_code import Unsuitable


class Scores(nn.Module):
    """A transformers model that returns only its scores, with transformers' plan for its layers.

    `scores` is the number of outputs per token or sample: as many as its vocabulary or its labels, which may
    be more than the data have.
    """

    def __init__(self, network: PreTrainedModel, scores: int) -> None:
        super().__init__()
        self.network, self.scores = network, scores
        self._no_split_modules = sorted(network._no_split_modules or ())
        heads = ("num_key_value_heads", "num_attention_heads")
        counts = (getattr(network.config, key, None) for key in heads)
        #: Of keys and values, which are the fewest; 0 where it has none.
        self.num_heads = next((n for n in counts if type(n) is int), 0)

        #: Whether it takes waveforms of one channel, without a dimension for it.
        self.takes_values = network.main_input_name == "input_values"

    def forward(self, x: Tensor) -> Tensor:
        return self.network(x.squeeze(1) if self.takes_values else x).logits


def network(
    cls: type,
    config: Mapping[str, Any] | None = None,
    arguments: Mapping[str, Any] | None = None,
    weights: str | None = None,
    weights_sha256: str | None = None,
    lora: Mapping[str, Any] | None = None,
    vocab_size: int | None = None,
    sequence: int | None = None,
    num_classes: int | None = None,
    in_channels: int | None = None,
    image_size: int | list[int] | None = None,
    length: int | None = None,
) -> Scores:
    """Return the model of a class of transformers.

    Args:
        cls: The class, or one that chooses it by the config's `model_type` (AutoModelForCausalLM).
        config: The content of a config.json; without it the class's own defaults.
        arguments: Overrides of the config.
        weights: A folder with safetensors; without it weights are drawn.
        weights_sha256: Only distinguishes cells.
        lora: Options of peft's LoraConfig: adapters are trained in place of the weights.
        vocab_size: Tokens of the data, or None for images and waveforms.
        sequence: Tokens of a sample of text.
        num_classes: Classes of the data.
        in_channels: Channels of the images or waveforms.
        image_size: Pixels of a side.
        length: Values of a waveform's channel.

    Raises:
        Unsuitable: The config does not suit the data, or the weights not the config.
    """
    values = {**(config or {}), **(arguments or {})}
    model_type = values.pop("model_type", None)
    if model_type is not None and model_type not in CONFIG_MAPPING:
        raise Unsuitable(f"model_type = {model_type!r}: this transformers has no such model")
    kind = CONFIG_MAPPING[model_type] if model_type else cls.config_class
    names = getattr(kind, "attribute_map", {})
    values = {names.get(key, key): value for key, value in values.items()}
    if vocab_size is not None:
        tokens = values.setdefault("vocab_size", vocab_size)
        # Tokens that mark a text's ends, and which the vocabulary does not have.
        for key in ("bos_token_id", "eos_token_id", "pad_token_id"):
            number = values.get(key, getattr(kind, key, None))
            if type(number) is int and number >= tokens:
                values[key] = None
    if labels := _labels(cls, vocab_size, num_classes):
        values = {"num_labels": labels} | values
    if image_size is not None:
        values = {"image_size": image_size, "num_channels": in_channels} | values
    if length is not None and hasattr(kind, "num_mel_bins"):
        values = {"num_mel_bins": in_channels, "max_source_positions": length // 2} | values
    made = kind.from_dict(
        {key: v for key, v in values.items() if key not in ("dtype", "torch_dtype")}
    )
    data = "texts" if vocab_size else "images" if image_size else "waveforms"
    _check_kind(kind, data)
    if vocab_size is not None:
        _suit_text(made, values, vocab_size, sequence)
    if not issubclass(cls, PreTrainedModel):
        if kind not in cls._model_mapping:
            raise Unsuitable(
                f"{cls.__name__} has no class for {kind.__name__}; name one in the config's `architectures`"
            )
        cls = cls._model_mapping[kind]
    if (wanted := _INPUTS.get(cls.main_input_name)) != data:
        raise Unsuitable(f"the data are {data}, and {cls.__name__} takes {wanted or 'others'}")
    made.use_cache = False  # for generation, which no training does
    drawn = cls(made) if weights is None else _with_weights(cls, made, weights)
    if lora is not None:
        from peft import LoraConfig, inject_adapter_in_model

        drawn = inject_adapter_in_model(LoraConfig(**lora), drawn)
    return Scores(drawn, made.num_labels if labels else made.vocab_size)


#: What a class calls its input, and what that is.
_INPUTS = {
    "input_ids": "texts",
    "pixel_values": "images",
    "input_values": "waveforms",
    "input_features": "waveforms",
}


def _labels(cls: type, vocab_size: int | None, num_classes: int | None) -> int | None:
    """Return the number of sample labels that the head scores.

    Return None if it scores tokens.
    """
    return num_classes if vocab_size is None or "ForSequence" in cls.__name__ else None


def _check_kind(kind: type[PreTrainedConfig], data: str) -> None:
    """Raise Unsuitable if the config is for images and the data are texts, or vice versa."""
    for key, wanted in (("vocab_size", "texts"), ("image_size", "images")):
        if data == wanted and not hasattr(kind, key):
            raise Unsuitable(f"the data are {data}, and {kind.__name__} has no {key}")


def _suit_text(
    config: PreTrainedConfig, values: Mapping[str, Any], vocab_size: int, sequence: int
) -> None:
    """Set the config's length to that of the text, or raise Unsuitable if it has a smaller one."""
    if config.vocab_size < vocab_size:
        raise Unsuitable(
            f"vocab_size = {config.vocab_size}: the data set has {vocab_size} tokens; remove it, or set at "
            f"least {vocab_size}"
        )
    key = type(config).attribute_map.get("max_position_embeddings", "max_position_embeddings")
    if (getattr(config, key, None) or sequence) < sequence:
        if key in values:
            raise Unsuitable(
                f"{key} = {values[key]}: the data set's samples have {sequence} tokens; remove it, or set at "
                f"least {sequence}"
            )
        setattr(config, key, sequence)


def _with_weights(
    cls: type[PreTrainedModel], config: PreTrainedConfig, folder: str
) -> PreTrainedModel:
    model, report = cls.from_pretrained(
        folder,
        config=config,
        dtype="float32",
        use_safetensors=True,
        local_files_only=True,
        trust_remote_code=False,
        output_loading_info=True,
    )
    if missing := sorted(report["missing_keys"]):
        raise Unsuitable(f"{folder} has no weights of {', '.join(missing[:3])}")
    return model


#: What transformers' plans say of a module, and the words of ours that do the same.
_WORDS = {
    **{word: word for word in ("colwise", "rowwise")},
    "colwise_gather_output": "scores",
    "replicated_with_grad_allreduce": "head norm",
}


def tensor_plan(built: Scores) -> dict[str, str]:
    """Return transformers' own division of the layers as a tensor plan. ValueError if it has none."""
    model, name = built.network, type(built.network).__name__
    base = model.config.base_model_tp_plan
    if any(hasattr(module, "base_layer") for module in built.modules()):
        raise ValueError("`tensor` does not divide layers with adapters; remove lora")
    if not base:
        raise ValueError(
            f"transformers states no plan by which the layers of {name} can be divided"
        )
    below = f"network.{model.base_model_prefix}."
    theirs = {f"{below}{path}": word for path, word in base.items()}
    theirs |= {f"network.{path}": word for path, word in (type(model)._tp_plan or {}).items()}
    plan = {}
    for path, word in theirs.items():
        ours = _WORDS.get(word)
        if ours is None or (ours == "head norm" and not path.endswith(("q_norm", "k_norm"))):
            raise ValueError(
                f"transformers' plan for {name} says {word!r} of {path}, which `tensor` does not do"
            )
        plan[path] = ours
    # Of a matrix that is both, the scores' part is the embedding's.
    first = model.get_input_embeddings()
    if getattr(model.get_output_embeddings(), "weight", None) is first.weight:
        plan |= {path: "embedding" for path, module in built.named_modules() if module is first}
    return plan


def pipeline_modules(built: Scores) -> Plan:
    """The model's forward as a chain, by transformers' own plan of it. ValueError where there is none."""
    model, base = built.network, built.network.base_model
    body, head = model.config.base_model_pp_plan, type(model)._pp_plan
    if not body or not head or base is model:
        name = type(model).__name__
        raise ValueError(f"transformers states no plan by which {name} can be cut into stages")
    chain: list[Any] = []
    for i, key in enumerate(body):
        path, part = f"network.{model.base_model_prefix}.{key}", getattr(base, key)
        if isinstance(part, nn.ModuleList):
            after = tuple(body)[i + 1 :]
            chain += [(_Layer(key, j, after), (f"{path}.{j}",)) for j in range(len(part))]
        else:
            chain.append(path)
    return (*chain, *(f"network.{key}" for key in head))


class _Layer:
    """The forward of the headless model with a single layer.

    The model itself makes masks and positions for its layers.
    """

    def __init__(self, layers: str, number: int, after: tuple[str, ...]) -> None:
        self._layers, self._number, self._after = layers, number, after
        self.__name__ = f"{layers}.{number}"

    def __call__(self, built: Scores, x: Tensor) -> Tensor:
        base = built.network.base_model
        children = get_children(base)
        modules = {key: children[key] for key in (self._layers, *self._after)}
        layers = [_Same() for _ in modules[self._layers]]
        layers[self._number] = modules[self._layers][self._number]
        children |= dict.fromkeys(self._after, _Same()) | {self._layers: nn.ModuleList(layers)}
        try:
            return base(inputs_embeds=x).last_hidden_state
        finally:
            children |= modules


class _Same(nn.Module):
    """Placeholder for inputs that a piece passes on unchanged."""

    def forward(self, x: Tensor, *_: Any, **__: Any) -> Tensor:
        return x
