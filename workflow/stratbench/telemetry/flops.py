"""Counts the floating-point operations of a model's training without executing them."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from torch import nn

#: Operations of a training step as a multiple of those of its forward, if all parameters are trained. For
#: each matrix product of forward, backward computes two gradients.
TRAINING_FLOPS = 3


def count_flops(
    build_model: Callable[[], nn.Module], input_shape: tuple[int, ...]
) -> dict[str, int]:
    """Return the floating-point operations per sample of forward, and of a training step.

    Convolutions, matrix products and attention are counted. A multiplication and its addition are two
    operations. Element-wise operations, normalisation and pooling are not counted (torch.utils.flop_counter).
    The model is built of fake tensors, which take neither memory nor time, and draws no random number.

    By convention, training takes `TRAINING_FLOPS` times the forward (Chowdhery et al., PaLM, 2022, appendix
    B). With frozen parameters, backward is counted without their gradients.

    Args:
        build_model: Builds the model.
        input_shape: Shape of one sample, without the batch.
    """
    import torch
    from torch.utils.flop_counter import FlopCounterMode

    from stratbench.workload.known_values import KnownValueFakeMode
    from stratbench.workload.torch_internals import make_flop_formulas

    # Fake tensors take the place of the meta device, which models can detect.
    with KnownValueFakeMode():
        # The model is in evaluation mode, because BatchNorm refuses to train on a single sample.
        model = build_model().eval()
        text = len(input_shape) == 1
        x = torch.empty(1, *input_shape, dtype=torch.int64 if text else torch.float32)
        uncounted = make_flop_formulas()
        with (
            torch.no_grad(),
            FlopCounterMode(display=False, custom_mapping=uncounted) as counter,
        ):
            model(x)
        forward = training = counter.get_total_flops()
        if all(p.requires_grad for p in model.parameters()):
            training = TRAINING_FLOPS * forward
        else:
            own = uncounted | {
                torch.ops.aten.convolution_backward: _count_convolution_backward_flops
            }
            with FlopCounterMode(display=False, custom_mapping=own) as counter:
                model(x).sum().backward()
            training = min(counter.get_total_flops(), TRAINING_FLOPS * forward)
    return {"forward_flops_per_sample": forward, "training_flops_per_sample": training}


def _count_convolution_backward_flops(
    grad_shape: Sequence[int],
    x_shape: Sequence[int],
    weight_shape: Sequence[int],
    *rest: Any,
    **_named: Any,
) -> int:
    """Return the floating-point operations of a convolution's backward, given the shapes of its tensors.

    This formula replaces torch's own, which is wrong for grouped convolutions. The gradient of the input and
    that of the weight each take as many operations as forward.
    """
    *_, transposed, _output_padding, _groups, wanted = rest
    return (
        2
        * math.prod(x_shape if transposed else grad_shape)
        * math.prod(weight_shape[1:])
        * sum(wanted[:2])
    )
