"""AdamW without waiting: N pushes make a step, and workers read predicted weights."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

from stratbench.cell.options import option
from stratbench.ps.policies.averaging import BucketOptions, KBatchPolicy
from stratbench.ps.policies.options import PolicyOptions
from stratbench.ps.policies.policy import Hyper

if TYPE_CHECKING:
    from torch import Tensor

#: Elements of a view that are made at a time: few enough that what is worked on stays in a core's cache, so
#: many that starting the operations costs little (measured: a tenth more than without chunks).
CHUNK = 65536


class PreviewPolicy(KBatchPolicy):
    """AdamW on the mean of any N pushes; reads look ahead by the unfinished bucket's effect.

    N pushes, whoever sent them, are a bucket, and make one step of AdamW: `ps-kbatch` with K = N (Dutta et
    al., AISTATS 2018). After t buckets, with AdamW's moments m and v and the sum S of the j gradients that
    the next one has so far, a worker reads (1 - c lr decay) W - c lr u, c being `look_ahead`:

        G  = S / N + (1 - j / N) m / (1 - b1^t)    the bucket's mean, if the rest is like the mean so far
        m' = b1 m + (1 - b1) G,  v' = b2 v + (1 - b2) G²
        u  = m' / (1 - b1^(t+1)) / (sqrt(v' / (1 - b2^(t+1))) + eps)

    and W itself where its gradient will still be in this bucket: j = 0, or too few workers are present to
    fill it. With c = 1 that is W at the bucket's end, if the gradients come as foreseen. G is in both m' and
    v', which bounds u as AdamW's step is bounded (Kingma and Ba, ICLR 2015, section 2.1). One worker is
    torch.optim.AdamW.

    Weights foreseen by Adam's own step are from pipelines: XPipe (Guan et al., arXiv 1911.04610) foresees
    them by m and v as they are. New here: the server predicts from its unfinished bucket. The default c = 2
    is new, too, because some gradients come more than one bucket late.

    N stays what it was when workers are lost: a bucket is a global batch, whoever computed it.
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
            "it looks ahead by AdamW's step, from moments SGD has not"
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

    def view(self, worker: int, out: Tensor) -> int:
        others = len(self._present - {worker})  # below N, so that at j = 0 this is W
        if self._chunk is None or self._count + others < self._k:
            return super().view(worker, out)
        self._look_ahead(out)
        return self.version

    def _look_ahead(self, out: Tensor) -> None:
        """Write W moved by the bucket's step into `out`, shape [n]; changes nothing else."""
        import torch

        (beta1, beta2), h, n = self.hyper.betas, self.hyper, self._k
        moments, far = self._optimizer, self.lr * self.options.look_ahead
        t = moments.steps
        # Factors that are the same for all elements are taken together: u is n G, then n m' / (1 - b1).
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
