"""PyTorch's private and undocumented names that training, strategies and servers use.

An upgrade of PyTorch opens this file first, and `plan.footprint.torch_internals` for names of the plan alone.
Importing it imports torch.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch._ops import OpOverload
from torch._subclasses.fake_tensor import (
    DataDependentOutputException,
    DynamicOutputShapeException,
    FakeTensor,
    FakeTensorMode,
    UnsupportedOperatorException,
    unset_fake_temporarily,
)
from torch.nn import init
from torch.nn.modules.batchnorm import _BatchNorm as BatchNorm
from torch.nn.modules.dropout import _DropoutNd as Dropout
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

__all__ = [
    "BatchNorm",
    "DataDependentOutputException",
    "Dropout",
    "DynamicOutputShapeException",
    "FakeTensor",
    "FakeTensorMode",
    "OpOverload",
    "TorchDispatchMode",
    "UnsupportedOperatorException",
    "tree_leaves",
    "unset_fake_temporarily",
]

#: The fused attention that tensors on a CPU take, real or fake.
CPU_ATTENTION = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu
CPU_ATTENTION_BACKWARD = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward
#: The product of a matrix for each group of rows, by which experts are computed.
GROUPED_PRODUCT = torch.ops.aten._grouped_mm
#: Operators beside products whose results `activation_checkpointing: selective` keeps, as in torchtitan.
KEPT_BY_SELECTIVE = {
    torch.ops.aten._scaled_dot_product_flash_attention.default,
    CPU_ATTENTION.default,
    torch.ops.aten._scaled_dot_product_efficient_attention.default,
    torch.ops.aten._scaled_dot_product_cudnn_attention.default,
    torch.ops.aten._scaled_dot_product_fused_attention_overrideable.default,
    torch.ops._c10d_functional.reduce_scatter_tensor.default,
    torch.ops._c10d_functional.all_reduce.default,
}
#: The method by which a pipeline's workers vote on shapes: up to PyTorch 2.14, and from 2.15 on.
PIPELINE_VOTES = ("_warmup_p2p", "_initialize_pipeline_distributed_state")


# ------------------------------------------------------------ tensors, modules and operators


def get_storage_key(storage: torch.UntypedStorage) -> int:
    """Return a unique key of a storage; those of fake tensors have no address."""
    return storage._cdata


def get_version(tensor: Tensor) -> int:
    """Return how often `tensor` was written to in place."""
    return tensor._version


def is_view(tensor: Tensor) -> bool:
    return tensor._is_view()


def overlaps_itself(tensor: Tensor) -> bool:
    """Return whether several elements of `tensor` share memory, or may."""
    return bool(torch._debug_has_internal_overlap(tensor))


def has_gradient_hooks(tensor: Tensor) -> bool:
    return bool(tensor._backward_hooks or tensor._post_accumulate_grad_hooks)


def multiply_all(tensors: list[Tensor], factor: Tensor) -> None:
    """Multiply tensors of one device and format by a number, in place, with one kernel."""
    torch._foreach_mul_(tensors, factor)


def get_buffers(module: nn.Module) -> dict[str, Tensor | None]:
    """Return the module's dictionary of its own buffers, which may be changed."""
    return module._buffers


def get_parameters(module: nn.Module) -> dict[str, nn.Parameter | None]:
    """Return the dictionary that holds the module's own parameters."""
    return module._parameters


def get_children(module: nn.Module) -> dict[str, nn.Module | None]:
    """Return the dictionary that holds the module's own modules."""
    return module._modules


def get_arguments(op: OpOverload) -> Sequence[Any]:
    """Return the arguments that the operator's schema declares."""
    return op._schema.arguments


def writes_arguments(op: OpOverload) -> bool:
    """Return whether the operator's schema has a mutable argument."""
    return op._schema.is_mutable


def count_uncounted() -> dict[Any, Callable[..., int]]:
    """Return formulas of operations that PyTorch does not count: attention on CPU tensors, grouped products.

    Up to 2.14, it counts only CUDA's fused attention. All scores count as there, also those under a causal
    mask.

    Returns:
        Per operator a function of its arguments' shapes.
    """
    from torch.utils.flop_counter import sdpa_backward_flop_count, sdpa_flop_count

    def count_forward(*shapes: Any, **_: Any) -> int:
        return sdpa_flop_count(*shapes[:3])

    def count_backward(*shapes: Any, **_: Any) -> int:
        return sdpa_backward_flop_count(*shapes[:4])

    def count_grouped(a: Sequence[int], b: Sequence[int], *_: Any, **_named: Any) -> int:
        # The groups of a three-dimensional operand divide the rows of a two-dimensional one.
        groups = a[0] if len(a) > len(b) else 1
        return 2 * math.prod(a) // groups * b[-1]

    return {
        CPU_ATTENTION: count_forward,
        CPU_ATTENTION_BACKWARD: count_backward,
        GROUPED_PRODUCT: count_grouped,
    }


def shape_of_grouped(a: Tensor, b: Tensor, offsets: Tensor | None) -> list[int]:
    """Return the shape of a grouped product.

    Args:
        a: First operand.
        b: Second operand.
        offsets: Ends of the groups.
    """
    if a.dim() == b.dim():
        groups = a.shape[:1] if a.dim() == 3 else offsets.shape
        return [*groups, a.shape[-2], b.shape[-1]]
    return [a.shape[-2], b.shape[-1]]


