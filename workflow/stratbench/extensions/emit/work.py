"""Provides a cell's model, loss and batches to the script that `--to pytorch` emits."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import islice
from pathlib import Path

import torch
from torch import Tensor

from stratbench.cell import record
from stratbench.cell.settings import Settings
from stratbench.workload import tasks
from stratbench.workload.data.device_data import DeviceData
from stratbench.workload.generators import seed_random_generators
from stratbench.workload.network import models
from stratbench.workload.network.precision import get_batch_memory_format, get_weights_dtype


class Work:
    """The cell's model with its initial weights, and one worker's batches in the cell's order.

    Attributes:
        model: The model on the device, in training mode.
    """

    def __init__(self, path: str, data: str, rank: int, device: torch.device) -> None:
        """Load the model and the data of a cell.

        Args:
            path: Path of the cell's record.
            data: Folder of the cell's prepared data set.
            rank: Rank of this worker.
            device: Device of this worker.
        """
        self.settings = s = Settings.from_recorded_values(record.read_record(path)["settings"])
        self.rank, network, dtype = (
            rank,
            models.get_model_or_name(s),
            get_weights_dtype(s.precision),
        )
        shape = models.compute_input_shape(
            network, tuple(DeviceData.load_prepared_data_set(Path(data)).meta["shape"])
        )
        self.data = DeviceData.load_prepared_data_set(
            data,
            device,
            shape,
            dtype,
            get_batch_memory_format(s.precision, device.type),
            s.data_placement,
        )
        meta = self.data.meta
        self.task = tasks.get_task(s, shape, meta.get("values", False))
        self.model = models.build_model_for_training(
            network, meta["classes"], shape, s.seed, device, dtype
        )
        seed_random_generators(s.seed + 1 + rank)

    def loss(self, outputs: Tensor, targets: Tensor) -> Tensor:
        """Return the mean loss of a batch, or of a part of it."""
        loss, weight = tasks.compute_loss_and_weight(self.task, outputs, targets)
        return loss if weight is None else loss / weight

    def batches(self, epoch: int) -> Iterator[tuple[Tensor, Tensor]]:
        """Yield this worker's batches of an epoch, up to the last training step."""
        s, data = self.settings, self.data
        order, augmentation = data.draw_order_and_augmentation(s.seed, epoch, s.augment).to_device(
            data.index_device
        )
        steps = len(order) // s.global_batch
        mine = order[: steps * s.global_batch].view(steps, -1, s.per_worker_batch)[:, self.rank]
        for indices in islice(mine, s.count_steps(data.train_samples) - epoch * steps):
            yield data.make_training_batch(indices, augmentation)
