"""Models of transformers, named in five lines of config, train as a plain loop does, or say what is wrong.

`make test-transformers` runs all of it. Without transformers what needs it is skipped.
"""

from __future__ import annotations

import dataclasses
import json
import os
from functools import partial
from importlib import metadata, util
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import test_zoo
import torch
import zoo
from torch import Tensor, nn

from launching import LIMIT_S, settings
from stratbench.cell.settings import Settings
from stratbench.extensions.libraries import package_files, transformers_models
from stratbench.extensions.plan.one_model import one_network
from stratbench.strategies import get_mesh, get_option_defaults
from stratbench.study.config.config import Study, load_config
from stratbench.study.config.messages import ConfigError
from stratbench.workload import tasks
from stratbench.workload.data import own_files
from stratbench.workload.data.device_data import DeviceData, Texts, Waveforms
from stratbench.workload.network import models
from stratbench.workload.users_code import ModelError

with_timm = pytest.mark.skipif(util.find_spec("timm") is None, reason="pip install timm")
with_peft = pytest.mark.skipif(util.find_spec("peft") is None, reason="pip install peft")
with_transformers = pytest.mark.skipif(
    util.find_spec("transformers") is None, reason="pip install transformers"
)

CPU = torch.device("cpu")
VOCABULARY, POSITIONS = 8, 12
SIZES = {"hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 4}
TINY = SIZES | {"intermediate_size": 24, "num_key_value_heads": 2, "head_dim": 4}
OF_GPT2 = {"n_embd": 16, "n_layer": 2, "n_head": 4}
OF_GPT2 |= dict.fromkeys(("resid_pdrop", "embd_pdrop", "attn_pdrop"), 0.0)
OF_VIT = SIZES | {"intermediate_size": 24, "patch_size": 2}
#: class -> arguments of its config
KINDS: dict[str, dict[str, Any]] = {
    "LlamaForCausalLM": TINY,
    "GPT2LMHeadModel": OF_GPT2,
    "Qwen3ForCausalLM": TINY,
    "MistralForCausalLM": TINY | {"sliding_window": 5},
    "GemmaForCausalLM": TINY,
}
MIXTRAL = TINY | {"num_local_experts": 4, "num_experts_per_tok": 2}
#: name -> how experts are computed. "grouped_mm", transformers' own choice, has no kernel for fp64.
EXPERTS = {"MixtralEager": "eager", "MixtralBatched": "batched_mm"}
LORA = {"r": 2, "lora_alpha": 4, "target_modules": ["q_proj", "v_proj"]}
BERT = SIZES | {"intermediate_size": 24}
BERT |= dict.fromkeys(("hidden_dropout_prob", "attention_probs_dropout_prob"), 0.0)
OF_WAV2VEC2 = SIZES | {
    "intermediate_size": 24, "conv_dim": [6, 6], "conv_stride": [2, 2], "conv_kernel": [3, 3],
"classifier_proj_size": 8, "num_conv_pos_embeddings": 4,
    "num_conv_pos_embedding_groups": 2, "mask_time_prob": 0.0, "layerdrop": 0.0,
}  # fmt: skip
OF_WAV2VEC2 |= dict.fromkeys(
    ("hidden_dropout", "attention_dropout", "activation_dropout", "feat_proj_dropout", "final_dropout"), 0.0
)  # fmt: skip
OF_WHISPER = {
    "d_model": 16,
    "encoder_layers": 2,
    "encoder_attention_heads": 4,
    "encoder_ffn_dim": 24,
}
OF_WHISPER |= {"classifier_proj_size": 8, "decoder_layers": 1, "decoder_attention_heads": 4}
OF_WHISPER |= {"decoder_ffn_dim": 8}
#: class -> source of the data that it is trained on, and arguments of its config
OTHERS: dict[str, tuple[str, dict[str, Any]]] = {
    "BertForMaskedLM": ("masked-markov-text", BERT),
    "BertForSequenceClassification": ("labelled-markov-text", BERT),
    "Wav2Vec2ForSequenceClassification": ("tones", OF_WAV2VEC2),
    "WhisperForAudioClassification": ("tones", OF_WHISPER),
}
LABELS, LENGTH = 3, 40
#: name in timm -> arguments
OF_TIMM: dict[str, dict[str, Any]] = {
    "vit_tiny_patch16_224": {"patch_size": 2, "embed_dim": 12, "depth": 2, "num_heads": 2},
}
VIT = "ViTForImageClassification"
OF_IMAGES = {*OF_TIMM, VIT}
#: name -> its entry in `models`
ENTRIES: dict[str, dict[str, Any]] = {
    **{name: {"transformers": name, "arguments": given} for name, given in KINDS.items()},
    **{
        name: {
            "transformers": "MixtralForCausalLM",
            "arguments": MIXTRAL | {"experts_implementation": how},
        }
        for name, how in EXPERTS.items()
    },
    **{name: {"timm": name, "arguments": given} for name, given in OF_TIMM.items()},
    VIT: {"transformers": VIT, "arguments": OF_VIT},
    **{name: {"transformers": name, "arguments": given} for name, (_, given) in OTHERS.items()},
    "Adapted": {"transformers": "LlamaForCausalLM", "arguments": TINY, "lora": LORA},
}
#: way -> strategy, options given, workers
WAYS: dict[str, tuple[str, dict[str, Any], int]] = {
    "single": ("single", {}, 1),
    "ddp": ("ddp", {}, 2),
    "fsdp": ("fsdp", {}, 2),
    "fsdp-kept": ("fsdp", {"reshard_after_forward": "never"}, 2),
    "zero1": ("zero1", {}, 2),
    "ps-sync": ("ps-sync", {}, 2),
    "tensor": ("tensor", {}, 2),
    "pipeline": ("pipeline", {"microbatches": 4}, 2),
}
#: What divides a network itself.
SPLIT = {"tensor", "pipeline"}
#: What cannot be divided, and a part of the sentence that says why.
REFUSED = {
    **{(name, "tensor"): "has 'packed_colwise' for network.model.layers" for name in EXPERTS},
    (
        "MixtralEager",
        "pipeline",
    ): "but forward reads values of tensors (aten.nonzero.default); if the model has experts",
    (
        "Adapted",
        "tensor",
    ): "strategy `tensor` cannot divide layers with LoRA adapters; remove the key lora",
    ("GPT2LMHeadModel", "tensor"): "transformers has no plan by which the layers of GPT2LM",
    ("GPT2LMHeadModel", "pipeline"): "transformers has no plan by which GPT2LMHeadModel can",
}


#: source of data -> the rest of its spec
SPECS: dict[str, dict[str, Any]] = {
    "markov-text": {"vocabulary": VOCABULARY, "sequence": POSITIONS},
    "masked-markov-text": {"vocabulary": VOCABULARY, "sequence": POSITIONS},
    "labelled-markov-text": {"vocabulary": VOCABULARY, "sequence": POSITIONS, "classes": LABELS},
    "tones": {"length": LENGTH, "classes": LABELS},
    "synthetic": {"size": 4, "channels": 1},
}


def source_of(entry: dict[str, Any]) -> str:
    """The source of data that suit a model."""
    name = entry.get("transformers", "")
    if name == VIT or "timm" in entry:
        return "synthetic"
    return OTHERS.get(name, ("markov-text",))[0]


def config_of(entry: dict[str, Any], **changes: Any) -> dict[str, Any]:
    """A config with one model, and the texts that it is trained on."""
    source = source_of(entry)
    text = {"source": source, "train_samples": 32, "test_samples": 8} | SPECS[source]
    block = {
        "dataset": "text", "models": ["mine"], "strategies": ["ddp"], "gpus": [2], "epochs": 1,
        "global_batch": 8, "lr": 0.1, "device": "cpu",
    }  # fmt: skip
    return {
        "study": "s",
        "datasets": {"text": text},
        "models": {"mine": entry},
        "studies": {"s": {"experiments": {"e": block | changes}}},
    }


def study_of(entry: dict[str, Any], **changes: Any) -> Study:
    return load_config(config_of(entry, **changes))[1]


def built_from(entry: dict[str, Any]) -> nn.Module:
    """The network of an entry of `models`, as a job builds it."""
    model = models.make_metadata_or_keep_name(
        "mine", study_of(entry).get_own_model_specification("mine")
    )
    return models.build_model_for_training(model, VOCABULARY, (POSITIONS,), 0, CPU, torch.float64)


# --- training -------------------------------------------------------------------------------------


def data_of(source: str = "markov-text") -> DeviceData:
    generator = torch.Generator().manual_seed(3)
    count = test_zoo.SAMPLES + 6
    text = torch.randint(VOCABULARY, (count, POSITIONS + 1), generator=generator)
    label = torch.randint(LABELS, (count,), generator=generator)
    meta: dict[str, Any] = {"name": "made", "shape": [POSITIONS], "classes": VOCABULARY}
    x, y = text[:, :-1], text[:, 1:]
    if source == "masked-markov-text":
        # As many in each sample, so that the mean of a plain loop's copies is the mean of all.
        hidden = torch.rand(x.shape, generator=generator).argsort(1) < 2
        x, y = torch.where(hidden, VOCABULARY - 1, x), torch.where(hidden, x, tasks.IGNORED)
    elif source == "labelled-markov-text":
        y, meta = label, meta | {"classes": LABELS, "vocabulary": VOCABULARY}
    elif source == "tones":
        x, y = torch.randn(count, 1, LENGTH, generator=generator), label
        meta |= {"shape": [1, LENGTH], "classes": LABELS, "mean": [0.0], "std": [1.0]}
    parts = {"train": slice(test_zoo.SAMPLES), "test": slice(test_zoo.SAMPLES, None)}
    arrays = {f"{part}_inputs": x[rows] for part, rows in parts.items()}
    arrays |= {f"{part}_targets": y[rows] for part, rows in parts.items()}
    return Waveforms(meta, arrays, torch.float64) if source == "tones" else Texts(meta, arrays)


def data_for(name: str) -> dict[str, Any]:
    """What test_zoo makes otherwise for a model: its data, if they are no images."""
    source = source_of(ENTRIES[name])
    return {} if source == "synthetic" else {"data_of": partial(data_of, source)}


def settings_of(name: str, way: str) -> Settings:
    strategy, given, workers = WAYS[way]
    options = get_option_defaults(strategy) | given
    entry = ENTRIES[name]
    replicas = get_mesh(strategy, options, workers).replicas
    study = study_of(entry)
    stated = study.settings(study.cells[0])
    return settings(
        strategy, options=options, model="mine", dataset="made",
        own_model=stated.own_model, task=stated.task, gpus=workers, seed=test_zoo.SEED,
        epochs=test_zoo.EPOCHS, global_batch=test_zoo.BATCH,
        per_worker_batch=test_zoo.BATCH // replicas, precision="fp64", **test_zoo.HYPER,
    )  # fmt: skip


def member(cells: list[test_zoo.Cell], rank: int, folder: str) -> None:
    """One of two workers, which train models of transformers in some ways."""
    os.environ["HF_HUB_OFFLINE"] = "1"
    data = data_for(cells[0][0])
    with mock.patch.multiple(test_zoo, WAYS=WAYS, settings_of=settings_of, **data):
        test_zoo.member(cells, rank, folder)


class Plainly(nn.Module):
    """What a user of transformers alone writes: a model of a config, and its logits."""

    def __init__(self, name: str) -> None:
        super().__init__()
        import transformers

        entry = ENTRIES[name]
        cls = getattr(transformers, entry["transformers"])
        ends = dict.fromkeys(("bos_token_id", "eos_token_id"), None)
        pads = {} if name == "GemmaForCausalLM" else {"pad_token_id": None}
        config = cls.config_class(vocab_size=VOCABULARY, **ends, **pads, **entry["arguments"])
        self.model = cls(config)
        if "lora" in entry:
            import peft

            self.model = peft.get_peft_model(self.model, peft.LoraConfig(**entry["lora"]))

    def forward(self, x: Tensor) -> Tensor:
        return self.model(input_ids=x, use_cache=False).logits.transpose(1, 2)


def plain_of_timm(name: str) -> nn.Module:
    import timm

    given = {"num_classes": test_zoo.CLASSES, "in_chans": 1, "img_size": 4}
    return timm.create_model(name, **given, **OF_TIMM[name])


def plain_vit(_name: str) -> nn.Module:
    import transformers

    given = {"num_labels": test_zoo.CLASSES, "num_channels": 1, "image_size": 4}
    model = transformers.ViTForImageClassification(transformers.ViTConfig(**given, **OF_VIT))
    forward = model.forward
    model.forward = lambda x: forward(pixel_values=x).logits
    return model


def plain_of_others(name: str) -> nn.Module:
    import transformers

    cls, (source, given) = getattr(transformers, name), OTHERS[name]
    given = given | {"num_labels": LABELS} if source != "masked-markov-text" else given
    if source != "tones":
        given = given | {"vocab_size": VOCABULARY}
    if name.startswith("Whisper"):
        given = given | {"num_mel_bins": 1, "max_source_positions": LENGTH // 2}
    model = cls(cls.config_class(**given))
    forward, key = model.forward, model.main_input_name

    def scores(x: Tensor) -> Tensor:
        logits = forward(**{key: x[:, 0] if key == "input_values" else x}).logits
        return logits.transpose(1, 2) if logits.dim() == 3 else logits

    model.forward = scores
    return model


def plain(name: str, way: str) -> list[tuple[float, float]]:
    others = dict.fromkeys(OF_TIMM, plain_of_timm) | dict.fromkeys(OTHERS, plain_of_others)
    make = {**others, VIT: plain_vit}.get(name, Plainly)
    with (
        mock.patch.dict(zoo.NETWORKS, {name: lambda _classes: make(name)}),
        mock.patch.multiple(test_zoo, WAYS=WAYS, **data_for(name)),
    ):
        return test_zoo.plain(name, way)


def check_cells(cells: list[test_zoo.Cell], folder: Path) -> None:
    """AssertionError where one does not train as the plain loop, and is not refused as expected."""
    with mock.patch.multiple(test_zoo, WAYS=WAYS, member=member):
        found = test_zoo.trained(cells, folder)
    assert len(found) == len(cells)
    for name, way, _ in cells:
        got = found[f"{name} {way} "]
        if reason := REFUSED.get((name, way)):
            assert reason in got["unsupported"]
            continue
        assert "losses" in got, (name, way, got)
        expected = plain(name, way)
        pairs = zip(got["losses"], expected, strict=True)
        apart = max(abs(a - b) for x, y in pairs for a, b in zip(x, y, strict=True))
        assert apart <= test_zoo.TOLERANCE, (name, way, apart)


@pytest.mark.slow
@pytest.mark.timeout(LIMIT_S)
@with_transformers
def test_models_of_transformers_train_as_a_plain_loop_does(tmp_path):
    check_cells([(name, way, "") for name in KINDS for way in WAYS], tmp_path)


@pytest.mark.slow
@pytest.mark.timeout(LIMIT_S)
@with_transformers
def test_a_mixture_of_experts_trains_as_a_plain_loop_does(tmp_path):
    check_cells([(name, way, "") for name in EXPERTS for way in WAYS], tmp_path)


@pytest.mark.slow
@pytest.mark.timeout(LIMIT_S)
@with_peft
def test_adapters_train_as_a_plain_loop_does(tmp_path):
    check_cells([("Adapted", way, "") for way in WAYS], tmp_path)


@pytest.mark.slow
@pytest.mark.timeout(LIMIT_S)
@with_transformers
def test_a_classifier_of_images_trains_as_a_plain_loop_does(tmp_path):
    check_cells([(VIT, way, "") for way in WAYS if way not in SPLIT], tmp_path)


@pytest.mark.slow
@pytest.mark.timeout(LIMIT_S)
@with_transformers
@pytest.mark.parametrize("name", OTHERS)
def test_masked_texts_labelled_texts_and_waveforms_train_as_a_plain_loop_does(name, tmp_path):
    check_cells([(name, way, "") for way in WAYS if way not in SPLIT], tmp_path)


@pytest.mark.slow
@pytest.mark.timeout(LIMIT_S)
@with_timm
def test_models_of_timm_train_as_a_plain_loop_does(tmp_path):
    ways = (way for way in WAYS if way not in SPLIT)
    check_cells([(name, way, "") for way in ways for name in OF_TIMM], tmp_path)


# --- what the model states ------------------------------------------------------------------------

LLAMA = {"transformers": "LlamaForCausalLM", "arguments": TINY}


@with_transformers
def test_a_model_is_sharded_by_the_classes_that_it_states():
    model = models.make_metadata_or_keep_name(
        "mine", study_of(LLAMA).get_own_model_specification("mine")
    )
    built = models.build_model_for_training(model, VOCABULARY, (POSITIONS,), 0, CPU, torch.float64)
    labels = [label for label, _ in models.list_shard_groups(model, built)]
    assert labels == ["network.model.layers.0", "network.model.layers.1"]
    said = models.describe_own_model_for_record(model, built, VOCABULARY, (POSITIONS,))
    assert said["sharding"] == "instances of LlamaDecoderLayer"


def test_workers_that_do_not_divide_its_heads_are_refused_with_the_config():
    with pytest.raises(ConfigError, match="4 workers cannot divide its 2 heads evenly"):
        study_of(LLAMA, strategies=["tensor"], gpus=[4])


@with_transformers
def test_a_plan_that_says_what_tensor_does_not_do_is_refused(monkeypatch):
    from stratbench.extensions.libraries import hugging_face

    built = built_from(LLAMA)
    assert hugging_face.tensor_plan(built)["network.model.layers.*.self_attn.q_proj"] == "colwise"
    plan = {"layers.*.self_attn.q_proj": "packed_colwise"}
    monkeypatch.setattr(type(built.network.config), "base_model_tp_plan", plan)
    with pytest.raises(ValueError, match=r"has 'packed_colwise' for network.model.layers"):
        hugging_face.tensor_plan(built)


@with_transformers
def test_a_file_says_the_same_as_a_class_and_its_place_does_not_count(tmp_path):
    config = {"model_type": "llama", "architectures": ["LlamaForCausalLM"], **TINY}
    entries = []
    for place in ("one", "two"):
        (tmp_path / place).mkdir()
        (tmp_path / place / "config.json").write_text(json.dumps(config))
        entries.append({"transformers": str(tmp_path / place)})
    first, second = (study_of(entry).get_own_model_specification("mine") for entry in entries)
    assert first == second
    bare = {key: value for key, value in config.items() if key != "architectures"}
    (tmp_path / "one" / "config.json").write_text(json.dumps(bare))
    states = [built_from(entry).state_dict() for entry in (*entries, LLAMA)]
    for other in states[1:]:
        assert all(value.equal(states[0][key]) for key, value in other.items())


@with_transformers
def test_a_vocabulary_and_a_length_may_be_larger_than_the_datas_and_not_smaller():
    larger = LLAMA | {"arguments": TINY | {"vocab_size": 11}}
    model = models.make_metadata_or_keep_name(
        "mine", study_of(larger).get_own_model_specification("mine")
    )
    built = built_from(larger)
    groups = models.list_shard_groups(model, built)
    task = tasks.NextToken()
    models.run_model_trial(model, built, VOCABULARY, (POSITIONS,), groups, task, torch.float64)
    assert built(torch.zeros(2, POSITIONS, dtype=torch.long)).shape == (2, POSITIONS, 11)
    gpt2 = {"transformers": "GPT2LMHeadModel", "arguments": OF_GPT2}
    model = models.make_metadata_or_keep_name(
        "mine", study_of(gpt2).get_own_model_specification("mine")
    )
    longer = models.build_model_for_training(model, VOCABULARY, (2000,), 0, CPU, torch.float32)
    assert longer.network.config.n_positions == 2000
    for key, reason in {
        "vocab_size": "vocab_size = 5: the data set has 8 different tokens; remove the key, or set",
        "max_position_embeddings": "n_positions = 5: the data set's samples have 12 tokens",
    }.items():
        with pytest.raises(ModelError, match=rf"\(transformers:GPT2LMHeadModel\): {reason}"):
            built_from(gpt2 | {"arguments": OF_GPT2 | {key: 5}})


@with_transformers
def test_it_starts_from_a_folders_weights_only_if_asked_for_and_unpickles_nothing(tmp_path):
    import transformers

    torch.manual_seed(1)
    config = transformers.LlamaConfig(vocab_size=VOCABULARY, **TINY)
    saved = transformers.LlamaForCausalLM(config)
    saved.save_pretrained(tmp_path)
    entry = {"transformers": str(tmp_path)}
    name = "model.layers.1.mlp.up_proj.weight"
    expected = saved.state_dict()[name].double()
    assert not built_from(entry).network.state_dict()[name].equal(expected)
    assert built_from(entry | {"weights": True}).network.state_dict()[name].equal(expected)
    first = study_of(entry | {"weights": True}).get_own_model_specification("mine")
    transformers.LlamaForCausalLM(config).save_pretrained(tmp_path)
    assert study_of(entry | {"weights": True}).get_own_model_specification("mine") != first
    (tmp_path / "model.safetensors").rename(tmp_path / "pytorch_model.bin")
    with pytest.raises(ConfigError, match=r"weights = true: .* is no folder with \*\.safetensors"):
        study_of(entry | {"weights": True})


def test_weights_are_read_again_only_where_their_files_changed(tmp_path, monkeypatch):
    folder = tmp_path / "model"
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps({"model_type": "llama"}))
    shards = [folder / f"model-{number}.safetensors" for number in (1, 2)]
    for shard in shards:
        shard.write_bytes(b"weights")
    read = []
    file_sha256 = own_files._hash_file
    monkeypatch.setattr(own_files, "_hash_file", lambda f: read.append(f) or file_sha256(f))

    def sha256() -> str:
        raw = config_of({"transformers": str(folder), "weights": True})
        study = load_config(raw | {"results": str(tmp_path / "results")})[1]
        return study.get_own_model_specification("mine")["kwargs"]["weights_sha256"]

    first = sha256()
    assert (sha256(), len(read)) == (first, 2)
    shards[1].write_bytes(b"others.")
    assert sha256() != first
    assert len(read) == 4


@with_transformers
def test_texts_and_images_are_told_apart_in_a_sentence():
    image = models.make_metadata_or_keep_name(
        "mine", study_of(ENTRIES[VIT]).get_own_model_specification("mine")
    )
    with pytest.raises(ModelError, match="the data set has texts, but ViTConfig has no vocab_size"):
        models.build_model_for_training(image, VOCABULARY, (POSITIONS,), 0, CPU, torch.float64)
    sound = models.make_metadata_or_keep_name(
        "mine",
        study_of(ENTRIES["Wav2Vec2ForSequenceClassification"]).get_own_model_specification("mine"),
    )
    reason = "the data set has texts, but Wav2Vec2ForSequenceClassification takes waveforms"
    with pytest.raises(ModelError, match=reason):
        models.build_model_for_training(sound, VOCABULARY, (POSITIONS,), 0, CPU, torch.float64)
    model = models.make_metadata_or_keep_name(
        "mine", study_of(LLAMA).get_own_model_specification("mine")
    )
    with pytest.raises(
        ModelError, match="the data set has images, but LlamaConfig has no image_size"
    ):
        models.build_model_for_training(model, 5, (1, 4, 4), 0, CPU, torch.float64)


@with_transformers
@pytest.mark.parametrize(
    ("config", "reason"),
    [
        ({"model_type": "lama"}, "model_type = 'lama': the installed transformers has no such model"),
        ({"model_type": "vit"}, "the data set has texts, but ViTConfig has no vocab_size"),
        ({"model_type": "t5"}, "AutoModelForCausalLM has no model class for T5Config; name a class in"),
    ],
)  # fmt: skip
def test_a_config_that_no_model_is_made_of_is_told(tmp_path, config, reason):
    (tmp_path / "config.json").write_text(json.dumps(config))
    with pytest.raises(ModelError, match=reason):
        built_from({"transformers": str(tmp_path)})


# --- mistakes -------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("entry", "message"),
    [
        ({"wrap_classes": ["Block"]}, ": has no source; give exactly one of call, transformers and timm"),
        (LLAMA | {"timm": "x"}, ": has transformers and timm; give exactly one of call"),
        (LLAMA | {"kwargs": {"a": 1}}, ".kwargs: is only for models with `call`; with `transformers` write"),
        ({"call": "a.B", "arguments": {}}, ".arguments: is only for models of transformers or timm"),
        ({"timm": "x", "weights": True}, ".weights: is a key of models of transformers, not of timm"),
        (LLAMA | {"weights": True}, ".weights = true: LlamaForCausalLM is no folder with *.safetensors"),
        ({"transformers": "org/model"}, ".transformers = 'org/model': there is no file org/model; name a"),
    ],
)  # fmt: skip
def test_a_mistake_in_the_config_is_told_without_the_library(entry, message):
    with pytest.raises(ConfigError) as raised:
        study_of(entry)
    assert str(raised.value).startswith(f"config: models.mine{message}")


