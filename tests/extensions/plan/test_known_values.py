"""What fake tensors answer for their values: those of masks, which follow from no data."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch
from torch import nn
from torch._subclasses.fake_tensor import DataDependentOutputException

from stratbench.extensions.plan import check
from stratbench.extensions.plan.footprint import cache
from stratbench.extensions.plan.pages.check_text import format_check_result
from stratbench.study.config.config import load_config
from stratbench.workload import users_code
from stratbench.workload.known_values import KnownValueFakeMode

pytestmark = pytest.mark.timeout(300)

NETWORKS = """
import torch
from torch import nn


class Texts(nn.Module):
    def __init__(self, vocab_size, block_size):
        super().__init__()
        self.embed = nn.Embedding(vocab_size, 32)
        layer = nn.TransformerEncoderLayer(32, 4, 64, batch_first=True)
        self.encoder = nn.TransformerEncoder(layer, 1)
        self.head = nn.Linear(32, vocab_size)

    def mask(self, x):
        return nn.Transformer.generate_square_subsequent_mask(x.shape[1], device=x.device)

    def encode(self, x):
        return self.encoder(x, mask=self.mask(x))

    def forward(self, x):
        return self.head(self.encode(self.embed(x)))


class Causal(Texts):
    def encode(self, x):
        return self.encoder(x, mask=self.mask(x), is_causal=True)


class Masked(Texts):
    def mask(self, x):
        return super().mask(x).tril(-1).triu(-1)


class Uncausal(Masked):
    def encode(self, x):
        return self.encoder(x, mask=self.mask(x), is_causal=False)


class Both(Texts):
    def __init__(self, vocab_size, block_size):
        super().__init__(vocab_size, block_size)
        self.encoder = nn.Transformer(32, 4, 1, 1, 64, batch_first=True)

    def encode(self, x):
        return self.encoder(x, x, tgt_mask=self.mask(x))


class Reads(Texts):
    def forward(self, x):
        return super().forward(x) * (1 if x.max().item() < 1000 else 2)


class Keeps(Texts):
    def forward(self, x):
        kept = getattr(self, "kept", None)
        self.kept = super().forward(x)
        return self.kept if kept is None else self.kept + kept.mean().detach()


class Encodes(nn.Module):
    def __init__(self, encoder):
        super().__init__()
        self.encoder = encoder

    def forward(self, x):
        return self.encoder(x, mask=nn.Transformer.generate_square_subsequent_mask(x.shape[1]))


class Chained(nn.Module):
    def __init__(self, vocab_size, block_size):
        super().__init__()
        self.embed = nn.Embedding(vocab_size, 32)
        layer = nn.TransformerEncoderLayer(32, 4, 64, batch_first=True)
        self.layers = nn.Sequential(*(Encodes(nn.TransformerEncoder(layer, 1)) for _ in range(2)))
        self.head = nn.Linear(32, vocab_size)

    def forward(self, x):
        return self.head(self.layers(self.embed(x)))
"""
#: Two strategies, of which one divides networks.
STRATEGIES = ["ddp", "fsdp"]


@pytest.fixture(autouse=True)
def code(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A folder with the networks; the check's work is done in this process."""
    (tmp_path / "masked_texts.py").write_text(NETWORKS)
    monkeypatch.setenv(users_code.CODE_VARIABLE, str(tmp_path))
    monkeypatch.setattr(sys, "path", [*sys.path])
    monkeypatch.setattr(cache, "make_process_pool", lambda *_: ThreadPoolExecutor(1))
    yield tmp_path
    sys.modules.pop("masked_texts", None)


def checked_of(
    code: Path, names: list[str], strategies: list[str], gpus: int = 2, **stated
) -> check.StudyCheck:
    """The check of a study of the networks on texts, in bf16 on GPUs."""
    experiment = {
        "dataset": "texts", "models": names, "strategies": strategies, "gpus": [gpus], "epochs": 1,
        "global_batch": 16, "lr": 0.02, "optimizer": "adamw", "precision": "bf16", "device": "cuda",
    }  # fmt: skip
    texts = {"source": "markov-text", "train_samples": 64, "test_samples": 16, "vocabulary": 11,
             "sequence": 16}  # fmt: skip
    raw = {
        "study": "s", "code": [str(code)], "datasets": {"texts": texts},
        "models": {name: {"call": f"masked_texts.{name}"} | stated for name in names},
        "studies": {"s": {"experiments": {"e": experiment}}},
    }  # fmt: skip
    config, study = load_config(raw)
    return check.check_study(config | {"results": str(code)}, study)


