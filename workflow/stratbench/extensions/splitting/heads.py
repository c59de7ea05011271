"""Division of attention: by its input, and of torch's own by heads, whose weights share a matrix.

Importing this file imports torch.
"""

from __future__ import annotations

from functools import partial
from inspect import signature
from typing import Any

import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Placement, Replicate
from torch.distributed.tensor.parallel import ParallelStyle

from stratbench.workload.users_code import Refused


class FirstInput(ParallelStyle):
    """Gathers a module's first input, divided by `layout`, once for all modules that read it.

    Other inputs, such as tables of rotations, stay as they are: torch's own PrepareModuleInput needs the
    number of a module's inputs, which a plan does not have.
    """

    def __init__(self, layout: Placement) -> None:
        super().__init__()
        self.layout = layout

    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        gather = partial(_gather_first, device_mesh, self.layout)
        module.register_forward_pre_hook(gather, with_kwargs=True)
        return module


def _gather_first(
    mesh: DeviceMesh,
    layout: Placement,
    module: nn.Module,
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    name = next(iter(signature(module.forward).parameters), None)
    x = args[0] if args else kwargs.get(name)
    if not isinstance(x, Tensor):
        raise Refused(
            f"its tensor_plan says 'input' of a {type(module).__name__}, whose first input is a "
            f"{type(x).__name__}; say it of a module that is called with a tensor first"
        )
    if not isinstance(x, DTensor):
        x = DTensor.from_local(x, mesh, (layout,), run_check=False)
    x = x.redistribute(placements=(Replicate(),))
    return ((x, *args[1:]), kwargs) if args else (args, kwargs | {name: x})


class SelfAttention(nn.Module):
    """nn.MultiheadAttention on one input [batch, positions, width], with its weights.

    Queries, keys and values have a projection each. If a projection is divided, this worker has some heads,
    whose number follows from its output. The weights of attention are never returned.
    """

    #: Read by nn.TransformerEncoderLayer; these values disable its fused fast path.
    batch_first, in_proj_bias = True, None

    def __init__(self, whole: nn.MultiheadAttention) -> None:
        super().__init__()
        self.head_size, self.dropout = whole.head_dim, whole.dropout
        weights = whole.in_proj_weight.chunk(3)
        biases = (None,) * 3 if whole.in_proj_bias is None else whole.in_proj_bias.chunk(3)
        self.query, self.key, self.value = map(_linear, weights, biases)
        self.out = whole.out_proj

    def forward(
        self,
        query: Tensor,
        _key: Tensor,
        _value: Tensor,
        attn_mask: Tensor | None = None,
        key_padding_mask: Tensor | None = None,
        **_: Any,
    ) -> tuple[Tensor, None]:
        if key_padding_mask is not None:
            raise Refused("attention that is divided by heads takes no key_padding_mask")
        if attn_mask is not None and not attn_mask.is_floating_point():
            # torch's attention names what is hidden, its function what is seen.
            attn_mask = ~attn_mask
        q, k, v = (
            project(query).unflatten(-1, (-1, self.head_size)).transpose(1, 2)
            for project in (self.query, self.key, self.value)
        )
        dropout = self.dropout if self.training else 0.0
        mixed = F.scaled_dot_product_attention(q, k, v, attn_mask, dropout)
        return self.out(mixed.transpose(1, 2).flatten(2)), None


def _linear(weight: Tensor, bias: Tensor | None) -> nn.Linear:
    """Return a layer with these weights, which are part of a larger tensor."""
    made = nn.Linear(*weight.shape[::-1], bias=bias is not None, device="meta")
    made.weight = nn.Parameter(weight.detach(), weight.requires_grad)
    if bias is not None:
        made.bias = nn.Parameter(bias.detach(), bias.requires_grad)
    return made


def why_not(module: nn.Module) -> str | None:
    """Return why a module's attention cannot be divided by heads, or None if it can."""
    if not isinstance(module, nn.MultiheadAttention):
        return "is no nn.MultiheadAttention"
    if not module.batch_first:
        return "has positions before the batch; set batch_first=True"
    if module.in_proj_weight is None or module.bias_k is not None or module.add_zero_attn:
        return "has keys or values of other widths, or keys and values of its own"
    return None
