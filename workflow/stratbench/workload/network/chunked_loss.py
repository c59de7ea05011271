"""Computes the loss of a text in chunks of positions, to save memory (setting `loss_chunks`).

The last layer's call computes the loss instead of scores. A strategy's hooks on that call, which gather or
cast weights, stay the same.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager

import torch
from torch import Tensor, nn

from stratbench.workload.generators import preserve_random_generators
from stratbench.workload.network.changes import Changes
from stratbench.workload.network.checkpointing import call_with_recomputation
from stratbench.workload.users_code import Refused

#: Reason why a model's loss cannot be computed in chunks.
NO_HEAD = (
    "loss_chunks needs a model that returns the output of an nn.Linear unchanged, and this one does not; "
    "return it unchanged, or set loss_chunks to 1"
)


class ChunkedLoss:
    """Makes a model return its mean loss, computed in chunks of positions, instead of scores.

    Args:
        model: The model before it is wrapped; the forward of its last layer is replaced.
        tokens: Example tokens that the model takes, [samples, positions].
        chunks: Number of chunks of positions.
        loss: Computes the mean loss of scores [samples, positions, vocabulary] for targets.

    Raises:
        Refused: If no linear layer returns the model's scores.
    """

    def __init__(
        self,
        model: nn.Module,
        tokens: Tensor,
        chunks: int,
        loss: Callable[[Tensor, Tensor], Tensor],
    ) -> None:
        head = find_output_layer(model, tokens)
        self._chunks, self._loss, self._scores = chunks, loss, head.forward
        self._targets: Tensor | None = None
        head.forward = self._compute_loss_in_chunks

    @contextmanager
    def replace_scores_by_loss(self, targets: Tensor) -> Iterator[None]:
        """Make the model return its mean loss for the given targets until the block ends."""
        self._targets = targets
        try:
            yield
        finally:
            self._targets = None

    def _compute_loss_in_chunks(self, hidden: Tensor) -> Tensor:
        if self._targets is None:
            return self._scores(hidden)
        targets = self._targets
        parts = zip(hidden.chunk(self._chunks, 1), targets.chunk(self._chunks, 1), strict=True)
        return (
            sum(
                call_with_recomputation(self._compute_loss_sum_of_chunk, part, own)
                for part, own in parts
            )
            / targets.numel()
        )

    def _compute_loss_sum_of_chunk(self, hidden: Tensor, targets: Tensor) -> Tensor:
        scores = self._scores(hidden)
        # Convert 16-bit scores, to compute the loss in float32.
        scores = scores.float() if scores.element_size() == 2 else scores
        return self._loss(scores, targets) * targets.numel()


def find_output_layer(model: nn.Module, tokens: Tensor) -> nn.Linear:
    """Return the linear layer whose output is the model's output. Raise Refused without one."""
    outputs: list[tuple[nn.Linear, Tensor]] = []
    hooks = [
        module.register_forward_hook(lambda layer, _, out: outputs.append((layer, out)))
        for module in model.modules()
        if isinstance(module, nn.Linear)
    ]
    with preserve_random_generators(tokens.device), Changes(model) as changes:
        try:
            with torch.no_grad():
                scores = model.eval()(tokens)
        finally:
            model.train()
            changes.restore_model()
            for hook in hooks:
                hook.remove()
    head = next((layer for layer, out in outputs if out is scores), None)
    if head is None:
        raise Refused(NO_HEAD)
    return head