@pytest.mark.slow
@pytest.mark.parametrize(
    # Whether a network is tried with real numbers first is the same for each strategy.
    ("most", "strategy"),
    list(zip((50_000_000, 100), STRATEGIES, strict=True)),
)
def test_a_transformer_that_asks_whether_its_mask_is_causal_is_planned(
    code, monkeypatch, most, strategy
):
    monkeypatch.setattr(check, "MAX_REAL_PARAMETERS", most)
    checked = checked_of(code, ["Texts", "Causal", "Masked", "Uncausal", "Both"], [strategy])
    assert not checked.refusal_reasons_by_cell
    found = {
        s.cell.model: checked.dry_runs_by_request[s.request].footprint.peak_moments
        for s in checked.cells_to_plan
    }
    # What it is answered is what the network would have said of its mask.
    assert found["Texts"] == found["Causal"]
    assert found["Masked"] == found["Uncausal"]


@pytest.mark.slow
def test_stages_with_masks_are_measured(code):
    checked = checked_of(
        code,
        ["Chained"],
        ["pipeline"],
        pipeline_modules=["embed", "layers.*", "head"],
        wrap_classes=["Encodes"],
    )
    assert not checked.refusal_reasons_by_cell
    (found,) = checked.dry_runs_by_request.values()
    assert found.footprint is not None, found


@pytest.mark.parametrize(("most", "said"), [(50_000_000, 0), (100, 1)])
def test_who_reads_its_data_is_told_once_that_it_is_not_predicted(code, monkeypatch, most, said):
    followed = []
    monkeypatch.setattr(check, "MAX_REAL_PARAMETERS", most)
    monkeypatch.setattr(
        check, "make_footprint_from_few_parts", lambda *asked: followed.append(asked)
    )
    checked = checked_of(code, ["Reads"], STRATEGIES)
    assert not followed
    assert not checked.refusal_reasons_by_cell
    assert len({r.unpredicted_reason for r in checked.dry_runs_by_request.values()}) == 1
    assert format_check_result(checked).count("reads values of tensors") == said


@pytest.mark.slow
def test_a_network_that_keeps_a_tensor_is_not_predicted_and_told_in_one_sentence(code):
    checked = checked_of(code, ["Keeps"], ["single"], gpus=1)
    assert not checked.refusal_reasons_by_cell
    (found,) = checked.dry_runs_by_request.values()
    assert found.unpredicted_reason.startswith(
        "model 'Keeps' (masked_texts.Keeps): two training steps differ"
    )
    assert len(found.unpredicted_reason) < 250


def test_values_that_follow_from_no_data_are_known():
    with KnownValueFakeMode():
        mask = torch.full((4, 4), float("-inf")).triu(1)
        assert bool((mask == torch.full((4, 4), float("-inf")).triu(diagonal=1)).all())
        assert torch.ones_like(torch.empty(2, 3)).sum().item() == 6
        counted = torch.zeros(3)
        counted += torch.arange(3)
        assert counted.max().item() == 2
        counted.fill_(7)
        assert counted.min().item() == 7
        kept = counted.clone()
        counted.add_(1)
        assert (kept.sum().item(), counted.sum().item()) == (21, 24)
        assert bool(torch.ones(3, device="meta").all())
        places = mask.isinf().nonzero()
        assert list(places.shape) == [6, 2]
        assert places.max().item() == 3
        assert torch.vmap(lambda row: row.sum())(mask.isinf()).max().item() == 3


@pytest.mark.parametrize(
    "make",
    [
        lambda: torch.empty(3),
        lambda: torch.empty(3, device="meta"),
        lambda: torch.rand(3),
        lambda: torch.zeros(3).bernoulli_(),
        lambda: nn.Parameter(torch.zeros(3)),
        lambda: nn.Parameter(torch.zeros(3)).detach(),
        lambda: torch.zeros(3) + torch.empty(3),
        lambda: torch.zeros(3).add_(torch.empty(3)),
        lambda: written_by_its_view(torch.zeros(3)),
        lambda: torch.zeros(1 << 27, dtype=torch.bool),
    ],
)
def test_what_comes_of_data_weights_or_chance_has_no_values(make):
    with KnownValueFakeMode():
        largest = make().max()
        with pytest.raises(DataDependentOutputException):
            largest.item()


def written_by_its_view(tensor: torch.Tensor) -> torch.Tensor:
    tensor[1:].copy_(torch.empty(2))
    return tensor
