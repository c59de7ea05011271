"""`stratbench emit`: what each file says of a cell, and that nothing of it is left out in silence."""

from __future__ import annotations

import ast
import json
import os
import re
import subprocess
import sys
from dataclasses import fields, replace
from pathlib import Path
from typing import Any

import pytest
import yaml
from emitting import record_of

from launching import WORKFLOW
from stratbench.cell.coordinates import Cell
from stratbench.cell.settings import Settings
from stratbench.command.__main__ import main
from stratbench.extensions.emit import table
from stratbench.extensions.emit.choice import MEASUREMENT_SETTINGS, ChosenCell
from stratbench.extensions.emit.errors import EmitError
from stratbench.extensions.emit.find import read_record_to_emit
from stratbench.strategies import REGISTRY
from stratbench.study.config.config import load_config
from stratbench.workload.network.sharding import describe_shard_group_rule

#: Values that no file has by chance, so that a number in it is that of the setting.
UNUSUAL: dict[str, Any] = {
    "model": "gpt-compact", "seed": 4711, "global_batch": 192, "per_worker_batch": 48, "gpus": 4,
    "epochs": 13, "lr": 0.0123, "momentum": 0.87, "weight_decay": 0.0456, "nesterov": True,
    "gradient_accumulation_steps": 3,
    "activation_checkpointing": True, "compile": True, "schedule": "cosine", "lr_warmup_steps": 7,
    "final_lr": 0.00369, "max_grad_norm": 0.77, "precision": "bf16", "augment": True,
    "data_placement": "host",
    "threads": 5, "optimizer_impl": "foreach", "loss_chunks": 11,
}  # fmt: skip
#: Options beside the defaults that a strategy is written with.
OPTIONS: dict[str, list[dict[str, Any]]] = {
    "ddp": [{"bucket_cap_mb": 37}, {"compress": "fp16"}, {"compress": "powersgd", "powersgd_rank": 6,
    "powersgd_start_step": 19}],
    "fsdp": [
        {},
        {"reshard_after_forward": "never", "offload": "cpu"},
        {"mixed_precision": "policy", "shard_group_size": 2},
        {"gradient_sync": "last-part"},
    ],
    "zero1": [{"bucket_cap_mb": 37}],
    "zero1-torch": [{"parameters_as_bucket_view": False}],
    "deepspeed": [{"stage": 1}, {"stage": 3}, {"match_other_strategies": False}],
}  # fmt: skip
#: How files say an option, where its value does not show.
OPTION_SPELLINGS = {"bucket_cap_mb": (str((37 << 20) // 4),), "match_other_strategies": ("zero",)}
#: How files say a setting, where its value alone does not show.
SPELLINGS = {
    "optimizer": ("SGD", "optim=", "optimizer"),
    "per_worker_batch": ("48", "=16", "192", "work.batches"),
    "global_batch": ("48", "=16", "192", "work.batches"),
    "nesterov": ("nesterov",),
    "momentum": ("0.87",),
    "gradient_accumulation_steps": ("chunk(3)", "=3", " 3", "3,"),
    "activation_checkpointing": ("checkpoint",),
    "compile": ("compile", "INDUCTOR"),
    "schedule": ("cos",),
    "lr_warmup_steps": ("7",),
    "precision": ("bf16", "bfloat16"),
    "augment": ("augment", "work.batches"),
    "data_placement": ("data_placement", "work.batches"),
    "seed": ("4711", "work.batches"),
    "device": ("cpu", "CPU"),
    "epochs": ("13",),
    "gpus": ("4",),
    "betas": (),
    "eps": (),
    "steps": (),
    "slowdown": (),
}


def emitted(strategy: str, target: str, **changes: Any) -> str:
    return table.format_file_for_target(ChosenCell(record_of(strategy, **changes)), target)


def each_file() -> list[Any]:
    """Each strategy with each of its targets and some options."""
    return [
        pytest.param(strategy, target, options, id=f"{strategy}-{target}-{options}")
        for strategy in table.NAMES_IN_TARGETS
        for target in table.list_emit_targets_of_strategy(strategy)
        for options in OPTIONS.get(strategy, [{}])
    ]


def body_of(text: str, target: str) -> Any:
    """What a machine reads of a file."""
    if target == "deepspeed":
        return {key: value for key, value in json.loads(text).items() if key != "comments"}
    return yaml.safe_load(text) if target in ("accelerate", "variant") else ast.parse(text)


def unfolded(text: str) -> str:
    """The text with its comments on one line each."""
    return re.sub(r"\n#   ", " ", text)


@pytest.mark.parametrize(("strategy", "target", "options"), each_file())
@pytest.mark.parametrize("device", ["cpu", "cuda"])
def test_each_setting_is_in_the_file_or_named_in_a_comment(strategy, target, options, device):
    changes = {**UNUSUAL, "gpus": 1} if strategy == "single" else UNUSUAL
    text = unfolded(emitted(strategy, target, device=device, options=options, **changes))
    assert body_of(text, target) is not None
    if "--to deepspeed" in text:  # it has the rest
        text += unfolded(emitted(strategy, "deepspeed", device=device, options=options, **changes))
    for key in (f.name for f in fields(Settings) if f.name not in MEASUREMENT_SETTINGS):
        value = changes.get(key)
        spellings = SPELLINGS.get(key, (str(value),))
        if (key == "device" and device == "cuda") or (key == "optimizer" and target == "variant"):
            continue  # what is the default
        assert not spellings or any(s in text for s in spellings), f"{key} = {value}"
    for key, value in options.items():
        said = [str(value), json.dumps(value), key, *OPTION_SPELLINGS.get(key, ())]
        assert any(s.lower() in text.lower() for s in said), f"{key} = {value}"


@pytest.mark.parametrize(("strategy", "target", "options"), each_file())
def test_an_option_or_setting_that_no_target_knows_is_named(strategy, target, options):
    choice = ChosenCell(record_of(strategy, options=options))
    choice.options["brand_new"] = 731
    choice._values["newer"] = 937
    text = table.format_file_for_target(choice, target)
    assert "731" in text or target == "variant"
    assert "newer = 937" in text


@pytest.mark.parametrize("strategy", sorted(REGISTRY.keys() - table.NAMES_IN_TARGETS.keys()))
def test_a_strategy_that_no_engine_knows_is_refused_with_its_targets(strategy):
    choice = ChosenCell(record_of(strategy, gpus=2))
    for target in table.TARGETS.keys() - {"variant"}:
        with pytest.raises(EmitError, match=r"choose variant$"):
            table.format_file_for_target(choice, target)
    assert strategy in table.format_file_for_target(choice, "variant")


def test_workers_that_come_and_go_are_refused():
    with pytest.raises(EmitError, match="which only stratbench supports"):
        emitted("ddp", "pytorch", more={"elastic": {"elastic": True}})


@pytest.mark.parametrize("strategy", ["ddp", "fsdp", "zero1", "single", "local-sgd", "ps-sync"])
@pytest.mark.parametrize("optimizer", ["sgd", "adamw"])
def test_the_variant_gives_the_cells_settings_again(strategy, optimizer):
    options = {"fsdp": {"reshard_after_forward": "never"}, "ddp": {"bucket_cap_mb": 7}}
    changes: dict[str, Any] = {
        "gpus": 1 if strategy == "single" else 2, "dataset": "digits", "data_spec": None, "epochs": 3,
        "per_worker_batch": 16 if strategy == "single" else 8, "lr": 0.03, "weight_decay": 0.01,
        "schedule": "cosine", "lr_warmup_steps": 2, "device": "cpu", "threads": 1, "optimizer": optimizer,
        "compile": True,
    }  # fmt: skip
    if optimizer == "adamw":
        changes |= {"momentum": 0.0, "betas": [0.9, 0.99], "eps": 1e-7}
    record = record_of(strategy, options=options.get(strategy, {}), **changes)
    record["cell"]["strategy"] = "mine" if options.get(strategy) else strategy
    blocks = yaml.safe_load(table.format_file_for_target(ChosenCell(record), "variant"))
    study = load_config({"study": "s", "studies": {"s": blocks}})[1]
    [cell] = [c for c in study.cells if c.repeat == 0]
    wanted = Settings(**record["settings"])
    found = replace(study.settings(cell), seed=wanted.seed, data_spec=None)
    assert found == wanted


def test_fsdp_has_the_names_of_its_blocks_and_groups():
    options = {"shard_group_size": 2, "reshard_after_forward": "never"}
    changes = {"model": "gpt-compact", "gpus": 4, "options": options, "device": "cuda"}
    config = yaml.safe_load(emitted("fsdp", "accelerate", **changes))
    assert config["distributed_type"] == "FSDP"
    assert config["num_processes"] == 4
    assert config["fsdp_config"]["fsdp_transformer_layer_cls_to_wrap"] == "Block"
    assert config["fsdp_config"]["fsdp_reshard_after_forward"] is False
    assert config["parallelism_config"] == {
        "parallelism_config_dp_replicate_size": 2,
        "parallelism_config_dp_shard_size": 2,
    }
    script = emitted("fsdp", "pytorch", **changes)
    assert "init_device_mesh(device.type, (2, 2), mesh_dim_names=('groups', 'shards'))" in script
    assert "reshard_after_forward=False" in script


@pytest.mark.parametrize(
    ("wrap_classes", "rule", "classes"),
    [
        (["Layer"], "instances of Layer", ["Layer"]),
        (
            None,
            describe_shard_group_rule(["LlamaDecoderLayer", "Other"]),
            ["LlamaDecoderLayer", "Other"],
        ),
        (None, describe_shard_group_rule(None), []),
    ],
)
def test_a_users_network_has_the_classes_that_it_names(wrap_classes, rule, classes):
    own = {
        "call": "mine.Net",
        "kwargs": {},
        "wrap_classes": wrap_classes,
        "sha256": "0",
        "version": None,
    }
    record = record_of("fsdp", model="mine", own_model=own)
    record["model"]["own"] = {"sharding": rule}
    assert ChosenCell(record).block_class_names == classes
    fsdp = yaml.safe_load(table.format_file_for_target(ChosenCell(record), "accelerate"))[
        "fsdp_config"
    ]
    assert fsdp.get("fsdp_transformer_layer_cls_to_wrap", "") == ",".join(classes)


def test_deepspeeds_json_is_what_the_strategy_gives_the_engine():
    changes = {
        "gradient_accumulation_steps": 2,
        "per_worker_batch": 8,
        "max_grad_norm": 0.5,
        "precision": "bf16",
    }
    config = json.loads(emitted("deepspeed", "deepspeed", options={"stage": 2}, **changes))
    assert config["zero_optimization"] == {
        "stage": 2,
        "overlap_comm": True,
        "reduce_bucket_size": 25 << 18,
    }
    assert config["train_micro_batch_size_per_gpu"] == 4
    assert config["gradient_accumulation_steps"] == 2
    assert config["gradient_clipping"] == 0.5
    assert config["torch_autocast"]["dtype"] == "bfloat16"
    assert config["train_batch_size"] == 16


@pytest.mark.parametrize(("strategy", "target", "options"), each_file())
@pytest.mark.parametrize("mode", ["selective", "every-2"])
def test_which_blocks_are_computed_again_is_said(strategy, target, options, mode):
    changes = {
        "activation_checkpointing": mode,
        "precision": "bf16-true",
        "gpus": 4,
        "options": options,
    }
    changes |= {"gpus": 1} if strategy == "single" else {}
    text = unfolded(emitted(strategy, target, model="gpt-compact", **changes))
    assert body_of(text, target) is not None
    in_lines = {"selective": "context_fn=selective", "every-2": "in blocks[1::2]:"}
    if target == "pytorch":
        assert in_lines[mode] in text
        assert "model = work.model.to(torch.bfloat16)" in text
    else:
        by_lines = (strategy, target) == ("fsdp", "lightning")
        assert (in_lines[mode] if by_lines else mode) in text
        assert "bf16-true" in text


@pytest.mark.parametrize(
    ("optimizer", "chosen", "device", "options", "words"),
    [
        ("adamw", "fused", "cpu", {}, "fused=True)"),
        ("adamw", "for-loop", "cuda", {}, "foreach=False)"),
        ("sgd", "fused", "cuda", {}, "fused=True)"),
        ("sgd", "fused", "cpu", {}, "foreach=False)"),
        ("sgd", "fused", "cuda", {"offload": "cpu"}, "foreach=False)"),
        ("sgd", "foreach", "cpu", {}, "foreach=True)"),
    ],
)
def test_the_optimizers_implementation_is_the_cells(optimizer, chosen, device, options, words):
    changes: dict[str, Any] = {"optimizer": optimizer, "optimizer_impl": chosen, "device": device}
    if optimizer == "adamw":
        changes |= {"betas": [0.9, 0.999], "eps": 1e-8}
    script = emitted("fsdp", "pytorch", model="gpt-compact", options=options, **changes)
    assert words in script.replace(",\n)", ")")
    arguments = emitted("fsdp", "trainer", model="gpt-compact", options=options, **changes)
    assert ("adamw_torch_fused" in arguments) == (optimizer == "adamw" and chosen == "fused")
    # FSDP's tensors run as a loop unless they are asked not to.
    ours = "for-loop" if words == "foreach=False)" else "fused"
    assert ("torch's own choice" in arguments) == (ours == "for-loop")


def test_fsdp_reduces_gradients_with_the_parts_that_the_cell_did():
    changes = {"model": "gpt-compact", "gradient_accumulation_steps": 2, "gpus": 4}
    for options, line in (
        ({}, None),
        ({"shard_group_size": 2}, "model.set_requires_all_reduce(part == 2)"),
        ({"gradient_sync": "last-part"}, "model.set_requires_gradient_sync(part == 2)"),
    ):
        script = emitted("fsdp", "pytorch", options=options, **changes)
        assert (line or "enumerate") in script
        assert ("set_requires" in script) == bool(line)
        each = "gradient_sync" not in options
        for target in ("accelerate", "trainer"):
            assert (
                "sync_each_batch" in emitted("fsdp", target, options=options, **changes)
            ) == each


def test_a_loss_in_parts_is_told():
    for target in table.list_emit_targets_of_strategy("ddp"):
        assert "loss_chunks" in emitted("ddp", target, model="gpt-compact", loss_chunks=4)
        assert "loss_chunks" not in emitted("ddp", target, model="gpt-compact")


def test_settings_of_a_named_variant_stay_its_own():
    changes = {
        "gradient_accumulation_steps": 2,
        "activation_checkpointing": "every-2",
        "optimizer_impl": "foreach",
    }
    record = record_of("ddp", **changes)
    plain = yaml.safe_load(table.format_file_for_target(ChosenCell(record), "variant"))
    assert "variants" not in plain
    assert plain["experiments"]["chosen"].items() >= changes.items()
    record["cell"]["strategy"] = "less"
    named = yaml.safe_load(table.format_file_for_target(ChosenCell(record), "variant"))
    assert named["variants"]["less"] == {"strategy": "ddp", "settings": changes}
    assert not named["experiments"]["chosen"].keys() & changes.keys()


def test_engines_are_told_to_hold_nothing_twice():
    """Lightning frees gradients late and writes a checkpoint; the Trainer has it so by default, too."""
    for strategy in ("single", "ddp", "fsdp"):
        script = emitted(strategy, "lightning", gpus=1 if strategy == "single" else 2)
        assert "    optimizer.step(closure)\n    optimizer.zero_grad()" in script
        assert "enable_checkpointing=False" in script
    assert "optimizer.zero_grad()" not in emitted("deepspeed", "lightning")
    script = emitted("ddp", "trainer")
    assert "save_strategy='no'" in script
    assert "ddp_find_unused_parameters=False" in script
    remedy = "trainer.accelerator.ddp_handler.gradient_as_bucket_view = True"
    assert remedy in " ".join(script.replace("\n#", "").split())
    other = emitted("ddp", "trainer", options={"gradient_as_bucket_view": False})
    assert "ddp_handler" not in other


def test_lightning_gets_no_key_twice():
    """It refuses a DeepSpeed config with accumulation, and autocast would round twice beside a policy."""
    script = emitted(
        "deepspeed", "lightning", gradient_accumulation_steps=2, precision="bf16", max_grad_norm=0.5
    )
    assert "accumulate_grad_batches=2" in script
    assert "gradient_accumulation_steps" not in script
    assert "train_batch_size" not in script
    assert "precision='32-true'" in script
    assert "gradient_clip_val" not in script
    options = {"mixed_precision": "policy"}
    script = emitted("fsdp", "lightning", options=options, precision="bf16", max_grad_norm=0.5)
    assert "param_dtype=torch.bfloat16, reduce_dtype=torch.float32" in script
    assert "precision='32-true'" in script
    assert "gradient_clip_val=0.5" in script
    assert "precision='bf16-mixed'" in emitted("fsdp", "lightning", precision="bf16")


# ---------------------------------------------------------------- which cell


@pytest.fixture
def results(tmp_path, monkeypatch) -> Path:
    """Results of two studies, one of which has a decision."""
    monkeypatch.setattr(
        "stratbench.extensions.emit.find.record.read_record",
        lambda path: json.loads(path.read_text()),
    )
    for study, strategies in (("one", ("ddp", "fsdp")), ("two", ("ddp",))):
        for strategy in strategies:
            for repeat in (0, 1):
                made = record_of(strategy)
                made["cell"] |= {"study": study, "repeat": repeat}
                path = Cell(**made["cell"]).record_path(tmp_path)
                path.parent.mkdir(parents=True)
                path.write_text(json.dumps(made))
    return tmp_path


def decide_on(results: Path, *chosen: tuple[str, int]) -> None:
    answers = [
        {"experiment": "first", "model": "vgg-compact", "short": {"strategy": name, "gpus": gpus}}
        for name, gpus in chosen
    ]
    (results / "one" / "decision").mkdir()
    (results / "one" / "decision" / "answers.json").write_text(json.dumps({"answers": answers}))


def test_a_cell_is_found_by_path_by_name_or_as_decided(results):
    path = results / "two/cells/first/ddp/vgg-compact/2gpu/rep1/record.json"
    assert read_record_to_emit(results, None, str(path))["cell"]["repeat"] == 1
    assert read_record_to_emit(results, None, str(path.parent))["cell"]["repeat"] == 1
    found = read_record_to_emit(results, "two", "first/ddp/vgg-compact/2gpu")["cell"]
    assert (found["study"], found["repeat"]) == ("two", 0)
    assert (
        read_record_to_emit(results, None, "first/fsdp/vgg-compact/2gpu/rep1")["cell"]["repeat"]
        == 1
    )
    decide_on(results, ("fsdp", 2))
    assert read_record_to_emit(results, None, None)["cell"]["strategy"] == "fsdp"


@pytest.mark.parametrize(
    ("cell", "study", "words"),
    [
        ("first/ddp/vgg-compact/2gpu", None, "is a cell of several studies, one, two; select one"),
        ("/", None, "is neither a record nor a cell in"),
        ("../../one", None, "is neither a record nor a cell in"),
        ("first/gone", None, "is neither a record nor a cell in .*EXPERIMENT/STRATEGY/MODEL/Ngpu"),
        (
            "first",
            "one",
            "matches several cells; name one of first/ddp/vgg-compact/2gpu, first/fsdp",
        ),
        (None, None, "run `stratbench decide`"),
    ],
)
def test_a_cell_that_is_not_clear_is_refused_in_a_sentence(results, cell, study, words):
    with pytest.raises(EmitError, match=words):
        read_record_to_emit(results, study, cell)


def test_of_several_decisions_one_has_to_be_named(results):
    decide_on(results, ("ddp", 2), ("fsdp", 2))
    with pytest.raises(
        EmitError, match="chose 2 cells; name one of first/ddp/vgg-compact/2gpu, first/fsdp"
    ):
        read_record_to_emit(results, None, None)


def test_the_command_prints_or_writes_the_file(results, tmp_path, capsys):
    name = ["emit", "first/fsdp/vgg-compact/2gpu", "--results", str(results), "--to"]
    assert main([*name, "accelerate"]) == 0
    printed = capsys.readouterr().out
    assert yaml.safe_load(printed)["distributed_type"] == "FSDP"
    file = tmp_path / "accelerate.yaml"
    assert main([*name, "accelerate", "--output", str(file)]) == 0
    assert file.read_text() == printed
    assert main([*name, "deepspeed"]) == 2
    assert "choose accelerate, trainer, lightning, pytorch, variant" in capsys.readouterr().err


def test_it_needs_no_torch(results):
    """As the page says: where PyTorch cannot be imported, each target is written."""
    code = (
        "import sys; sys.modules['torch'] = None\n"
        "import json, stratbench.cell.record as record\n"
        "record.read_record = lambda path: json.loads(path.read_text())\n"
        "from stratbench.command.__main__ import main\n"
        "codes = [main(['emit', 'first/fsdp/vgg-compact/2gpu', '--results', sys.argv[1], '--to', t])\n"
        "         for t in ('accelerate', 'trainer', 'lightning', 'pytorch', 'variant')]\n"
        "sys.exit(max(codes))"
    )
    environment = os.environ | {"PYTHONPATH": str(WORKFLOW)}
    command = [sys.executable, "-c", code, str(results)]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


def test_the_page_shows_what_is_written():
    page = (WORKFLOW.parent / "docs" / "emitting.md").read_text()
    shown = re.search(r"```yaml\n(.*?)```", page, re.DOTALL)[1]
    record = record_of(
        "fsdp", gpus=2, model="gpt-compact", dataset="short-text", seed=251120937, epochs=3, lr=0.003,
        optimizer="adamw", betas=[0.9, 0.999], eps=1e-8, global_batch=32, per_worker_batch=16,
    )  # fmt: skip
    record["data"]["train_samples"] = 1024
    record["cell"] |= {"study": "model-parallel", "experiment": "text"}
    record["time"] = {"step_ms": {"p50": 109.9}}
    record["memory"] = {"peak_bytes": 2**30, "peak_over_base_bytes": 45 * 2**20}
    assert table.format_file_for_target(ChosenCell(record), "accelerate") == shown
    for target, what in table.TARGETS.items():
        row = re.search(rf"^\| `{target}` \|.*", page, re.MULTILINE)
        assert row, what
    names = [
        name
        for name in table.NAMES_IN_TARGETS
        if "accelerate" in table.list_emit_targets_of_strategy(name)
    ]
    assert ", ".join(f"`{name}`" for name in names) in page