@pytest.mark.parametrize("text", ["[1", "[1]", "{}"])
def test_a_file_that_is_no_config_is_told(tmp_path, text):
    (tmp_path / "config.json").write_text(text)
    with pytest.raises(ConfigError, match=r"config\.json (is not JSON|has no key model_type)"):
        study_of({"transformers": str(tmp_path)})


def faults_of(entry: dict[str, Any]) -> list[str]:
    study = study_of(entry)
    return study.list_import_errors(study.cells)


def test_a_package_that_is_missing_is_told_with_the_command_that_installs_it(monkeypatch):
    monkeypatch.setattr(transformers_models, "find_package_folder", lambda _: None)
    (fault,) = faults_of(LLAMA)
    assert fault == (
        "model 'mine' (transformers:LlamaForCausalLM): the package transformers is not installed here; pip "
        "install transformers"
    )


@with_transformers
@pytest.mark.parametrize(
    ("name", "arguments", "reason"),
    [
        ("LamaForCausalLM", {}, "transformers has no 'LamaForCausalLM'; did you mean 'LlamaForCausalLM'?"),
        ("LlamaForCausalLM", {"num_layers": 2},
         "arguments.num_layers: its config has no 'num_layers'; did you mean 'num_hidden_layers'?"),
        ("GPT2LMHeadModel", {"n_layers": 2, "hidden_size": 16},
         "arguments.n_layers: its config has no 'n_layers'; did you mean 'n_layer'?"),
    ],
)  # fmt: skip
def test_a_wrong_class_or_key_is_told_before_any_job(name, arguments, reason):
    entry = {"transformers": name, "arguments": arguments}
    told = f"model 'mine' (transformers:{name}): {reason}"
    assert faults_of(entry) == [told]
    with pytest.raises(ModelError) as raised:  # as `check` and `plan` tell it, and the job itself
        built_from(entry)
    assert str(raised.value) == told


