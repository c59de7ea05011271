"""`stratbench plan --model NAME --gpus N`, and `stratbench.estimate` for a module of one's own."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest
import torch
import torch.distributed as dist
import yaml
from test_plan_footprint import describe_gpt
from torch import nn

import stratbench
from stratbench.cell.text.words import COLUMNS
from stratbench.command.__main__ import main as stratbench_main
from stratbench.extensions.plan import public_runs
from stratbench.extensions.plan.__main__ import main as plan_main
from stratbench.extensions.plan.device_rates import find_gpu_datasheet, make_gpu_device
from stratbench.extensions.plan.footprint import drawn_out, equal_blocks
from stratbench.extensions.plan.footprint.footprint import make_footprint
from stratbench.extensions.plan.needs import make_cell_to_plan
from stratbench.extensions.plan.one_model import model_answer, one_network, rows
from stratbench.extensions.plan.one_model.model_answer import (
    Question,
    answer_model_question,
    predict_strategy_answer,
)
from stratbench.extensions.plan.pages.model_answer import format_model_answer
from stratbench.extensions.plan.schedule import DOES_NOT_FIT, FITS
from stratbench.strategies import get_mesh, get_option_defaults
from stratbench.study.config.messages import ConfigError

TEXT = {"source": "markov-text", "train_samples": 64, "test_samples": 8, "vocabulary": 64}
CONFIG = {"datasets": {"text": {**TEXT, "sequence": 32}}}
TOGETHER = ["fsdp-zero3", "ddp"]
QUESTION = Question("gpt-compact", 2, "A10G", dataset="text", sequence=64, price=2.0)


@pytest.fixture
def small(tmp_path, monkeypatch):
    """Fewer strategies, and results in a folder of the test's own."""
    given = yaml.safe_load(model_answer.TEMPLATE.read_text(encoding="utf-8"))
    given["strategies"]["together"] = TOGETHER
    path = tmp_path / "small.yaml"
    path.write_text(yaml.safe_dump(given, sort_keys=False), encoding="utf-8")
    monkeypatch.setattr(model_answer, "TEMPLATE", path)
    monkeypatch.chdir(tmp_path)


@pytest.mark.slow
def test_each_strategy_has_the_largest_batch_that_fits_its_memory_and_its_rate(small):
    first = []
    config = CONFIG | {"results": "results", "models": {"small": describe_gpt(2, 128)}}
    answer = answer_model_question(config, replace(QUESTION, model="small"), first.append)
    assert {c.strategy for c in first[0].strategy_answers} == {"fsdp-zero3"}
    found = {(c.strategy, c.uses_checkpointing): c for c in answer.strategy_answers}
    names = {"fsdp-zero3", "ddp", "tensor-2", "tensor-2-sequence", "pipeline-2"}
    assert set(found) == {(name, ckpt) for name in names for ckpt in (False, True)}
    assert [c.verdict for c in answer.strategy_answers] == [FITS] * 10
    # Eight micro-batches go through the two stages.
    assert all(
        c.global_batch == 8 * c.micro_batch
        for c in answer.strategy_answers
        if "pipeline" in c.strategy
    )
    rates = [c.low_high_usual_samples_per_s[2] for c in answer.strategy_answers]
    assert rates == sorted(rates, reverse=True)
    for c in answer.strategy_answers:
        low, high, usual = c.low_high_usual_samples_per_s
        assert low <= usual <= high
        assert c.memory.allocated_bytes <= c.memory.reserved_bytes < c.memory.shown_bytes
        assert (c.memory.reserved_bytes > c.memory.allocated_bytes) == (c.strategy == "fsdp-zero3")
    for name in names:
        assert found[name, True].micro_batch > found[name, False].micro_batch
    for checkpointing in (False, True):
        whole, divided = (found[f"tensor-2{s}", checkpointing] for s in ("", "-sequence"))
        assert divided.micro_batch > whole.micro_batch
    text = format_model_answer(answer)
    assert "small (" in text.splitlines()[0]
    assert "on 2 x A10G 24 GiB: texts of 64 tokens, adamw, bf16" in text.splitlines()[0]
    best = answer.strategy_answers[0]
    assert f"{best.strategy} fits with {best.micro_batch} texts at once" in text.replace("\n ", "")
    hours = 1e9 / (64 * best.low_high_usual_samples_per_s[2]) / 3600
    assert f"{2 * hours:.2g} GPU-hours, at a cost of {4 * hours:.2g}" in " ".join(text.split())
    assert max(map(len, text.splitlines())) <= COLUMNS
    assert text.count("variants: {fsdp-zero3: {strategy: fsdp, mixed_precision: policy}") == 1
    assert (
        "not planned: 4 of 8 strategies with DDP's updates (zero1, zero1-torch, deepspeed," in text
    )
    assert "fsdp shard_group_size=node" in " ".join(text.split())


