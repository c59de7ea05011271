"""Which worker trains on which samples: all draw from one training set, or each has a part of its own."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING

from stratbench.workload.data.device_data import EpochTables, generator_of
from stratbench.workload.tasks import NO_CLASSES
from stratbench.workload.users_code import ModelError

if TYPE_CHECKING:
    import torch


class ByClass:
    """Each worker's own part of the training set: sorted by label, and cut into equal parts.

    Samples of one label are put in a random order first, drawn from `seed`: which of them a cut divides is
    left to chance. What does not divide evenly is nobody's. So a worker knows few of the classes. After
    McMahan et al., "Communication-Efficient Learning of Deep Networks from Decentralized Data", 2017,
    where each has two pieces of such a cut.
    """

    def __init__(self, labels: torch.Tensor, workers: int, seed: int) -> None:
        """`labels`: of the training set, whole numbers, shape [samples]; ModelError for values."""
        import torch

        if labels.is_floating_point():
            raise ModelError(f"partition = 'by-class': {NO_CLASSES}")
        shuffled = torch.randperm(len(labels), generator=generator_of("partition", seed, 0))
        by_label = shuffled[labels.cpu()[shuffled].argsort(stable=True)]
        size = len(labels) // workers
        self.workers = workers
        #: The worker that has each sample, shape [samples]; as many as workers: nobody.
        self.owner = torch.full((len(labels),), workers)
        self.owner[by_label[: workers * size]] = torch.arange(workers).repeat_interleave(size)
        classes, self._class_of = labels.cpu().unique(return_inverse=True)
        #: How many samples of each class this worker has trained on, by ascending label.
        self.class_samples = [0] * len(classes)

    def arrange(self, order: torch.Tensor, global_batch: int) -> torch.Tensor:
        """An epoch's order of the samples, so that a worker's place in each batch holds its own samples.

        Of shape [steps x global_batch], if `order` is of [samples]. Each worker's samples come in the
        order that they have there.
        """
        import torch

        steps, share = len(order) // global_batch, global_batch // self.workers
        owner = self.owner[order]
        own = [order[owner == worker][: steps * share] for worker in range(self.workers)]
        return torch.stack([o.view(steps, share) for o in own], 1).flatten()

    def count(self, batches: Iterable[torch.Tensor]) -> None:
        """Add batches that this worker has trained on, as the numbers of their samples."""
        import torch

        seen = self._class_of[torch.cat([batch.cpu() for batch in batches])]
        new = torch.bincount(seen, minlength=len(self.class_samples)).tolist()
        self.class_samples = [a + b for a, b in zip(self.class_samples, new, strict=True)]

    def applied_to(self, tables: EpochTables, global_batch: int) -> EpochTables:
        """The tables of an epoch, with its order arranged."""
        return tables._replace(order=self.arrange(tables.order, global_batch))