@with_transformers
def test_files_show_the_keys_that_a_config_has():
    """They are read without importing transformers."""
    import transformers

    folder = package_files.find_package_folder("transformers")
    implementations = {"attn_implementation", "experts_implementation"}
    for name in KINDS:
        kind = getattr(transformers, name).config_class
        keys = {field.name for field in dataclasses.fields(kind)} | set(kind.attribute_map)
        file = transformers_models._find_class_file(folder, name)
        found = transformers_models._read_config_keys(folder, file, name)
        assert keys <= found, name
        assert {key for key in found if not hasattr(kind(), key)} <= implementations


@with_timm
def test_a_wrong_name_of_timm_is_told_before_any_job():
    (fault,) = faults_of({"timm": "convnext_tny.in12k"})
    assert fault == (
        "model 'mine' (timm:create_model): timm has no 'convnext_tny'; did you mean 'convnext_tiny'?"
    )
    assert faults_of({"timm": "convnext_tiny.in12k"}) == []


@with_peft
def test_adapters_are_made_by_peft_whose_version_counts_and_whose_options_are_known():
    adapted = ENTRIES["Adapted"]
    trained = [n for n, p in built_from(adapted).named_parameters() if p.requires_grad]
    assert len(trained) == 2 * 2 * 2
    assert all("lora_" in name for name in trained)
    assert study_of(adapted).get_own_model_specification("mine")["version"] == (
        f"{metadata.version('transformers')}, peft {metadata.version('peft')}"
    )
    assert faults_of(adapted) == []
    (fault,) = faults_of(LLAMA | {"lora": {"lora_rank": 2}})
    assert "lora.lora_rank: peft's LoraConfig has no 'lora_rank'; did you mean" in fault


@with_transformers
@pytest.mark.parametrize(
    ("entry", "vocabulary"),
    [
        ({"transformers": "LlamaForCausalLM", "arguments": {"vocab_size": 300}}, 300),
        ({"transformers": "GPT2LMHeadModel"}, 50257),
    ],
)
def test_a_model_of_transformers_is_planned_on_texts_of_its_own_vocabulary(entry, vocabulary):
    _, study, _ = one_network.make_model_study({"models": {"mine": entry}}, "mine", sequence=16)
    (name,) = study.datasets
    assert study.get_dataset(name).shape == (16,)
    assert study.get_dataset(name).classes == vocabulary
