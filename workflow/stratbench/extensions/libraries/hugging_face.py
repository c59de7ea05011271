"""Builds transformers models from configs, and divides them by the library's own plans.

The entries that `libraries` makes name functions of this module, which imports torch and transformers.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import Tensor, nn
from transformers import CONFIG_MAPPING, PreTrainedConfig, PreTrainedModel

from stratbench.workload.torch_internals import get_children
from stratbench.workload.users_code import Unsuitable


class Scores(nn.Module):
    """A transformers model that returns only its scores.

    `scores` is the number of scores per token or sample: the model's vocabulary size or number of labels. It
    may be more than the data set has.
    """

    def __init__(self, network: PreTrainedModel, scores: int) -> None:
        super().__init__()
        self.network, self.scores = network, scores
        self._no_split_modules = sorted(network._no_split_modules or ())
        heads = ("num_key_value_heads", "num_attention_heads")
        counts = (getattr(network.config, key, None) for key in heads)
        #: Number of heads of keys and values, which have the fewest; 0 without attention.
        self.num_heads = next((n for n in counts if type(n) is int), 0)

        #: Whether the model takes waveforms of one channel, without a dimension for the channel.
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
        config: Content of a config.json, or None for the class's own defaults.
        arguments: Overrides of the config.
        weights: Folder with safetensors, or None for random weights.
        weights_sha256: Not used; it distinguishes cells with other weights.
        lora: Options of peft's LoraConfig, with which adapters are trained instead of the weights.
        vocab_size: Number of different tokens of the data, or None for images and waveforms.
        sequence: Tokens per sample of text.
        num_classes: Number of classes of the data.
        in_channels: Channels of the images or waveforms.
        image_size: Height and width of the images in pixels.
        length: Values per channel of a waveform.

    Raises:
        Unsuitable: If the config does not suit the data, or if the weights do not suit the config.
    """
    values = {**(config or {}), **(arguments or {})}
    model_type = values.pop("model_type", None)
    if model_type is not None and model_type not in CONFIG_MAPPING:
        raise Unsuitable(
            f"model_type = {model_type!r}: the installed transformers has no such model; correct it, or "
            "install a newer version"
        )
    kind = CONFIG_MAPPING[model_type] if model_type else cls.config_class
    names = getattr(kind, "attribute_map", {})
    values = {names.get(key, key): value for key, value in values.items()}
    if vocab_size is not None:
        tokens = values.setdefault("vocab_size", vocab_size)
        # Special tokens that the vocabulary does not have are removed.
        for key in ("bos_token_id", "eos_token_id", "pad_token_id"):
            number = values.get(key, getattr(kind, key, None))
            if type(number) is int and number >= tokens:
                values[key] = None
    if labels := _count_labels(cls, vocab_size, num_classes):
        values = {"num_labels": labels} | values
    if image_size is not None:
        values = {"image_size": image_size, "num_channels": in_channels} | values
    if length is not None and hasattr(kind, "num_mel_bins"):
        values = {"num_mel_bins": in_channels, "max_source_positions": length // 2} | values
    made = kind.from_dict(
        {key: v for key, v in values.items() if key not in ("dtype", "torch_dtype")}
    )
    data = "texts" if vocab_size else "images" if image_size else "waveforms"
    _check_data_kind(kind, data)
    if vocab_size is not None:
        _adapt_to_text(made, values, vocab_size, sequence)
    if not issubclass(cls, PreTrainedModel):
        if kind not in cls._model_mapping:
            raise Unsuitable(
                f"{cls.__name__} has no class for {kind.__name__}; name a class in the config's "
                "`architectures`"
            )
        cls = cls._model_mapping[kind]
    if (wanted := _INPUTS.get(cls.main_input_name)) != data:
        raise Unsuitable(
            f"the data set has {data}, but {cls.__name__} takes {wanted or 'other data'}; use another class"
        )
    made.use_cache = False  # the cache is for generation, which a training does not need
    drawn = cls(made) if weights is None else _load_weights(cls, made, weights)
    if lora is not None:
        from peft import LoraConfig, inject_adapter_in_model

        drawn = inject_adapter_in_model(LoraConfig(**lora), drawn)
    return Scores(drawn, made.num_labels if labels else made.vocab_size)


#: Kind of data by the name that a class of transformers has for its input.
_INPUTS = {
    "input_ids": "texts",
    "pixel_values": "images",
    "input_values": "waveforms",
    "input_features": "waveforms",
}


def _count_labels(cls: type, vocab_size: int | None, num_classes: int | None) -> int | None:
    """Return the number of labels that the model's head scores per sample, or None.

    The result is None if the head scores tokens.
    """
    return num_classes if vocab_size is None or "ForSequence" in cls.__name__ else None


def _check_data_kind(kind: type[PreTrainedConfig], data: str) -> None:
    """Raise Unsuitable if the data are texts or images that the config cannot take."""
    for key, wanted in (("vocab_size", "texts"), ("image_size", "images")):
        if data == wanted and not hasattr(kind, key):
            raise Unsuitable(
                f"the data set has {data}, but {kind.__name__} has no {key}; use another model"
            )


def _adapt_to_text(
    config: PreTrainedConfig, values: Mapping[str, Any], vocab_size: int, sequence: int
) -> None:
    """Raise the config's longest sequence to the data set's, if it is shorter.

    Raises:
        Unsuitable: If the user has set a shorter sequence or a smaller vocabulary.
    """
    if config.vocab_size < vocab_size:
        raise Unsuitable(
            f"vocab_size = {config.vocab_size}: the data set has {vocab_size} tokens; remove the key, or set "
            f"at least {vocab_size}"
        )
    key = type(config).attribute_map.get("max_position_embeddings", "max_position_embeddings")
    if (getattr(config, key, None) or sequence) < sequence:
        if key in values:
            raise Unsuitable(
                f"{key} = {values[key]}: the data set's samples have {sequence} tokens; remove the key, or "
                f"set at least {sequence}"
            )
        setattr(config, key, sequence)


def _load_weights(
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
        raise Unsuitable(
            f"{folder} lacks the weights {', '.join(missing[:3])}; use a folder with all weights, or "
            "weights: false"
        )
    return model


#: Values of stratbench's tensor plans by the equivalent values of transformers' plans.
_WORDS = {
    **{word: word for word in ("colwise", "rowwise")},
    "colwise_gather_output": "scores",
    "replicated_with_grad_allreduce": "head norm",
}


def tensor_plan(built: Scores) -> dict[str, str]:
    """Return the tensor plan that transformers declares for the model. Raises ValueError without a plan."""
    model, name = built.network, type(built.network).__name__
    base = model.config.base_model_tp_plan
    if any(hasattr(module, "base_layer") for module in built.modules()):
        raise ValueError("`tensor` does not divide layers with adapters; remove lora")
    if not base:
        raise ValueError(
            f"transformers has no plan by which the layers of {name} can be divided; state tensor_plan"
        )
    below = f"network.{model.base_model_prefix}."
    theirs = {f"{below}{path}": word for path, word in base.items()}
    theirs |= {f"network.{path}": word for path, word in (type(model)._tp_plan or {}).items()}
    plan = {}
    for path, word in theirs.items():
        ours = _WORDS.get(word)
        if ours is None or (ours == "head norm" and not path.endswith(("q_norm", "k_norm"))):
            raise ValueError(
                f"transformers' plan for {name} has {word!r} for {path}, which `tensor` does not support; "
                "state tensor_plan"
            )
        plan[path] = ours
    # A matrix that is both embedding and head is divided as an embedding.
    first = model.get_input_embeddings()
    if getattr(model.get_output_embeddings(), "weight", None) is first.weight:
        plan |= {path: "embedding" for path, module in built.named_modules() if module is first}
    return plan


def pipeline_modules(built: Scores) -> tuple[Any, ...]:
    """Return the model's forward as a chain of modules, by transformers' pipeline plan.

    Raises ValueError if transformers has no plan for the model.
    """
    model, base = built.network, built.network.base_model
    body, head = model.config.base_model_pp_plan, type(model)._pp_plan
    if not body or not head or base is model:
        name = type(model).__name__
        raise ValueError(
            f"transformers has no plan by which {name} can be cut into stages; state pipeline_modules"
        )
    chain: list[Any] = []
    for i, key in enumerate(body):
        path, part = f"network.{model.base_model_prefix}.{key}", getattr(base, key)
        if isinstance(part, nn.ModuleList):
            after = tuple(body)[i + 1 :]
            chain += [(_SingleLayer(key, j, after), (f"{path}.{j}",)) for j in range(len(part))]
        else:
            chain.append(path)
    return (*chain, *(f"network.{key}" for key in head))


class _SingleLayer:
    """Pipeline piece that computes one layer of a transformers model without its head.

    The piece calls the model itself, which creates masks and positions for its layers.
    """

    def __init__(self, layers: str, number: int, after: tuple[str, ...]) -> None:
        self._layers, self._number, self._after = layers, number, after
        self.__name__ = f"{layers}.{number}"

    def __call__(self, built: Scores, x: Tensor) -> Tensor:
        base = built.network.base_model
        children = get_children(base)
        modules = {key: children[key] for key in (self._layers, *self._after)}
        layers = [_Identity() for _ in modules[self._layers]]
        layers[self._number] = modules[self._layers][self._number]
        children |= dict.fromkeys(self._after, _Identity()) | {self._layers: nn.ModuleList(layers)}
        try:
            return base(inputs_embeds=x).last_hidden_state
        finally:
            children |= modules


class _Identity(nn.Module):
    """A layer that returns its input, in place of the layers that a piece does not compute."""

    def forward(self, x: Tensor, *_: Any, **__: Any) -> Tensor:
        return x
