"""Wraps all private and undocumented names of PyTorch that training, strategies and servers use.

To upgrade PyTorch, check this module first. `plan.footprint.torch_internals` has the names that only the plan
uses.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
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

#: PyTorch's operator for fused attention of CPU tensors, real or fake.
CPU_ATTENTION = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu
CPU_ATTENTION_BACKWARD = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward
#: PyTorch's operator for matrix products per group of rows, as in mixtures of experts.
GROUPED_PRODUCT = torch.ops.aten._grouped_mm
#: Operators whose results `activation_checkpointing: selective` always stores, as in torchtitan.
KEPT_BY_SELECTIVE = {
    torch.ops.aten._scaled_dot_product_flash_attention.default,
    CPU_ATTENTION.default,
    torch.ops.aten._scaled_dot_product_efficient_attention.default,
    torch.ops.aten._scaled_dot_product_cudnn_attention.default,
    torch.ops.aten._scaled_dot_product_fused_attention_overrideable.default,
    torch.ops._c10d_functional.reduce_scatter_tensor.default,
    torch.ops._c10d_functional.all_reduce.default,
}
#: Names of the method by which workers of a pipeline exchange whether they know tensor shapes. The first is
#: that of PyTorch up to 2.14, the second that of later versions.
PIPELINE_VOTES = ("_warmup_p2p", "_initialize_pipeline_distributed_state")


def get_storage_key(storage: torch.UntypedStorage) -> int:
    """Return a unique key of a tensor's storage. A fake storage has no address, but it also has a key."""
    return storage._cdata


def get_write_count(tensor: Tensor) -> int:
    """Return how many times a tensor was changed in place."""
    return tensor._version


def is_view(tensor: Tensor) -> bool:
    return tensor._is_view()


def overlaps_itself(tensor: Tensor) -> bool:
    """Return whether two elements of a tensor share memory, or may share it."""
    return bool(torch._debug_has_internal_overlap(tensor))


def has_gradient_hooks(tensor: Tensor) -> bool:
    return bool(tensor._backward_hooks or tensor._post_accumulate_grad_hooks)


def multiply_tensors_in_place(tensors: list[Tensor], factor: Tensor) -> None:
    """Multiply several tensors by a factor, in place and in one kernel."""
    torch._foreach_mul_(tensors, factor)


def get_buffers(module: nn.Module) -> dict[str, Tensor | None]:
    """Return a module's own dictionary of its buffers, through which the module can be changed."""
    return module._buffers


def get_parameters(module: nn.Module) -> dict[str, nn.Parameter | None]:
    """Return a module's own dictionary of its parameters, through which the module can be changed."""
    return module._parameters


def get_submodules(module: nn.Module) -> dict[str, nn.Module | None]:
    """Return a module's own dictionary of its submodules, through which the module can be changed."""
    return module._modules


def get_schema_arguments(op: OpOverload) -> Sequence[Any]:
    """Return the arguments that an operator's schema declares."""
    return op._schema.arguments


def has_mutable_argument(op: OpOverload) -> bool:
    """Return whether an operator's schema has an argument to which it writes."""
    return op._schema.is_mutable


def iter_written_tensors(op: OpOverload, args: Any, kwargs: Mapping[str, Any]) -> Iterator[Tensor]:
    """Yield the tensors among an operator's arguments to which it writes.

    Args:
        op: Operator.
        args: Its positional arguments.
        kwargs: Its keyword arguments.
    """
    for i, argument in enumerate(get_schema_arguments(op)):
        if argument.is_write:
            value = args[i] if i < len(args) else kwargs.get(argument.name)
            yield from (t for t in tree_leaves(value) if isinstance(t, Tensor))


def name_arguments(op: OpOverload, args: Any, kwargs: dict[str, Any]) -> dict[str, Any]:
    """Return the arguments of an operator's call by name, without those that have their default.

    Args:
        op: Operator.
        args: Its positional arguments.
        kwargs: Its keyword arguments.
    """
    names = [argument.name for argument in get_schema_arguments(op)]
    return dict(zip(names, args, strict=False)) | kwargs


