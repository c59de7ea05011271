"""Makes autocast on a CPU choose the number formats of autocast on CUDA.

The lists are those of PyTorch 2.13 (`AT_FORALL_FP32` and the following, ATen/autocast_mode.h).
"""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.library import Library, fallthrough_kernel

from stratbench.extensions.plan.footprint.torch_internals import (
    disable_cpu_autocast,
    unregister_kernels,
)
from stratbench.workload.torch_internals import get_schema_arguments

#: Operators that autocast on CUDA runs in float32, after converting their operands.
FLOAT32 = frozenset({
    "acos", "asin", "cosh", "erfinv", "exp", "expm1", "log", "log10", "log2", "log1p", "reciprocal",
    "rsqrt", "sinh", "tan", "pow.Tensor_Scalar", "pow.Tensor_Tensor", "pow.Scalar", "softplus",
    "layer_norm", "native_layer_norm", "rms_norm", "group_norm", "frobenius_norm.dim", "nuclear_norm",
    "nuclear_norm.dim", "cosine_similarity", "poisson_nll_loss", "cosine_embedding_loss", "nll_loss",
    "nll_loss2d", "hinge_embedding_loss", "kl_div", "l1_loss", "smooth_l1_loss", "huber_loss",
    "mse_loss", "margin_ranking_loss", "multilabel_margin_loss", "soft_margin_loss",
    "triplet_margin_loss", "multi_margin_loss", "binary_cross_entropy_with_logits", "dist", "pdist",
    "cdist", "renorm", "logsumexp", "upsample_nearest1d", "_upsample_nearest_exact1d",
    "upsample_nearest2d", "_upsample_nearest_exact2d", "upsample_nearest3d",
    "_upsample_nearest_exact3d", "upsample_linear1d", "upsample_bilinear2d", "_upsample_bilinear2d_aa",
    "upsample_trilinear3d", "upsample_bicubic2d", "_upsample_bicubic2d_aa"
})  # fmt: skip
#: Operators whose argument `dtype` autocast on CUDA sets to float32 if the caller does not set it.
BY_DTYPE = frozenset({
    "prod", "prod.dim_int", "softmax.int", "log_softmax.int", "cumprod", "cumsum", "linalg_vector_norm",
    "linalg_matrix_norm", "linalg_matrix_norm.str_ord", "sum", "sum.dim_IntList"
})  # fmt: skip
#: Operators without `dtype`, each with the overload that has one. Autocast on CUDA calls this overload with
#: float32.
BY_OTHER = {"norm.Scalar": "norm.ScalarOpt_dtype", "norm.ScalarOpt_dim": "norm.ScalarOpt_dim_dtype"}
#: Operators that autocast on a CPU runs in one format. On CUDA each part has a format of its own: the
#: logarithms in cross-entropy have that of the scores.
BY_PARTS = ("cross_entropy_loss",)
SHORT = (torch.float16, torch.bfloat16)


@contextmanager
def emulate_cuda_autocast() -> Iterator[None]:
    """Make autocast on a CPU cast as autocast on CUDA does, until the block ends."""
    library = Library("aten", "IMPL", "AutocastCPU")
    kernels = dict.fromkeys(FLOAT32, _run_in_float32) | dict.fromkeys(
        BY_DTYPE, _run_with_float32_dtype
    )
    kernels |= {
        name: partial(_run_float32_overload, float32_overload=_get_aten_operator(other))
        for name, other in BY_OTHER.items()
    }
    try:
        # PyTorch warns of each kernel that replaces another.
        with warnings.catch_warnings(action="ignore"):
            for name in BY_PARTS:
                library.impl(name, fallthrough_kernel)
            for name, kernel in kernels.items():
                kernel = partial(kernel, _get_aten_operator(name))
                library.impl(name, disable_cpu_autocast()(kernel))
        yield
    finally:
        unregister_kernels(library)


def _get_aten_operator(name: str) -> Any:
    packet, _, overload = name.partition(".")
    return getattr(getattr(torch.ops.aten, packet), overload or "default")


def _run_in_float32(op: Any, *args: Any, **kwargs: Any) -> Any:
    return op(
        *map(_cast_to_float32, args),
        **{key: _cast_to_float32(value) for key, value in kwargs.items()},
    )


def _cast_to_float32(value: Any) -> Any:
    return value.float() if isinstance(value, Tensor) and value.dtype in SHORT else value


def _run_with_float32_dtype(op: Any, x: Tensor, *args: Any, **kwargs: Any) -> Any:
    place = [argument.name for argument in get_schema_arguments(op)].index("dtype") - 1
    dtype = args[place] if place < len(args) else kwargs.get("dtype")
    if x.dtype in SHORT and dtype is None:
        return op(x, *args[:place], **kwargs | {"dtype": torch.float32})
    return op(x, *args, **kwargs)


def _run_float32_overload(op: Any, x: Tensor, *args: Any, float32_overload: Any) -> Any:
    return float32_overload(x, *args, dtype=torch.float32) if x.dtype in SHORT else op(x, *args)
