"""What both trainers train: the cell's network, its initial weights, its samples in their order, its test."""

from __future__ import annotations

import argparse
from collections.abc import Iterator

import torch
from torch import Tensor, nn

from stratbench.workload import tasks
from stratbench.workload.data.device_data import DeviceData, epoch_order, eval_batch
from stratbench.workload.network import models

#: Passes of forward and backward before the first step, which change nothing.
WARM_UP = 3


def parse_arguments() -> argparse.Namespace:
    """What the study's command says of the cell."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--model", required=True)
    parser.add_argument("--data", required=True)
    parser.add_argument("--seed", type=int, required=True)
    parser.add_argument("--epochs", type=int, required=True)
    parser.add_argument("--batch", type=int, required=True, help="of all workers together")
    parser.add_argument("--lr", type=float, required=True)
    parser.add_argument("--momentum", type=float, required=True)
    return parser.parse_args()


class Work:
    """The work of a cell on `device`, divided among `workers` of which this one is `rank`."""

    def __init__(
        self, args: argparse.Namespace, device: torch.device, rank: int, workers: int
    ) -> None:
        stored = DeviceData.load(args.data)
        shape = models.input_shape(args.model, tuple(stored.meta["shape"]))
        self.data = DeviceData.load(args.data, device, shape)
        self.task = tasks.TASKS[tasks.natural_task(self.data.meta["shape"])]()
        classes = self.data.meta["classes"]
        self.model = models.for_training(
            args.model, classes, shape, args.seed, device, torch.float32
        )
        self.parameters = sum(p.numel() for p in self.model.parameters())
        self._args, self._rank, self._workers = args, rank, workers

    def batches(self, epoch: int) -> Iterator[tuple[Tensor, Tensor]]:
        """This worker's part of each global batch of an epoch; what is left at its end is dropped."""
        order = epoch_order(self.data.train_samples, self._args.seed, epoch)
        for batch in order.split(self._args.batch):
            if len(batch) == self._args.batch:
                mine = batch.view(self._workers, -1)[self._rank]
                yield self.data.batch(mine.to(self.data.index_device))

    def warm_up(self, model: nn.Module) -> None:
        """Compute a few gradients, and drop them."""
        x, y = next(self.batches(0))
        for _ in range(WARM_UP):
            self.task.loss(model(x), y).backward()
        model.zero_grad(set_to_none=True)

    def evaluate(self) -> tuple[float, float, float]:
        """Score, mean loss and the score's error on the whole test set, by the network of this worker."""
        size, total = eval_batch(self.data.meta["shape"]), self.data.test_samples
        self.model.eval()
        with torch.no_grad():
            parts = (self.data.test_batch(i, i + size) for i in range(0, total, size))
            each = [tasks.sums_of_batch(self.task, self.model(x), y) for x, y in parts]
        self.model.train()
        found = tasks.evaluated(torch.stack(each).sum(0).tolist())
        return found.score, found.loss, found.error