@pytest.mark.slow
def test_a_batch_is_the_largest_that_fits_and_one_that_does_not_is_told_at_its_least(tmp_path):
    config = CONFIG | {"results": str(tmp_path)}
    given = model_answer._fill_study_template(QUESTION, config)
    config, study, left_out = one_network.make_model_study(config, "gpt-compact", "text", 64, given)
    assert left_out == []
    cell = next(c for c in study.cells if c.strategy == "ddp")
    s = model_answer._remove_evaluation(make_cell_to_plan(config, study, cell))
    footprint, cluster = make_footprint(s.request), config["cluster"]
    device = make_gpu_device(find_gpu_datasheet("A10G"), "bf16", cluster)
    chosen = predict_strategy_answer(s, footprint, device, cluster)
    more = predict_strategy_answer(s, footprint, device, cluster, batch=chosen.micro_batch + 1)
    assert chosen.verdict == FITS
    room_bytes = device.compute_max_fitting_bytes(cluster["memory_margin"])
    assert chosen.memory.allocated_bytes <= room_bytes < more.memory.allocated_bytes
    assert chosen.global_batch == 2 * chosen.micro_batch
    full = predict_strategy_answer(
        s, footprint, device, cluster | {"memory_margin": 1e6}, min_samples=3
    )
    assert full.micro_batch == 3
    huge = predict_strategy_answer(s, footprint, device, cluster, batch=1 << 20)
    assert huge.verdict == DOES_NOT_FIT


@pytest.mark.parametrize(
    ("samples", "batch", "gpus"),
    [(300, 256, [1, 2, 4, 8, 16, 32, 64]), (96, 64, [1, 2, 4, 8, 16, 32]), (7, 4, [1, 2])],
)
def test_a_small_training_set_of_ones_own_has_a_smaller_batch(samples, batch, gpus):
    config = {"datasets": {"text": {**TEXT, "train_samples": samples, "sequence": 32}}}
    _, study, left_out = one_network.make_model_study(config, "gpt-compact", "text")
    assert {study.settings(cell).global_batch for cell in study.cells} == {batch}
    assert sorted({cell.gpus for cell in study.cells if cell.strategy == "ddp"}) == gpus
    assert max(cell.gpus for cell in study.cells if cell.strategy == "fsdp") == gpus[-1]
    assert left_out == []


def test_a_question_about_too_many_gpus_for_the_training_set_is_one_sentence():
    config = {"datasets": {"text": {**TEXT, "train_samples": 7, "sequence": 32}}}
    given = model_answer._fill_study_template(replace(QUESTION, gpus=8), config)
    with pytest.raises(
        ConfigError, match=r"--dataset text: has 7 training samples, too few for .* 8"
    ):
        one_network.make_model_study(config, "gpt-compact", "text", None, given)


def test_a_strategy_that_is_left_out_is_told_once_with_its_reason():
    config = CONFIG | {"models": {"mine": {"call": "nets.Mine"}}}
    given = model_answer._fill_study_template(replace(QUESTION, model="mine"), config)
    _, _, left_out = one_network.make_model_study(config, "mine", "text", None, given)
    assert [reason.partition(": it ")[0] for reason in left_out] == [
        "tensor-2, tensor-2-sequence: models = 'mine'",
        "pipeline-2: models = 'mine'",
    ]
    assert not any("remove" in reason for reason in left_out)