@contextmanager
def replaced(module: Any, name: str, value: Any) -> Iterator[None]:
    """Set `module.name` to `value` in the block, for functions of PyTorch without an option for it.

    Args:
        module: The module.
        name: Name in it.
        value: Temporary value.
    """
    original = getattr(module, name)
    setattr(module, name, value)
    try:
        yield
    finally:
        setattr(module, name, original)


@contextmanager
def no_truncated_normals() -> Iterator[None]:
    """Skip truncated normals in the block: PyTorch checks the drawn values, which fakes do not have."""
    with replaced(init, "_no_grad_trunc_normal_", lambda tensor, *_, **__: tensor):
        yield


# ------------------------------------------------------------ strategies


def assign_buckets(parameters: list[Tensor], cap_bytes: int) -> list[list[int]]:
    """Return the parameters' indices in buckets of at most `cap_bytes`, as DDP forms them."""
    groups, _ = dist._compute_bucket_assignment_by_size(parameters, [cap_bytes])
    return groups


def read_ddp_log(module: nn.parallel.DistributedDataParallel) -> dict[str, Any]:
    """Return what DDP has logged of its steps and buckets."""
    return module._get_ddp_logging_data()


def log_each_step(module: nn.parallel.DistributedDataParallel) -> None:
    """Have DDP time every step for its log, and not only each 100th."""
    module._set_ddp_runtime_logging_sample_rate(1)


class ObservableScaler(torch.amp.GradScaler):
    """GradScaler that shows its overflow flags before it reads them."""

    def observe(self, flags: Iterable[Tensor]) -> None:
        """Read or change the flags, one per device.

        Not 0: a gradient on the device is not finite.
        """
        raise NotImplementedError

    def _unscale_grads_(self, *args: Any, **kwargs: Any) -> dict[torch.device, Tensor]:
        flags = super()._unscale_grads_(*args, **kwargs)
        self.observe(flags.values())
        return flags


def unscale(gradients: list[Tensor], found_inf: Tensor, inverse: Tensor) -> None:
    """Multiply gradients by `inverse` in place, by GradScaler's kernel.

    Args:
        gradients: Of one device.
        found_inf: Shape [1]; set to 1 if a gradient is not finite.
        inverse: Shape [1].
    """
    torch._amp_foreach_non_finite_check_and_unscale_(gradients, found_inf, inverse)


def skip_votes(schedule: Any) -> None:
    """Disable a pipeline's vote on whether workers know the shapes that they receive: they do.

    Shapes that a worker does not know would be sent as pickles, and none is unpickled here.

    Raises:
        RuntimeError: This PyTorch's schedules have neither of the methods that vote.
    """
    vote = next((name for name in PIPELINE_VOTES if hasattr(schedule, name)), None)
    if vote is None:
        names = ", ".join(PIPELINE_VOTES)
        raise RuntimeError(f"this PyTorch's {type(schedule).__name__} has none of {names}")
    setattr(schedule, vote, _declare_static)


def _declare_static(stages: Sequence[Any], *_: Any, **__: Any) -> None:
    from torch.distributed.pipelining import stage

    for each in stages:
        each._inference_mode = stage.InferenceMode.STATIC


def receive_buffers(stages: Iterable[Any]) -> list[Tensor]:
    """Return the receive buffers of a worker's pipeline stages, if there are any."""
    infos = [i for s in stages for i in (*s.args_recv_info.values(), *s.grad_recv_info.values())]
    # A network's own input has none; from PyTorch 2.15 on no receive buffer is kept.
    buffers = [getattr(i, "buffer", None) for each in infos for i in each]
    return [buffer for buffer in buffers if buffer is not None]


# ------------------------------------------------------------ torch.compile


def import_compiler() -> None:
    """Import the parts of torch.compile, which each optimizer's constructor would import."""
    import torch._dynamo  # noqa: F401


def configure_compiler() -> None:
    """Have torch.compile compile each layer's own shape, in this process alone."""
    from torch._dynamo import config
    from torch._inductor import config as inductor

    # Each layer's own shape takes a graph of the same code.
    config.recompile_limit = max(config.recompile_limit, 256)
    config.accumulated_recompile_limit = max(config.accumulated_recompile_limit, 4096)
    inductor.compile_threads = 1  # no processes beside the worker


def watch_compiler(start: Callable[[Any], None], end: Callable[[Any], None]) -> None:
    """Have `start` and `end` called before and after each compilation."""
    from torch._dynamo.callback import callback_handler

    callback_handler.register_start_callback(start)
    callback_handler.register_end_callback(end)


# ------------------------------------------------------------ process groups and memory


def resolve_group(value: Any) -> dist.ProcessGroup | None:
    """Return the process group that an operator's argument names, or None for other arguments."""
    # A string may also be the operation's kind, as an object of another class may be.
    try:
        if isinstance(value, torch.ScriptObject):
            return dist.ProcessGroup.unbox(value)
        if isinstance(value, str):
            return dist.distributed_c10d._resolve_process_group(value)
    except (RuntimeError, LookupError):
        pass
    return None


def limit_collectives(limit: timedelta) -> None:
    """Set the timeout of collectives of the whole group."""
    dist.distributed_c10d._set_pg_timeout(limit, dist.group.WORLD)


def abort_collectives() -> None:
    """End the collectives of NCCL under way."""
    dist.distributed_c10d._abort_process_group()


def wait_for_collectives() -> None:
    """Wait for collectives whose end PyTorch's watchdog has not seen."""
    dist.group.WORLD._wait_for_pending_works()


def free_cublas_workspaces() -> None:
    torch._C._cuda_clearCublasWorkspaces()
