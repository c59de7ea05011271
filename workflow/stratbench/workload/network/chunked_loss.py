"""The loss of a text in chunks of positions (`loss_chunks`), so that never all scores exist at once.

The call of the last layer computes the loss in place of scores. A strategy's hooks around that call
(gathering weights, casting) stay the same. Importing this file imports torch.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager

import torch
from torch import Tensor, nn

from stratbench.workload.generators import generators_put_back
from stratbench.workload.network.changes import Changes
from stratbench.workload.network.checkpointing import recompute
from stratbench.workload.users_code import Refused

#: Why the loss of a network cannot be computed in parts.
NO_HEAD = (
    "loss_chunks has the network's last layer compute the loss, and its scores are not what an nn.Linear "
    "returned, unchanged; return them so, or set loss_chunks to 1"
)


class ChunkedLoss:
    """Makes a model return its mean loss in place of scores.

    Args:
        model: The model, not wrapped yet; the forward of its last layer is replaced.
        tokens: Example tokens that the model takes, [samples, positions].
        chunks: Number of chunks of positions.
        loss: The mean loss of scores [samples, positions, vocabulary] against targets.

    Raises:
        Refused: No layer returns the scores.
    """

    def __init__(
        self,
        model: nn.Module,
        tokens: Tensor,
        chunks: int,
        loss: Callable[[Tensor, Tensor], Tensor],
    ) -> None:
        head = find_head(model, tokens)
        self._chunks, self._loss, self._scores = chunks, loss, head.forward
        self._targets: Tensor | None = None
        head.forward = self._forward

    @contextmanager
    def against(self, targets: Tensor) -> Iterator[None]:
        """Make the model return its mean loss against `targets` until the block ends."""
        self._targets = targets
        try:
            yield
        finally:
            self._targets = None

    def _forward(self, h: Tensor) -> Tensor:
        if self._targets is None:
            return self._scores(h)
        targets = self._targets
        parts = zip(h.chunk(self._chunks, 1), targets.chunk(self._chunks, 1), strict=True)
        return sum(recompute(self._sum, part, own) for part, own in parts) / targets.numel()

    def _sum(self, h: Tensor, targets: Tensor) -> Tensor:
        scores = self._scores(h)
        # In 16 bits the loss would be rounded.
        scores = scores.float() if scores.element_size() == 2 else scores
        return self._loss(scores, targets) * targets.numel()


def find_head(model: nn.Module, tokens: Tensor) -> nn.Linear:
    """Return the layer whose output is the model's. Refused where there is none."""
    outputs: list[tuple[nn.Linear, Tensor]] = []
    hooks = [
        module.register_forward_hook(lambda layer, _, out: outputs.append((layer, out)))
        for module in model.modules()
        if isinstance(module, nn.Linear)
    ]
    with generators_put_back(tokens.device), Changes(model) as changes:
        try:
            with torch.no_grad():
                scores = model.eval()(tokens)
        finally:
            model.train()
            changes.put_back()
            for hook in hooks:
                hook.remove()
    head = next((layer for layer, out in outputs if out is scores), None)
    if head is None:
        raise Refused(NO_HEAD)
    return head