@pytest.mark.slow
def test_a_range_is_that_of_public_runs_where_a_cell_is_like_them(tmp_path, monkeypatch):
    known = public_runs.get_public_time_ratios()
    monkeypatch.setattr(public_runs, "get_public_time_ratios", lambda: known._replace(least_s=0.0))
    question = replace(QUESTION, gpu="H100 80GB", gpus=1)
    config = CONFIG | {"results": str(tmp_path)}
    given = model_answer._fill_study_template(replace(question, gpus=2), config)
    config, study, _ = one_network.make_model_study(config, "gpt-compact", "text", 64, given)
    choices = {}
    for name in ("ddp", "fsdp-zero3", "fsdp-offload"):
        cell = next(c for c in study.cells if c.strategy == name)
        s = model_answer._remove_evaluation(make_cell_to_plan(config, study, cell))
        device = make_gpu_device(find_gpu_datasheet(question.gpu), "bf16", config["cluster"])
        if name == "fsdp-zero3":  # no time goes by on links
            device = replace(device, link_bytes_per_s=1e15, network_bytes_per_s=1e15)
        choices[name] = predict_strategy_answer(
            s, make_footprint(s.request), device, config["cluster"]
        )
    sources = {name: c.time_source for name, c in choices.items()}
    assert sources == {"ddp": "", "fsdp-zero3": known.source, "fsdp-offload": ""}
    best_s, worst_s, usual_s = choices["fsdp-zero3"].step_s
    assert (best_s, worst_s) == pytest.approx((usual_s * known.low, usual_s * known.high))
    best_s, worst_s, usual_s = choices["ddp"].step_s
    assert worst_s / best_s > known.high / known.low
    sheet = find_gpu_datasheet(question.gpu)
    text = format_model_answer(
        model_answer.Answer(question, sheet, config["cluster"], s.data, "adamw", "bf16", 10**6,
                            [choices["fsdp-zero3"], choices["ddp"]], given["variants"], [], "all else")
    )  # fmt: skip
    assert f"from {known.source})." in " ".join(text.split())
    assert f"and its range, with * from {known.source}." in " ".join(text.split())
    rows = {line.split()[0]: line for line in text.splitlines() if "fits" in line.split()[:4]}
    assert ")*" in rows["fsdp-zero3"]
    assert ")*" not in rows["ddp"]


@pytest.mark.parametrize(("node", "sizes"), [(1, []), (2, [2]), (6, [2, 3, 6]), (8, [2, 4, 8])])
def test_groups_that_divide_a_network_fill_a_node_evenly_as_strategies_declare(node, sizes):
    variants = rows.list_model_split_variants(node)
    expected = {f"tensor-{n}{switch}" for n in sizes for switch in ("", "-sequence")}
    assert set(variants) == expected | {f"pipeline-{n}" for n in sizes[-1:]}
    for name, variant in variants.items():
        options = get_option_defaults(variant["strategy"]) | variant
        strategy = options.pop("strategy")
        assert get_mesh(strategy, options, node).workers_per_replica == int(name.split("-")[1])
        assert options.get("sequence_parallel", False) == name.endswith("-sequence")


def test_what_is_not_planned_is_counted_and_named():
    shared = {"fsdp": {"strategy": "fsdp"}, **rows.list_model_split_variants(8)}
    text = rows.describe_unplanned_variants(8, 8, shared)
    others = "ddp, zero1, zero1-torch, deepspeed, ps-sync"
    assert text.startswith(f"5 of 8 strategies with DDP's updates ({others}); 9 of 13 values")
    assert "fsdp offload=cpu" in text
    assert "pipeline pipeline_parallel_size=4" in text
    assert "tensor_parallel_size" not in text
    offloaded = {"offloaded": {"strategy": "fsdp", "offload": "cpu"}}
    assert "; 8 of 13 values" in rows.describe_unplanned_variants(8, 8, shared | offloaded)
    assert "DDP" not in rows.describe_unplanned_variants(1, 1, {"single": {"strategy": "single"}})


