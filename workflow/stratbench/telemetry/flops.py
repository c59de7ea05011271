"""Floating-point operations of a model's training, counted without computing anything."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from torch import nn

#: Operations of a training step in those of its forward where all parameters are trained: backward
#: computes two gradients for each of forward's products.
TRAINING_FLOPS = 3


def counted_flops(build: Callable[[], nn.Module], input_shape: tuple[int, ...]) -> dict[str, int]:
    """Return operations per sample of forward and of training, for the model that `build` makes.

    `input_shape`: one sample's, without the batch. Convolutions, matrix products and attention are counted, a
    multiplication with its addition as two. Element-wise operations, normalisation and pooling are not
    (torch.utils.flop_counter). The model is built of fake tensors: weights take neither memory nor time, and
    no random number is drawn.

    Training takes `TRAINING_FLOPS` times the forward by convention (Chowdhery et al., PaLM, 2022, appendix
    B). With frozen parameters, the backward is counted, too, without their gradients.
    """
    import torch
    from torch.utils.flop_counter import FlopCounterMode

    from stratbench.workload.known_values import KnownFakes
    from stratbench.workload.torch_internals import count_uncounted

    # Not the meta device: networks know of fake tensors that these have no values.
    with KnownFakes():
        model = build().eval()  # in training, BatchNorm refuses a single sample
        text = len(input_shape) == 1
        x = torch.empty(1, *input_shape, dtype=torch.int64 if text else torch.float32)
        uncounted = count_uncounted()
        with (
            torch.no_grad(),
            FlopCounterMode(display=False, custom_mapping=uncounted) as counter,
        ):
            model(x)
        forward = training = counter.get_total_flops()
        if all(p.requires_grad for p in model.parameters()):
            training = TRAINING_FLOPS * forward
        else:
            own = uncounted | {torch.ops.aten.convolution_backward: _of_convolutions_backward}
            with FlopCounterMode(display=False, custom_mapping=own) as counter:
                model(x).sum().backward()
            training = min(counter.get_total_flops(), TRAINING_FLOPS * forward)
    return {"forward_flops_per_sample": forward, "training_flops_per_sample": training}


def _of_convolutions_backward(
    grad: Sequence[int], x: Sequence[int], weight: Sequence[int], *rest: Any, **_named: Any
) -> int:
    """Return operations of a convolution's backward by the shapes.

    Torch takes a grouped one for a full one.

    The gradient of the input and that of the weight take as much as the forward each.
    """
    *_, transposed, _output_padding, _groups, wanted = rest
    return 2 * math.prod(x if transposed else grad) * math.prod(weight[1:]) * sum(wanted[:2])
