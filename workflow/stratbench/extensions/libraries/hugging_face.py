"""Builds models of transformers from configs, and declares how they can be divided.

This module imports torch and transformers. The config entries of models name its functions.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import Tensor, nn
from transformers import CONFIG_MAPPING, PreTrainedConfig, PreTrainedModel

from stratbench.workload.torch_internals import get_submodules
from stratbench.workload.users_code import Unsuitable


class ScoresOnlyModel(nn.Module):
    """A model of transformers whose forward returns only the scores.

    `scores` is the number of scores per token or sample: the model's vocabulary size or number of labels. It
    may be more than the data set has.
    """

    def __init__(self, network: PreTrainedModel, scores: int) -> None:
        super().__init__()
        self.network, self.scores = network, scores
        self._no_split_modules = sorted(network._no_split_modules or ())
        heads = ("num_key_value_heads", "num_attention_heads")
        counts = (getattr(network.config, key, None) for key in heads)
        #: Number of heads of keys and values, which workers may divide. 0 without attention.
        self.num_heads = next((n for n in counts if type(n) is int), 0)

        #: Whether the model takes waveforms [batch, length], without a dimension for the single channel.
        self.takes_values = network.main_input_name == "input_values"

    def forward(self, x: Tensor) -> Tensor:
        return self.network(x.squeeze(1) if self.takes_values else x).logits


def build_network(
    model_class: type,
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
) -> ScoresOnlyModel:
    """Return a model of transformers for a data set.

    Args:
        model_class: The class, or one that chooses it by the config's `model_type` (AutoModelForCausalLM).
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
    kind = CONFIG_MAPPING[model_type] if model_type else model_class.config_class
    names = getattr(kind, "attribute_map", {})
    values = {names.get(key, key): value for key, value in values.items()}
    if vocab_size is not None:
        tokens = values.setdefault("vocab_size", vocab_size)
        # The config must not name special tokens that are beyond the vocabulary.
        for key in ("bos_token_id", "eos_token_id", "pad_token_id"):
            number = values.get(key, getattr(kind, key, None))
            if type(number) is int and number >= tokens:
                values[key] = None
    if labels := _get_number_of_labels(model_class, vocab_size, num_classes):
        values = {"num_labels": labels} | values
    if image_size is not None:
        values = {"image_size": image_size, "num_channels": in_channels} | values
    if length is not None and hasattr(kind, "num_mel_bins"):
        values = {"num_mel_bins": in_channels, "max_source_positions": length // 2} | values
    made = kind.from_dict(
        {key: v for key, v in values.items() if key not in ("dtype", "torch_dtype")}
    )
    data = "texts" if vocab_size else "images" if image_size else "waveforms"
    _check_config_suits_data_kind(kind, data)
    if vocab_size is not None:
        _adapt_config_to_text_data(made, values, vocab_size, sequence)
    if not issubclass(model_class, PreTrainedModel):
        if kind not in model_class._model_mapping:
            raise Unsuitable(
                f"{model_class.__name__} has no model class for {kind.__name__}; name a class in "
                "`architectures` of the config"
            )
        model_class = model_class._model_mapping[kind]
    if (wanted := _INPUTS.get(model_class.main_input_name)) != data:
        raise Unsuitable(
            f"the data set has {data}, but {model_class.__name__} takes {wanted or 'other data'}; name "
            "another class in `transformers`"
        )
    # The cache of keys and values is for generating text, which a training does not do.
    made.use_cache = False
    drawn = (
        model_class(made)
        if weights is None
        else _load_model_with_weights(model_class, made, weights)
    )
    if lora is not None:
        from peft import LoraConfig, inject_adapter_in_model

        drawn = inject_adapter_in_model(LoraConfig(**lora), drawn)
    return ScoresOnlyModel(drawn, made.num_labels if labels else made.vocab_size)


#: Kind of data that a model takes, by the name of its input in transformers.
_INPUTS = {
    "input_ids": "texts",
    "pixel_values": "images",
    "input_values": "waveforms",
    "input_features": "waveforms",
}


def _get_number_of_labels(
    model_class: type, vocab_size: int | None, num_classes: int | None
) -> int | None:
    """Return the number of labels that the model scores per sample.

    The result is None if the model scores tokens instead of labels.
    """
    return num_classes if vocab_size is None or "ForSequence" in model_class.__name__ else None


def _check_config_suits_data_kind(config_class: type[PreTrainedConfig], data_kind: str) -> None:
    """Raise Unsuitable if the model's config lacks the key for the data.

    Texts need `vocab_size`, and images need `image_size`.
    """
    for key, wanted in (("vocab_size", "texts"), ("image_size", "images")):
        if data_kind == wanted and not hasattr(config_class, key):
            raise Unsuitable(
                f"the data set has {data_kind}, but {config_class.__name__} has no {key}; use another model"
            )


def _adapt_config_to_text_data(
    config: PreTrainedConfig, values: Mapping[str, Any], vocab_size: int, sequence: int
) -> None:
    """Increase the config's maximum number of positions to the length of the data set's samples.

    Raises:
        Unsuitable: If the user has set a shorter sequence or a smaller vocabulary.
    """
    if config.vocab_size < vocab_size:
        raise Unsuitable(
            f"vocab_size = {config.vocab_size}: the data set has {vocab_size} different tokens; remove the "
            f"key, or set at least {vocab_size}"
        )
    key = type(config).attribute_map.get("max_position_embeddings", "max_position_embeddings")
    if (getattr(config, key, None) or sequence) < sequence:
        if key in values:
            raise Unsuitable(
                f"{key} = {values[key]}: the data set's samples have {sequence} tokens; remove the key, or "
                f"set at least {sequence}"
            )
        setattr(config, key, sequence)


def _load_model_with_weights(
    model_class: type[PreTrainedModel], config: PreTrainedConfig, folder: str
) -> PreTrainedModel:
    model, report = model_class.from_pretrained(
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
            f"{folder} lacks the weights {', '.join(missing[:3])}; use a folder with all weights, or set "
            "weights: false"
        )
    return model


#: For each word of transformers' tensor plans: the word of stratbench's plans with the same meaning.
_WORDS = {
    "colwise": "colwise",
    "rowwise": "rowwise",
    "colwise_gather_output": "scores",
    "replicated_with_grad_allreduce": "head norm",
}


def tensor_plan(built_model: ScoresOnlyModel) -> dict[str, str]:
    """Return transformers' tensor plan for the model: how workers divide each module, by path.

    Raises:
        ValueError: If transformers has no such plan, or the plan is not supported.
    """
    model, name = built_model.network, type(built_model.network).__name__
    base = model.config.base_model_tp_plan
    if any(hasattr(module, "base_layer") for module in built_model.modules()):
        raise ValueError(
            "strategy `tensor` cannot divide layers with LoRA adapters; remove the key lora"
        )
    if not base:
        raise ValueError(
            f"transformers has no plan by which the layers of {name} can be divided; give the model a "
            "tensor_plan"
        )
    below = f"network.{model.base_model_prefix}."
    theirs = {f"{below}{path}": word for path, word in base.items()}
    theirs |= {f"network.{path}": word for path, word in (type(model)._tp_plan or {}).items()}
    plan = {}
    for path, word in theirs.items():
        ours = _WORDS.get(word)
        if ours is None or (ours == "head norm" and not path.endswith(("q_norm", "k_norm"))):
            raise ValueError(
                f"transformers' plan for {name} has {word!r} for {path}, which the strategy `tensor` does "
                "not support; give the model a tensor_plan"
            )
        plan[path] = ours
    # The embedding and the head may share one matrix. It is then divided as an embedding.
    first = model.get_input_embeddings()
    if getattr(model.get_output_embeddings(), "weight", None) is first.weight:
        plan |= {
            path: "embedding" for path, module in built_model.named_modules() if module is first
        }
    return plan


def pipeline_modules(built_model: ScoresOnlyModel) -> tuple[Any, ...]:
    """Return the model's forward as a chain of modules, by transformers' pipeline plan.

    Raises:
        ValueError: If transformers has no pipeline plan for the model.
    """
    model, base = built_model.network, built_model.network.base_model
    body, head = model.config.base_model_pp_plan, type(model)._pp_plan
    if not body or not head or base is model:
        name = type(model).__name__
        raise ValueError(
            f"transformers has no plan by which {name} can be cut into stages; give the model "
            "pipeline_modules"
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
    """A step of a pipeline stage that computes one layer of a model of transformers.

    It calls the whole model with all other layers replaced, because the model creates masks and positions.
    """

    def __init__(self, layers: str, number: int, after: tuple[str, ...]) -> None:
        self._layers, self._number, self._after = layers, number, after
        self.__name__ = f"{layers}.{number}"

    def __call__(self, built: ScoresOnlyModel, x: Tensor) -> Tensor:
        base = built.network.base_model
        children = get_submodules(base)
        modules = {key: children[key] for key in (self._layers, *self._after)}
        layers = [_Identity() for _ in modules[self._layers]]
        layers[self._number] = modules[self._layers][self._number]
        children |= dict.fromkeys(self._after, _Identity()) | {self._layers: nn.ModuleList(layers)}
        try:
            return base(inputs_embeds=x).last_hidden_state
        finally:
            children |= modules


class _Identity(nn.Module):
    """A layer that returns its input. It replaces the layers that `_SingleLayer` must not compute."""

    def forward(self, x: Tensor, *_: Any, **__: Any) -> Tensor:
        return x
