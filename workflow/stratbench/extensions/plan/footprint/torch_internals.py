"""Wraps private names of PyTorch that only the plan uses.

Names that training uses as well are in `workload.torch_internals`. Substitutes for PyTorch's own functions
on fake tensors are also here.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from functools import partial
from importlib import import_module
from typing import Any, ClassVar, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor
from torch._subclasses.fake_impls import register_op_impl
from torch.autograd.profiler import record_function
from torch.library import Library
from torch.testing._internal.distributed.fake_pg import FakeStore
from torch.utils._python_dispatch import _disable_current_modes
from torch.utils.flop_counter import flop_registry, shape_wrapper

from stratbench.workload.known_values import KnownValueFakeMode
from stratbench.workload.torch_internals import (
    FakeTensor,
    FakeTensorMode,
    make_flop_formulas,
    replace_attribute,
    unset_fake_temporarily,
)

#: Functions that return the FLOPs of an operator, from its arguments and its result.
FLOP_FORMULAS = flop_registry | {op: shape_wrapper(f) for op, f in make_flop_formulas().items()}
#: Operator by which C++ asks a fake tensor for its device.
DEVICE_QUERY = torch.ops.prim.device.default
_CPU_AUTOCAST = torch._C.DispatchKeySet(torch._C.DispatchKey.AutocastCPU)

#: Names of torch's reduce-scatter, from PyTorch 2.13 on and before.
SCATTERS = ("reduce_scatter_single", "reduce_scatter_tensor")


class FakeTensors(KnownValueFakeMode):
    """Fake tensor mode that finds cached results of operators faster than `KnownValueFakeMode`.

    The results of operators are cached, and most time goes into describing operands for a look-up. Here the
    keys are shorter, but still distinguish all strided tensors.
    """

    #: PyTorch's cache key by short key. The whole process shares them, like the cache itself.
    keys: ClassVar[dict[Any, Any]] = {}

    def _cache_key(self, state: Any, func: Any, args: Any, kwargs: Any) -> Any:
        try:
            of_place = torch.get_default_dtype(), torch.is_inference_mode_enabled()
            call = (
                func,
                of_place,
                self._describe_operands(args),
                self._describe_operands(kwargs.items()),
            )
        except _IndescribableOperand:
            return super()._cache_key(state, func, args, kwargs)
        if (key := self.keys.get(call)) is None:
            key = self.keys[call] = super()._cache_key(state, func, args, kwargs)
        return key

    def _describe_operands(self, operands: Any) -> tuple[Any, ...]:
        """Return the properties of operands on which an operator's result depends.

        Raises:
            _IndescribableOperand: If an operand has other properties.
        """
        words: list[Any] = [type(operands)]
        for value in operands:
            if isinstance(value, Tensor):
                words.append(self._describe_tensor(value))
            elif isinstance(value, list | tuple):
                words.append(self._describe_operands(value))
            elif type(value) in _PLAIN:
                words += type(value), value  # the type, since 1 == 1.0 but results differ
            else:
                raise _IndescribableOperand
        return tuple(words)

    def _describe_tensor(self, t: Tensor) -> tuple[Any, ...]:
        ours = isinstance(t, FakeTensor) and t.fake_mode is self and t.constant is None
        if not ours or t.layout is not torch.strided:
            raise _IndescribableOperand
        views = t.storage_offset(), t.untyped_storage().nbytes(), t.is_conj(), t.is_neg()
        return (
            *(t.dtype, t.shape, t.stride(), t.fake_device, t.requires_grad, t.is_inference()),
            *views,
        )

    def _dispatch_impl(self, func: Any, types: Any, args: Any, kwargs: Any) -> Any:
        if func in (torch.ops.fsdp.split_with_sizes_copy.default, torch.ops.fsdp.chunk_cat.default):
            return None  # these operators have no result: they fill existing tensors
        return super()._dispatch_impl(func, types, args, kwargs)


class _IndescribableOperand(Exception):
    """Raised for an operand that the short cache key cannot describe."""


#: Types of operands that the short cache key contains with their value. Of a tensor it contains properties.
_PLAIN = frozenset(
    {bool, int, float, str, type(None), torch.dtype, torch.device, torch.layout}
    | {torch.memory_format}
)


@contextmanager
def open_fake_process_group(world_size: int, rank: int = 0) -> Iterator[None]:
    """Create a fake process group of any size, in which only this rank exists.

    The group exists until the block ends.
    """
    if dist.is_initialized():
        raise RuntimeError(
            "a footprint cannot be made while a process group is initialised; use another process"
        )
    dist.init_process_group("fake", rank=rank, world_size=world_size, store=FakeStore())
    try:
        yield
    finally:
        dist.destroy_process_group()


@contextmanager
def patch_torch_for_fake_tensors(
    on_cuda: bool, fused: bool, counts_steps: bool = False
) -> Iterator[None]:
    """Replace functions of torch that fail on fake tensors or without a GPU.

    They are restored when the block ends.

    Args:
        on_cuda: Whether torch behaves as on CUDA; otherwise as with gloo.
        fused: Whether SGD is fused, as on CUDA.
        counts_steps: Whether AdamW reads its count of steps, which a fake tensor lacks.
    """
    from torch.distributed import device_mesh
    from torch.distributed.fsdp._fully_shard import _fsdp_param
    from torch.distributed.tensor._sharding_prop import ShardingPropagator

    sgd = torch.optim.SGD

    def make_fused_sgd(*args: Any, **kwargs: Any) -> torch.optim.SGD:
        return sgd(*args, **(kwargs | {"fused": True}))

    with ExitStack() as stack:
        # A mesh reads ranks from a tensor, which must be real.
        make_real_mesh = unset_fake_temporarily()(device_mesh.init_device_mesh)
        stack.enter_context(replace_attribute(device_mesh, "init_device_mesh", make_real_mesh))
        join_real_meshes = unset_fake_temporarily()(device_mesh.DeviceMesh._concatenate)
        of_meshes = staticmethod(join_real_meshes)
        stack.enter_context(replace_attribute(device_mesh.DeviceMesh, "_concatenate", of_meshes))
        # FSDP's marks for the profiler are operators, but launch no kernel on a GPU. They are skipped.
        stack.enter_context(replace_attribute(record_function, "__enter__", lambda mark: mark))
        stack.enter_context(replace_attribute(record_function, "__exit__", lambda *_: None))
        # Without this replacement FSDP would cut every rank's shard of every parameter, which takes minutes
        # for a thousand ranks.
        stack.enter_context(
            replace_attribute(_fsdp_param, "_chunk_with_empty", _cut_shard_of_first_rank)
        )
        # DTensor computes the shapes of whole tensors by these rules. They are not traced, since no worker
        # allocates them.
        rules = ShardingPropagator._propagate_tensor_meta_non_cached
        stack.enter_context(
            replace_attribute(ShardingPropagator, rules.__name__, _disable_current_modes()(rules))
        )
        if not on_cuda:
            for name in SCATTERS:
                if (scatter := getattr(dist, name, None)) is not None:
                    stack.enter_context(
                        replace_attribute(dist, name, partial(_scatter_like_gloo, scatter))
                    )
        if fused:
            stack.enter_context(replace_attribute(torch.optim, "SGD", make_fused_sgd))
        if counts_steps:
            # This module is imported first, since its import compiles the function that the following lines
            # replace.
            import_module("torch.distributed.optim")
            adam = import_module("torch.optim.adam")
            stack.enter_context(replace_attribute(adam, "_get_value", lambda _: 1.0))
        yield


@contextmanager
def disable_cpu_autocast() -> Iterator[None]:
    """Disable autocast on the CPU until the block ends."""
    with torch._C._ExcludeDispatchKeyGuard(_CPU_AUTOCAST):
        yield


def unregister_kernels(library: Library) -> None:
    """Remove the kernels of `library`, so that the kernels they replaced apply again."""
    library._destroy()


def _cut_shard_of_first_rank(tensor: Tensor, num_chunks: int, dim: int) -> list[Tensor]:
    """Return rank 0's shard of a tensor, which is the largest.

    The plan uses no other shard.
    """
    return [tensor.narrow(dim, 0, -(-tensor.size(dim) // num_chunks))]


def _scatter_like_gloo(
    scatter: Callable[..., Any], output: Tensor, input: Tensor, *args: Any, **kwargs: Any
) -> Any:
    """Reduce and scatter as gloo does: an asynchronous call keeps a copy of its input."""
    work = scatter(output, input, *args, **kwargs)
    return TorchReduction(work, input.clone()) if kwargs.get("async_op") else work


class TorchReduction(NamedTuple):
    """A collective in progress, which keeps its copied input for as long as it is referenced."""

    work: dist.Work
    copy: Tensor

    def wait(self) -> None:
        self.work.wait()


@register_op_impl(torch.ops.aten._fused_sgd_.default)
def _run_fused_sgd(
    _mode: FakeTensorMode, _op: Any, params: Any, grads: Any, momenta: Any, **options: Any
) -> None:
    """Stand in for SGD's fused kernel, which torch cannot run on fake tensors."""
    _check_fused_operands(options, params, grads, momenta)


