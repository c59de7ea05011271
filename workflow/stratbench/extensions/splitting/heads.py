"""Divides attention layers among tensor-parallel workers, in particular nn.MultiheadAttention.

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
    """Parallel style that gathers a module's first input once, for all submodules that use it.

    The input is divided by `layout`. Other inputs, such as rotary embeddings, are not changed.
    (PrepareModuleInput of torch needs the number of inputs, which a plan does not state.)
    """

    def __init__(self, layout: Placement) -> None:
        super().__init__()
        self.layout = layout

    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        gather = partial(_gather_first_module_input, device_mesh, self.layout)
        module.register_forward_pre_hook(gather, with_kwargs=True)
        return module


def _gather_first_module_input(
    mesh: DeviceMesh,
    input_layout: Placement,
    module: nn.Module,
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Return a module's arguments, with the first one gathered from all workers.

    This function is a forward pre-hook.
    """
    name = next(iter(signature(module.forward).parameters), None)
    x = args[0] if args else kwargs.get(name)
    if not isinstance(x, Tensor):
        raise Refused(
            f"its tensor_plan says 'input' for a {type(module).__name__}, whose first argument is a "
            f"{type(x).__name__}; use 'input' only for modules whose first argument is a tensor"
        )
    if not isinstance(x, DTensor):
        x = DTensor.from_local(x, mesh, (input_layout,), run_check=False)
    x = x.redistribute(placements=(Replicate(),))
    return ((x, *args[1:]), kwargs) if args else (args, kwargs | {name: x})


class SelfAttention(nn.Module):
    """Self-attention over [batch, positions, width], with the weights of an nn.MultiheadAttention.

    Queries, keys and values have one projection each. If the projections are divided, this worker has some of
    the heads. Attention weights are never returned.
    """

    #: Attributes that nn.TransformerEncoderLayer reads. These values disable its fused implementation.
    batch_first, in_proj_bias = True, None

    def __init__(self, whole: nn.MultiheadAttention) -> None:
        super().__init__()
        self.head_size, self.dropout = whole.head_dim, whole.dropout
        weights = whole.in_proj_weight.chunk(3)
        biases = (None,) * 3 if whole.in_proj_bias is None else whole.in_proj_bias.chunk(3)
        self.query, self.key, self.value = map(_make_linear_layer, weights, biases)
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
            raise Refused(
                "attention divided by heads (strategy `tensor`) does not support key_padding_mask"
            )
        if attn_mask is not None and not attn_mask.is_floating_point():
            # In a mask for nn.MultiheadAttention, True forbids attention. In a mask for
            # scaled_dot_product_attention, True allows it.
            attn_mask = ~attn_mask
        q, k, v = (
            project(query).unflatten(-1, (-1, self.head_size)).transpose(1, 2)
            for project in (self.query, self.key, self.value)
        )
        dropout = self.dropout if self.training else 0.0
        mixed = F.scaled_dot_product_attention(q, k, v, attn_mask, dropout)
        return self.out(mixed.transpose(1, 2).flatten(2)), None


def _make_linear_layer(weight: Tensor, bias: Tensor | None) -> nn.Linear:
    """Make a linear layer that has a part of a larger tensor as its weights."""
    made = nn.Linear(*weight.shape[::-1], bias=bias is not None, device="meta")
    made.weight = nn.Parameter(weight.detach(), weight.requires_grad)
    if bias is not None:
        made.bias = nn.Parameter(bias.detach(), bias.requires_grad)
    return made


def indivisible_attention_reason(module: nn.Module) -> str | None:
    """Return why an attention module cannot be divided by heads, or None if it can."""
    if not isinstance(module, nn.MultiheadAttention):
        return "is not an nn.MultiheadAttention"
    if not module.batch_first:
        return "has positions before the batch; set batch_first=True"
    if module.in_proj_weight is None or module.bias_k is not None or module.add_zero_attn:
        return "has keys or values of another width than queries, or additional keys and values"
    return None
