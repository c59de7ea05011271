"""The policy `ps-preview`: AdamW without waiting, whose workers read predicted weights."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

from stratbench.cell.options import option
from stratbench.extensions.servers.policies.averaging import BucketOptions, KBatchPolicy
from stratbench.extensions.servers.policies.options import PolicyOptions
from stratbench.extensions.servers.policies.policy import Hyper, WeightsVersion

if TYPE_CHECKING:
    from torch import Tensor

#: Number of weights that are predicted at a time. This many elements fit into the cache of a core.
CHUNK = 65536


class PreviewPolicy(KBatchPolicy):
    """Policy of AdamW on the mean gradient of any N pushes. Workers read predicted weights.

    N pushes of any workers form a bucket, which makes one step of AdamW, as `ps-kbatch` with K = N (Dutta et
    al., AISTATS 2018). Let m and v be AdamW's moments after t buckets, and c `look_ahead`. S is the sum of
    the j gradients that the present bucket has so far. A worker then reads (1 - c lr decay) W - c lr u:

        G  = S / N + (1 - j / N) m / (1 - b1^t)    the bucket's mean, if the other gradients equal m's mean
        m' = b1 m + (1 - b1) G,  v' = b2 v + (1 - b2) G²
        u  = m' / (1 - b1^(t+1)) / (sqrt(v' / (1 - b2^(t+1))) + eps)

    A worker reads W itself if its gradient will still be part of this bucket. This is so for j = 0, or if too
    few workers are present to fill the bucket. With c = 1 the prediction is W at the end of the bucket. G is
    part of m' and of v', so that u is bounded as AdamW's step is (Kingma and Ba, ICLR 2015, section 2.1). One
    worker equals torch.optim.AdamW.

    Pipelines predict weights by Adam's own step from the present m and v (XPipe, Guan et al., arXiv
    1911.04610). The prediction from the server's unfinished bucket is new here. So is the default c = 2,
    which is chosen because some gradients arrive more than one bucket late.

    N does not change if workers are lost, since a bucket is one global batch of any workers.
    """

    summary: ClassVar[str] = "parameter server, AdamW in buckets, weights read ahead of them"
    rule: ClassVar[str] = (
        "W -= lr AdamW(mean of any N pushes, a bucket); who will miss the bucket reads W moved by c "
        "(look_ahead) times the step that it will make"
    )
    scratch = ("_chunk",)

    @dataclass(frozen=True)
    class Options(BucketOptions):
        refuses_sgd: ClassVar[str | None] = (
            "it looks ahead by AdamW's step, from moments that SGD does not have"
        )

        look_ahead: float = option(
            2.0,
            "how far ahead workers read, in steps that the unfinished bucket will make; 0: ps-kbatch",
            least=0.0,
        )

    def __init__(self, weights: Tensor, hyper: Hyper, options: PolicyOptions | None = None) -> None:
        import torch

        super().__init__(weights, hyper, options)
        self._present = set(range(hyper.workers))
        looks = self._sum is not None and self.options.look_ahead
        self._chunk = torch.zeros_like(weights[:CHUNK]) if looks else None

    def view(self, worker: int, out: Tensor) -> WeightsVersion:
        """Write the weights for a worker to `out`, shape [n], and return their version.

        A worker that will miss the unfinished bucket gets predicted weights.
        """
        # `others` is below N. So a worker reads the weights themselves if the bucket has no gradient yet.
        others = len(self._present - {worker})
        if self._chunk is None or self._count + others < self._k:
            return super().view(worker, out)
        self._write_predicted_weights(out)
        return self.version

    def _write_predicted_weights(self, out: Tensor) -> None:
        """Write predicted weights to `out`, shape [n].

        They are the weights after `look_ahead` times the step that the unfinished bucket would make.
        """
        import torch

        (beta1, beta2), h, n = self.hyper.betas, self.hyper, self._k
        moments, far = self._optimizer, self.lr * self.options.look_ahead
        t = moments.steps
        # The symbols u, G, m' and b1 are those of the class's docstring. To save operations, the tensor `u`
        # first has n times G, and then n / (1 - b1) times m'. The factor `step` corrects this.
        missing = (n - self._count) / (1 - beta1**t) if t else 0.0
        unbias = (1 - beta2 ** (t + 1)) ** 0.5
        step = far * unbias * (1 - beta1) / n / (1 - beta1 ** (t + 1))
        tensors = (self.weights, self._sum, moments.mean, moments.square, out)
        for start in range(0, len(out), CHUNK):
            w, total, mean, square, u = (tensor[start : start + CHUNK] for tensor in tensors)
            torch.add(total, mean, alpha=missing, out=u)
            root = torch.mul(square, beta2, out=self._chunk[: len(u)])
            root.addcmul_(u, u, value=(1 - beta2) / n**2).sqrt_().add_(h.eps * unbias)
            u.add_(mean, alpha=beta1 * n / (1 - beta1)).div_(root)
            u.mul_(-step).add_(w, alpha=1 - far * h.weight_decay)

    def on_leave(self, worker: int) -> None:
        self._present.discard(worker)

    def on_join(self, worker: int) -> None:
        self._present.add(worker)