@pytest.mark.parametrize(
    ("changes", "told"),
    [
        ({"gpu": "H1"}, "--gpu = 'H1': is not in the table of GPUs; choose one of P40"),
        ({"gpu": None}, "--gpu: is missing; name a GPU, such as 'H100 80GB'. Known GPUs: P40"),
        ({"model": "gpt-compct"}, "--model gpt-compct: is not a model. Did you mean"),
        (
            {"samples": 5},
            "--samples 5: does not apply, since gpt-compact is trained on texts; give --tokens",
        ),
        (
            {"model": "resnet50", "dataset": None},
            "--sequence 64: the data set imagenet-sized has no texts of variable length; remove --sequence",
        ),
    ],
)
def test_what_cannot_be_answered_is_told_by_its_option(changes, told, tmp_path):
    question = Question(**vars(QUESTION) | changes)
    with pytest.raises(ConfigError) as error:
        answer_model_question(CONFIG | {"results": str(tmp_path)}, question)
    assert str(error.value).startswith(told)


@pytest.mark.parametrize(
    ("options", "told"),
    [
        (
            ["--model", "gpt-compact", "--gpus", "0"],
            "--gpus: 0: is not a whole number above 0; give one",
        ),
        (
            ["--model", "gpt-compact", "--gpus", "1", "--tokens", "x"],
            "--tokens: x: is not a number",
        ),
        (["--model", "gpt-compact", "--price", "2"], "--price: needs --gpus N; add"),
        (["--gpus", "2"], "--gpus: needs --model NAME and --gpus N"),
        (
            ["--model", "gpt-compact", "--gpus", "2", "--out", "x"],
            "--out writes a page, and --gpus",
        ),
    ],
)
def test_an_option_out_of_place_is_told_with_code_two(options, told, capsys):
    try:
        code = stratbench_main(["plan", *options])
    except SystemExit as exit_:  # as argparse ends
        code = exit_.code
    assert code == 2
    assert told in capsys.readouterr().err


def test_a_mistake_in_the_question_ends_with_code_one(capsys, tmp_path):
    options = ["--model", "gpt-compact", "--gpus", "2", "--gpu", "H1"]
    assert plan_main(["--config", json.dumps(CONFIG), *options]) == 1
    assert capsys.readouterr().err.startswith("error: --gpu = 'H1'")


# --- stratbench.estimate --------------------------------------------------------------------------


