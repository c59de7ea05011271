"""gpt-compact on Tiny Shakespeare as nanoGPT samples: random windows, 2000 steps, one process.

    PYTHONPATH=workflow python benchmarks/random_windows.py --text tinyshakespeare/input.txt

What it says beside results/nanogpt: how much of the distance to nanoGPT's figure is the sampling and the
number of steps. The whole test text is evaluated in pieces as in a cell, and, as nanoGPT does it, also by
20 batches of random windows.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from stratbench.cell.learning_rate import share_of_lr
from stratbench.workload.data import sources
from stratbench.workload.network import gpt
from stratbench.workload.tasks import NextToken

STEPS, BATCH, LENGTH, LR, FINAL_LR = 2000, 12, 64, 1e-3, 1e-4


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--text", type=Path, required=True)
    parser.add_argument(
        "--decay-matrices",
        action="store_true",
        help="no weight decay of biases and norms, as nanoGPT",
    )
    parser.add_argument("--seeds", type=int, nargs="+", default=[0])
    args = parser.parse_args()
    _, tokens = np.unique(np.frombuffer(args.text.read_bytes(), np.uint8), return_inverse=True)
    train, test = torch.from_numpy(tokens.astype(np.int64)).split(list(sources.SHAKESPEARE_TOKENS))
    for seed in args.seeds:
        print(json.dumps({"seed": seed} | run(train, test, seed, args.decay_matrices)), flush=True)


def run(train: Tensor, test: Tensor, seed: int, decay_matrices: bool) -> dict[str, float]:
    """Train once; returns the test losses in nats a token."""
    torch.manual_seed(seed)
    model = gpt.compact(sources.SHAKESPEARE_VOCABULARY, (LENGTH,))
    matrices = [p for p in model.parameters() if p.dim() > 1]
    others = [p for p in model.parameters() if p.dim() < 2]
    adamw = torch.optim.AdamW(
        [
            {"params": matrices, "weight_decay": 0.1},
            {"params": others, "weight_decay": 0.0 if decay_matrices else 0.1},
        ],
        lr=LR,
        betas=(0.9, 0.99),
        fused=True,
    )
    for step in range(STEPS):
        for group in adamw.param_groups:
            group["lr"] = LR * share_of_lr("cosine", step, STEPS, 100, FINAL_LR / LR)
        x, y = windows(train)
        NextToken().loss(model(x), y).backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        adamw.step()
        adamw.zero_grad()
    model.eval()
    with torch.no_grad():
        pieces = (len(test) - 1) // LENGTH
        x, y = (test[i : i + pieces * LENGTH].view(pieces, LENGTH) for i in (0, 1))
        sums = [
            NextToken().loss(model(a), b).double() * len(a)
            for a, b in zip(x.split(256), y.split(256), strict=True)
        ]
        sampled = [NextToken().loss(model(a), b) for a, b in (windows(test) for _ in range(20))]
    return {
        "whole_test_loss": float(sum(sums)) / pieces,
        "sampled_test_loss": float(torch.stack(sampled).mean()),
    }


def windows(text: Tensor) -> tuple[Tensor, Tensor]:
    """A batch of random pieces, shape [BATCH, LENGTH], and the tokens that come next."""
    starts = torch.randint(len(text) - LENGTH, (BATCH, 1)) + torch.arange(LENGTH)
    return text[starts], text[starts + 1]


if __name__ == "__main__":
    main()