@register_op_impl(torch.ops.aten._fused_adamw_.default)
def _run_fused_adamw(
    _mode: FakeTensorMode,
    _op: Any,
    params: Any,
    grads: Any,
    means: Any,
    squares: Any,
    _largest: Any,
    _steps: Any,
    **options: Any,
) -> None:
    """Stand in for AdamW's fused kernel, which torch cannot run on fake tensors.

    It does not support `amsgrad`.
    """
    _check_fused_operands(options, params, grads, means, squares)


def _check_fused_operands(options: dict[str, Any], params: Any, grads: Any, *moments: Any) -> None:
    """Raise RuntimeError for operands that the fused optimizer kernels on CUDA would reject.

    The kernels work in place, so that nothing is allocated. `moments` are those of the optimizer.

    Raises:
        RuntimeError: If the conditions of check_fast_path_restrictions in
            aten/src/ATen/native/ForeachUtils.h do not hold.
    """
    for lists in zip(params, grads, *filter(None, moments), strict=True):
        described = [
            (
                t.device,
                t.dtype,
                [(n, k) for n, k in zip(t.shape, t.stride(), strict=True) if n > 1],
            )
            for t in lists
        ]
        if any(d != described[0] for d in described[1:]):
            raise RuntimeError(
                "the fused kernel needs parameters, gradients and moments of equal device, dtype, "
                f"shape and stride, but got {described}"
            )
    for flag in (options.get("grad_scale"), options.get("found_inf")):
        if flag is not None and flag.device != params[0].device:
            raise RuntimeError(
                f"the fused kernel needs the loss scaler's tensors on {params[0].device}, like the "
                f"parameters, but they are on {flag.device}"
            )


def shorten_schedule(schedule: Any, microbatches: int, num_waiting_for_backward: int) -> None:
    """Limit one stage's schedule to few micro-batches, some of which wait for backward."""
    schedule._n_microbatches = microbatches
    schedule._num_stages = schedule._stage.stage_index + num_waiting_for_backward
