"""A user's network that states how it is divided: `tensor` and `pipeline` train it, or say what is wrong."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from launching import LaunchedCell, settings
from stratbench.cell import record
from stratbench.cell.settings import Settings
from stratbench.extensions.plan import check
from stratbench.extensions.plan.footprint import footprint
from stratbench.extensions.plan.footprint.request import Request
from stratbench.extensions.plan.footprint.traffic import compute_wire_bytes
from stratbench.extensions.splitting import tensor
from stratbench.strategies import get_mesh, get_option_defaults
from stratbench.workload import users_code
from stratbench.workload.data import prepared
from stratbench.workload.data.datasets import make_dataset_metadata
from stratbench.workload.data.prepare import prepare_data_set

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]

NETWORK = """
import torch
from torch import nn
from torch.nn import functional as F


class Layer(nn.Module):
    def __init__(self, width, heads, by_number):
        super().__init__()
        self.each = (heads, -1) if by_number else (-1, width // heads)
        self.norm, self.norm_2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.q, self.k, self.v, self.out = (nn.Linear(width, width) for _ in range(4))
        self.up, self.down = nn.Linear(width, 2 * width), nn.Linear(2 * width, width)

    def forward(self, x):
        y = self.norm(x)
        q, k, v = (f(y).unflatten(-1, self.each).transpose(1, 2) for f in (self.q, self.k, self.v))
        mixed = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.out(mixed.transpose(1, 2).flatten(2))
        return x + self.down(self.up(self.norm_2(x)).relu())


class Texts(nn.Module):
    def __init__(self, vocab_size, width=16, heads=4, depth=3, by_number=False):
        super().__init__()
        self.embed = nn.Embedding(vocab_size, width)
        self.layers = nn.Sequential(*(Layer(width, heads, by_number) for _ in range(depth)))
        self.last = nn.LayerNorm(width)
        self.head = nn.Linear(width, vocab_size)

    def forward(self, tokens):
        return self.head(self.last(self.layers(self.embed(tokens))))


class Encoder(nn.Module):
    def __init__(self, vocab_size, width=16, heads=4, depth=2):
        super().__init__()
        self.embed = nn.Embedding(vocab_size, width)
        self.layers = nn.ModuleList(
            nn.TransformerEncoderLayer(width, heads, 32, dropout=0.0, batch_first=True) for _ in range(depth)
        )
        self.head = nn.Linear(width, vocab_size)

    def forward(self, tokens):
        x = self.embed(tokens)
        mask = nn.Transformer.generate_square_subsequent_mask(tokens.shape[1], dtype=x.dtype)
        for layer in self.layers:
            x = layer(x, mask.to(x.device), is_causal=True)
        return self.head(x)


class Turned(nn.Module):
    def __init__(self, width, heads):
        super().__init__()
        self.each = (-1, width // heads)
        self.q, self.k, self.v, self.out = (nn.Linear(width, width) for _ in range(4))

    def forward(self, x, factor, offset=None):
        q, k, v = (f(x).unflatten(-1, self.each).transpose(1, 2) for f in (self.q, self.k, self.v))
        mixed = F.scaled_dot_product_attention(q * factor, k * factor + offset, v, is_causal=True)
        return self.out(mixed.transpose(1, 2).flatten(2))


class Rotary(nn.Module):
    def __init__(self, vocab_size, width=16, heads=4, by_name=False):
        super().__init__()
        self.by_name = by_name
        self.embed = nn.Embedding(vocab_size, width)
        self.layers = nn.ModuleList(Turned(width, heads) for _ in range(2))
        self.head = nn.Linear(width, vocab_size)

    def forward(self, tokens):
        x = self.embed(tokens)
        factor = torch.linspace(0.5, 1, tokens.shape[1]).to(x)[:, None]
        for layer in self.layers:
            named = layer(x=x, factor=factor, offset=factor) if self.by_name else layer(x, factor, factor)
            x = x + named
        return self.head(x)


def begun(model, tokens):
    return model.embed(tokens)


PIECES = ((begun, ("embed",)), "layers.*", "last", "head")
"""
CALL = "own_texts.Texts"
PLAN = {
    "embed": "embedding", "layers.*.q": "colwise", "layers.*.k": "colwise", "layers.*.v": "colwise",
    "layers.*.out": "rowwise", "layers.*.up": "colwise", "layers.*.down": "rowwise", "head": "scores",
}  # fmt: skip
CHAIN = ["embed", "layers.*", "last", "head"]
STATED = {"tensor_plan": PLAN, "num_heads": 4, "pipeline_modules": CHAIN}


@pytest.fixture(scope="module")
def code(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """A folder with the user's network, from which jobs and this process import it."""
    folder = tmp_path_factory.mktemp("code")
    (folder / "own_texts.py").write_text(NETWORK)
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv(users_code.CODE_VARIABLE, str(folder))
        patch.setattr(sys, "path", [*sys.path])
        yield folder
    sys.modules.pop("own_texts", None)


@pytest.fixture(scope="module")
def texts(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("texts") / "text"
    spec = {"source": "markov-text", "train_samples": 128, "test_samples": 24, "vocabulary": 8,
            "sequence": 16}  # fmt: skip
    prepare_data_set("text", folder, spec=spec)
    return folder


@pytest.fixture
def cell(code: Path, texts: Path) -> Callable[..., Settings]:
    """A function that makes a cell's settings; `stated` replaces what the network states of itself."""

    def make(strategy: str, gpus: int, stated: dict[str, Any] | None = None, **options: Any):
        spec = {"call": CALL, "kwargs": {}, "wrap_classes": ["Layer"]} | STATED | (stated or {})
        options = get_option_defaults(strategy) | options
        replicas = get_mesh(strategy, options, gpus).replicas
        return settings(
            strategy, options=options, model="texts", dataset="text", gpus=gpus, epochs=1,
            global_batch=16, per_worker_batch=16 // replicas, lr=0.1, momentum=0.0, precision="fp64",
            own_model=spec | users_code.compute_code_fingerprint(CALL, [code]),
            data_spec=prepared.read_unverified_metadata(texts)["spec"],
        )  # fmt: skip

    return make


@pytest.fixture
def trained(
    start_cell: Callable[..., LaunchedCell], texts: Path, code: Path, warm: dict[str, str]
) -> Callable[[Settings], record.Record]:
    def train(s: Settings) -> record.Record:
        launched = start_cell(s, data_dir=texts, env=warm | {users_code.CODE_VARIABLE: str(code)})
        exit_code, output = launched.finish()
        assert exit_code == 0, output
        return record.read_record(launched.record)

    return train


def losses(found: record.Record) -> list[float]:
    assert found["status"] == "ok", found["reason"]
    return [point["train_loss"] for point in found["score"]["per_epoch"]]


#: The stream between layers by positions, too.
ALONG = PLAN | {
    "layers.0": "first", "layers.*.norm": "norm", "layers.*.norm_2": "norm", "last": "norm",
}  # fmt: skip


def test_divided_as_its_user_states_it_trains_as_one_process_does(cell, trained):
    """By data in the config, and by what names them in the user's code."""
    expected = losses(trained(cell("single", 1)))
    along = {"sequence_parallel": True, "tensor_parallel_size": 2}
    whole_layers = cell("pipeline", 2, microbatches=4)
    by_positions = cell("tensor", 4, {"tensor_plan": ALONG}, **along)
    made = {}
    for s in (
        cell("tensor", 2),
        whole_layers,
        cell("pipeline", 2, {"pipeline_modules": "own_texts:PIECES"}, microbatches=4),
        by_positions,
    ):
        made[s] = trained(s)
        assert losses(made[s]) == pytest.approx(expected, abs=1e-12)
    planned = footprint.make_footprint(planned_as(whole_layers))
    assert planned.model_states_bytes["parameters_bytes"] > 0
    planned, found = footprint.make_footprint(planned_as(by_positions)), made[by_positions]
    assert planned.model_states_bytes == found["memory"]["model_states"]
    sent_bytes = compute_wire_bytes(planned.collectives, 4, False, by_positions.per_worker_batch)
    assert found["communication"]["sent_bytes_per_step"] == pytest.approx(sent_bytes)


TORCHS = {
    "call": "own_texts.Encoder", "wrap_classes": ["TransformerEncoderLayer"],
    "tensor_plan": {
        "layers.*.self_attn": "heads", "layers.*.linear1": "colwise", "layers.*.linear2": "rowwise",
    },
}  # fmt: skip


def test_torchs_own_layers_are_divided_by_heads(cell, trained):
    expected = losses(trained(cell("single", 1, TORCHS)))
    found = trained(cell("tensor", 2, TORCHS))
    assert losses(found) == pytest.approx(expected, abs=1e-10)


ROTARY = {
    "call": "own_texts.Rotary", "wrap_classes": ["Turned"],
    "tensor_plan": {
        "layers.*": "input", "layers.*.out": "rowwise",
        **{f"layers.*.{name}": "colwise of input" for name in "qkv"},
    },
}  # fmt: skip


def test_what_is_called_with_more_than_its_input_is_divided(cell, trained):
    """As every attention with rotary tables is, by position or by name."""
    expected = losses(trained(cell("single", 1, ROTARY)))
    for kwargs in ({}, {"by_name": True}):
        stated = ROTARY | {"kwargs": kwargs}
        assert losses(trained(cell("tensor", 2, stated))) == pytest.approx(expected, abs=1e-10)


WRONG = {
    "rows that are columns": ("tensor", {"tensor_plan": PLAN | {"layers.*.down": "colwise"}},
                              "tensor cannot train it: its step raised"),
    "an order that is not forward's": ("pipeline", {"pipeline_modules": ["embed", "layers.*", "head",
    "last"]},
                                       "pipeline cannot train it: its step raised"),
    "a norm left out": ("pipeline", {"pipeline_modules": ["embed", "layers.*", "head"]},
                        "its pieces do not use last.weight, last.bias"),
    "a piece that is not there": ("pipeline", {"pipeline_modules": ["embed", "layer.*", "last", "head"]},
                                  "its pipeline_modules name 'layer.*', but the model has no module"),
    "a word that is none": ("tensor", {"tensor_plan": PLAN | {"head": "last"}},
                            "its tensor_plan has the word 'last' for 'head'; use one of embedding"),
    "a path that is none": ("tensor", {"tensor_plan": PLAN | {"layers.*.gate": "colwise"}},
                            "its tensor_plan names 'layers.*.gate', but the model has no module"),
    "no begin of the stream": ("tensor", {"tensor_plan": PLAN, "sequence_parallel": True},
                               "it has no first; name them, or set sequence_parallel to false"),
    "heads of what has none": ("tensor", {"tensor_plan": PLAN | {"layers.*": "heads"}},
                               "has 'heads' for 'layers.0', which is not an nn.MultiheadAttention"),
}  # fmt: skip


@pytest.mark.parametrize(("strategy", "stated", "said"), WRONG.values(), ids=WRONG)
def test_what_is_stated_wrongly_is_refused_before_any_job(cell, strategy, stated, said):
    options = {key: stated[key] for key in stated if key == "sequence_parallel"}
    s = cell(strategy, 2, stated, **options)
    request = Request.from_settings(s, make_dataset_metadata("text", s.data_spec), False, 2)
    assert (
        said in check.dry_run_strategy(request, check.check_neural_network(request)).refusal_reason
    )


def planned_as(s: Settings) -> Request:
    return Request.from_settings(s, make_dataset_metadata("text", s.data_spec), False, s.gpus)


@pytest.mark.parametrize("left_out", ["layers.*.norm_2", "last"])
def test_what_would_learn_from_a_part_of_the_positions_is_refused(cell, trained, left_out):
    stated = {"tensor_plan": {path: word for path, word in ALONG.items() if path != left_out}}
    found = trained(cell("tensor", 2, stated, sequence_parallel=True))
    assert found["status"] == "unsupported"
    name = left_out.replace("*", "0")
    assert f"would train the parameters {name}.weight, {name}.bias" in found["reason"]
    assert "give the modules with these parameters the value `norm`" in found["reason"]


#: What no shape betrays: a norm in another place, and heads that become narrower instead of fewer.
SILENT = {
    "pipeline": {"pipeline_modules": ["embed", "last", "layers.*", "head"]},
    "tensor": {"kwargs": {"by_number": True}},
}


@pytest.mark.parametrize(("strategy", "stated"), SILENT.items(), ids=SILENT)
def test_a_job_that_would_train_something_else_is_refused(cell, trained, strategy, stated):
    found = trained(cell(strategy, 2, stated))
    assert found["status"] == "unsupported"
    assert "gives other scores than the whole model" in found["reason"]


def test_every_word_of_a_plan_is_a_way_to_divide():
    from torch import nn

    model = nn.ModuleDict({word: nn.Linear(2, 2) for word in tensor.WORDS})
    for sequence in (False, True):
        made = tensor.make_parallel_styles(model, {word: word for word in tensor.WORDS}, sequence)
        assert set(made) >= set(tensor.WORDS) - {"first", "norm"}
    assert set(made) == set(tensor.WORDS)