def make_flop_formulas() -> dict[Any, Callable[..., int]]:
    """Return functions that count floating-point operations for operators that PyTorch does not count.

    They are attention on CPU tensors and grouped products. Up to version 2.14, PyTorch counts only CUDA's
    fused attention. All attention scores count, also those that a causal mask hides.

    Returns:
        A function of the arguments' shapes, by operator.
    """
    from torch.utils.flop_counter import sdpa_backward_flop_count, sdpa_flop_count

    def count_attention_forward_flops(*shapes: Any, **_: Any) -> int:
        return sdpa_flop_count(*shapes[:3])

    def count_attention_backward_flops(*shapes: Any, **_: Any) -> int:
        return sdpa_backward_flop_count(*shapes[:4])

    def count_grouped_product_flops(
        a: Sequence[int], b: Sequence[int], *_: Any, **_named: Any
    ) -> int:
        # If only one operand is three-dimensional, each of its groups is multiplied by a part of the other's
        # rows.
        groups = a[0] if len(a) > len(b) else 1
        return 2 * math.prod(a) // groups * b[-1]

    return {
        CPU_ATTENTION: count_attention_forward_flops,
        CPU_ATTENTION_BACKWARD: count_attention_backward_flops,
        GROUPED_PRODUCT: count_grouped_product_flops,
    }


def compute_grouped_product_shape(a: Tensor, b: Tensor, group_ends: Tensor | None) -> list[int]:
    """Return the shape of the result of a matrix product per group (`GROUPED_PRODUCT`).

    Args:
        a: First operand.
        b: Second operand.
        group_ends: Ends of the groups.
    """
    if a.dim() == b.dim():
        groups = a.shape[:1] if a.dim() == 3 else group_ends.shape
        return [*groups, a.shape[-2], b.shape[-1]]
    return [a.shape[-2], b.shape[-1]]


@contextmanager
def replace_attribute(module: Any, name: str, value: Any) -> Iterator[None]:
    """Replace an attribute of a Python module until the block ends.

    Args:
        module: The module.
        name: Name of the attribute.
        value: Temporary value.
    """
    original = getattr(module, name)
    setattr(module, name, value)
    try:
        yield
    finally:
        setattr(module, name, original)


@contextmanager
def skip_truncated_normals() -> Iterator[None]:
    """Skip initialisations by truncated normal numbers until the block ends, for fake tensors."""
    with replace_attribute(init, "_no_grad_trunc_normal_", lambda tensor, *_, **__: tensor):
        yield


def assign_parameters_to_buckets(parameters: list[Tensor], cap_bytes: int) -> list[list[int]]:
    """Return how DDP divides parameters into buckets: the parameters' indices, by bucket.

    A bucket has at most `cap_bytes`.
    """
    groups, _ = dist._compute_bucket_assignment_by_size(parameters, [cap_bytes])
    return groups


def read_ddp_log(module: nn.parallel.DistributedDataParallel) -> dict[str, Any]:
    """Return DDP's own log of the times of its steps and of its buckets."""
    return module._get_ddp_logging_data()


def log_each_ddp_step(module: nn.parallel.DistributedDataParallel) -> None:
    """Make DDP log the time of every step, instead of every 100th step."""
    module._set_ddp_runtime_logging_sample_rate(1)


class ObservableScaler(torch.amp.GradScaler):
    """A GradScaler whose overflow flags can be read or changed before it uses them."""

    def process_overflow_flags(self, flags: Iterable[Tensor]) -> None:
        """Read or change the overflow flags before the GradScaler uses them.

        Args:
            flags: A flag per device, which is not 0 if a gradient on the device is not finite.
        """
        raise NotImplementedError

    def _unscale_grads_(self, *args: Any, **kwargs: Any) -> dict[torch.device, Tensor]:
        flags = super()._unscale_grads_(*args, **kwargs)
        self.process_overflow_flags(flags.values())
        return flags