class Tokens(nn.Module):
    """A plain module: scores of the next token."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(64, 32)
        self.blocks = nn.ModuleList(nn.Linear(32, 32) for _ in range(3))
        self.head = nn.Linear(32, 64)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.embedding(x)
        for block in self.blocks:
            x = x + torch.relu(block(x))
        return self.head(x)


def tokens(samples: int) -> tuple[torch.Tensor, torch.Tensor]:
    return tuple(torch.zeros(samples, 16, dtype=torch.int64) for _ in range(2))


@pytest.mark.parametrize("strategy", ["single", "ddp", "fsdp", "zero1", "ps-sync"])
def test_a_module_of_ones_own_is_estimated_and_left_as_it_is(strategy):
    model = Tokens()
    before = {name: (p, p.clone()) for name, p in model.named_parameters()}
    gpus = 1 if strategy == "single" else 2
    found = stratbench.estimate(model, tokens(4), gpus=gpus, gpu="A10G", strategy=strategy)
    assert found.verdict == FITS
    assert found.batch == 4 < found.largest_batch
    assert sum(found.parts_bytes.values()) == pytest.approx(found.allocated_bytes, abs=8)
    shards = 2 if strategy == "fsdp" else 1
    held = sum(-(-p.numel() // shards) * 4 for p in model.parameters())
    assert found.parts_bytes["parameters"] == pytest.approx(held, abs=512 * len(before))
    low_s, high_s = found.step_range_s
    assert low_s <= found.step_s <= high_s
    assert strategy in str(found)
    assert dict(model.named_parameters()).keys() == before.keys()
    assert all(
        model.get_parameter(n) is p and torch.equal(p, was) for n, (p, was) in before.items()
    )
    assert not dist.is_initialized()


def test_a_larger_batch_and_the_largest_are_estimated_alike():
    model, gpu = Tokens().to("meta"), "T4"
    largest = stratbench.estimate(model, tokens(4), gpu=gpu).largest_batch
    assert stratbench.estimate(model, tokens(1), gpu=gpu).largest_batch == largest
    many = torch.zeros(largest, 16, dtype=torch.int64, device="meta")
    more = torch.zeros(largest + 1, 16, dtype=torch.int64, device="meta")
    assert stratbench.estimate(model, (many, many), gpu=gpu).verdict == FITS
    assert stratbench.estimate(model, (more, more), gpu=gpu).verdict != FITS


@pytest.mark.slow
def test_equal_blocks_of_a_module_are_followed_once(monkeypatch):
    blocks = (nn.Sequential(nn.LayerNorm(32), nn.Linear(32, 32), nn.ReLU()) for _ in range(10))
    model = nn.Sequential(nn.Embedding(64, 32), nn.Sequential(*blocks), nn.Linear(32, 64))
    followed = []
    original = drawn_out.extrapolate_footprint_to_all_blocks
    monkeypatch.setattr(
        drawn_out,
        "extrapolate_footprint_to_all_blocks",
        lambda *a: followed.append(a[1]) or original(*a),
    )
    by_blocks = stratbench.estimate(model, tokens(4))
    assert followed == [("1", 10)]
    monkeypatch.setattr(equal_blocks, "MIN_BLOCKS", 11)
    assert stratbench.estimate(model, tokens(4)) == by_blocks
    assert len(followed) == 1


def test_inputs_targets_and_loss_are_what_a_caller_says():
    model = nn.Sequential(nn.Flatten(), nn.Linear(12, 5))
    x, y = torch.zeros(8, 3, 4), torch.zeros(8, 5)
    usual = stratbench.estimate(model, (x, y), precision="fp32")
    asked = []

    def loss(outputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        asked.append((tuple(outputs.shape[1:]), tuple(targets.shape[1:])))
        return (outputs - targets).abs().mean()

    own = stratbench.estimate(model, (x, y), precision="fp32", loss=loss)
    assert set(asked) == {((5,), (5,))}
    assert own.verdict == usual.verdict == FITS


@pytest.mark.parametrize(
    ("given", "told"),
    [
        ({"strategy": "dpp"}, "strategy = 'dpp': is unknown. Did you mean 'ddp'?"),
        (
            {"strategy": "command"},
            "strategy = 'command': memory and traffic of a command are unknown",
        ),
        ({"strategy": "tensor"}, "strategy = 'tensor': it has no plan that divides its layers"),
        ({"strategy": "fsdp", "options": {"x": 1}}, "options = 'x': is unknown. Allowed: reshard"),
        ({"optimizer": "adam"}, "optimizer = 'adam': is unknown. Did you mean 'adamw'?"),
        ({"precision": "fp8"}, "precision = 'fp8': is unknown."),
        ({"gpu": "H1"}, "gpu = 'H1': is not in the table of GPUs"),
        ({"batch": torch.zeros(3)}, "batch: is not a pair of tensors; give inputs and targets"),
        (
            {"batch": (torch.zeros(3, 1), torch.zeros(2))},
            "batch: inputs have 3 samples and targets have 2",
        ),
        ({"model": nn.Identity()}, "model 'model-"),
    ],
)
def test_an_estimate_that_cannot_be_made_says_why(given, told):
    with pytest.raises(ValueError, match="estimate: ") as error:
        stratbench.estimate(**{"model": Tokens(), "batch": tokens(2), "gpus": 2} | given)
    assert str(error.value).startswith(f"stratbench.estimate: {told}")