def unscale_gradients(gradients: list[Tensor], found_inf: Tensor, inverse_scale: Tensor) -> None:
    """Multiply gradients by the inverse loss scale, in place, as GradScaler does.

    Args:
        gradients: Gradients on one device.
        found_inf: Flag of shape [1], which is set to 1 if a gradient is not finite.
        inverse_scale: Inverse loss scale, of shape [1].
    """
    torch._amp_foreach_non_finite_check_and_unscale_(gradients, found_inf, inverse_scale)


def disable_pipeline_shape_exchange(schedule: Any) -> None:
    """Disable the exchange of tensor shapes between the workers of a pipeline.

    The workers already know the shapes. PyTorch would send them as pickles, which stratbench never unpickles.

    Raises:
        RuntimeError: If the schedules of the installed PyTorch have neither of the known methods.
    """
    vote = next((name for name in PIPELINE_VOTES if hasattr(schedule, name)), None)
    if vote is None:
        names = ", ".join(PIPELINE_VOTES)
        raise RuntimeError(
            f"{type(schedule).__name__} of the installed PyTorch has none of the methods {names}; install a "
            "version of PyTorch that stratbench supports"
        )
    setattr(schedule, vote, _declare_static_shapes)


def _declare_static_shapes(stages: Sequence[Any], *_: Any, **__: Any) -> None:
    from torch.distributed.pipelining import stage

    for each in stages:
        each._inference_mode = stage.InferenceMode.STATIC


def list_receive_buffers(stages: Iterable[Any]) -> list[Tensor]:
    """Return the buffers in which a worker's pipeline stages receive tensors from other workers."""
    infos = [i for s in stages for i in (*s.args_recv_info.values(), *s.grad_recv_info.values())]
    # The input of the model has no receive buffer. From PyTorch 2.15 on, stages keep no receive buffers at
    # all.
    buffers = [getattr(i, "buffer", None) for each in infos for i in each]
    return [buffer for buffer in buffers if buffer is not None]


def import_compiler() -> None:
    """Import the modules of torch.compile, which creating the first optimizer would import."""
    import torch._dynamo  # noqa: F401


def configure_compiler() -> None:
    """Let torch.compile compile code for many shapes, and within this process."""
    from torch._dynamo import config
    from torch._inductor import config as inductor

    # A model's layers share code, but each shape needs its own graph. PyTorch's limits are too low for that.
    config.recompile_limit = max(config.recompile_limit, 256)
    config.accumulated_recompile_limit = max(config.accumulated_recompile_limit, 4096)
    # With more than one thread, PyTorch would start further processes.
    inductor.compile_threads = 1


def register_compilation_callbacks(
    start: Callable[[Any], None], end: Callable[[Any], None]
) -> None:
    """Register functions that torch.compile calls before and after each compilation."""
    from torch._dynamo.callback import callback_handler

    callback_handler.register_start_callback(start)
    callback_handler.register_end_callback(end)


def resolve_process_group(argument: Any) -> dist.ProcessGroup | None:
    """Return the process group that an operator's argument is or names. None for other arguments."""
    # An argument that is a text or a ScriptObject may also be something other than a process group.
    try:
        if isinstance(argument, torch.ScriptObject):
            return dist.ProcessGroup.unbox(argument)
        if isinstance(argument, str):
            return dist.distributed_c10d._resolve_process_group(argument)
    except (RuntimeError, LookupError):
        pass
    return None


def set_collective_timeout(timeout: timedelta) -> None:
    """Set the timeout of collectives in the default process group."""
    dist.distributed_c10d._set_pg_timeout(timeout, dist.group.WORLD)


def abort_collectives() -> None:
    """Abort all NCCL collectives that are in progress."""
    dist.distributed_c10d._abort_process_group()


def wait_for_collectives() -> None:
    """Wait until all collectives have ended and PyTorch's watchdog thread has seen it."""
    dist.group.WORLD._wait_for_pending_works()


def free_cublas_workspaces() -> None:
    torch._C._cuda_clearCublasWorkspaces()
