"""Records what operators allocate, compute and send, as a list of events.

The plan traces fake tensors (`fake.py`), which allocate nothing. Real tensors can be traced as well.
"""

from __future__ import annotations

import math
import weakref
from collections.abc import Collection, Iterable
from dataclasses import dataclass, field
from functools import partial
from itertools import accumulate
from typing import Any, NamedTuple

import torch
from torch.distributed.tensor import DTensor

from stratbench.extensions.plan.footprint.reductions import Reduction
from stratbench.extensions.plan.footprint.torch_internals import DEVICE_QUERY, FLOP_FORMULAS
from stratbench.extensions.plan.footprint.traffic import PARTS, compute_gloo_staging_bytes
from stratbench.telemetry.collective_count import detect_collective, iter_nested_tensors
from stratbench.telemetry.collectives import CollectiveCall
from stratbench.telemetry.shards import get_local_shard
from stratbench.workload.network.checkpointing import is_recomputing_block
from stratbench.workload.torch_internals import (
    CPU_ATTENTION_BACKWARD,
    FakeTensor,
    TorchDispatchMode,
    get_storage_key,
)

#: Storages of at most this many bytes are ignored. They include the loss scaler's scalars, which exist at
#: other times in the first step.
SCALAR_BYTES = 8


@dataclass
class Phase:
    """Events of a part of a step, such as forward, with what they compute and send."""

    name: str
    first_event: int  # number of the phase's first event
    operations: int = 0  # number of operations, about one kernel each; views do not count
    touched_bytes: int = 0  # bytes that the phase's operations read and write
    flops: int = 0
    attention_flops: int = 0  # part of `flops` in fused attention
    recomputed_flops: int = 0  # part of `flops` that checkpointed blocks compute again
    collectives: list[CollectiveCall] = field(default_factory=list)
    #: FLOPs and touched bytes of the phase up to the start of each of its collectives.
    flops_and_bytes_before_collectives: list[tuple[int, int]] = field(default_factory=list)
    #: Reductions that may need a buffer on CUDA, each with the number of the trace's events before it.
    reductions: list[tuple[int, Reduction]] = field(default_factory=list)


class TraceMark(NamedTuple):
    """A position in a trace: the number of events, collectives and reductions before it.

    `label` is `phase` at the beginning of a phase. Otherwise it names the part of equal block number
    `block` that begins or ends there.
    """

    label: str
    block: int | None
    events: int
    calls: int
    sums: int


class OperatorTrace(TorchDispatchMode):
    """Mode that logs each allocation, resize and free of a storage, and each collective.

    Attributes:
        events: Storage number and change in bytes of each event.
        tags: Purpose of a storage by number, if known; it may be set after the event.

    Args:
        round_bytes: Sizes are rounded up to multiples of this, as an allocator does.
        on_cpu: Whether to log temporary memory of CPU libraries: gloo's in collectives, oneDNN's in
            convolutions.
        on_host: Parts of memory that are not in the device's memory, and so in no sum unless it asks
            for them.
    """

    def __init__(
        self, round_bytes: int = 1, on_cpu: bool = False, on_host: Collection[str] = ()
    ) -> None:
        super().__init__()
        self.events: list[tuple[int, int]] = []
        self.tags: dict[int, str] = {}
        #: Numbers of the storages that FSDP allocates in separate streams for its collectives.
        self.fsdp_stream_storages: set[int] = set()
        self.marks: list[TraceMark] = []
        self.phases = [Phase("setup", 0)]
        self._round_bytes, self._on_cpu, self._on_host = round_bytes, on_cpu, on_host
        # Existing storages by address: their number, bytes and weak reference.
        self._known: dict[int, list[Any]] = {}
        self._count = 0

    # --- phases, marks and purposes ----------------------------------------------------------------

    def begin_phase(self, phase: str) -> None:
        """Start a named phase, to which the following events belong."""
        self.add_mark("phase")
        self.phases.append(Phase(phase, len(self.events)))

    def add_mark(self, label: str, block: int | None = None) -> None:
        """Store the trace's current position as a mark."""
        self.marks.append(self.make_mark(label, block))

    def make_mark(self, label: str = "", block: int | None = None) -> TraceMark:
        """Return the trace's current position as a mark."""
        calls = sum(len(phase.collectives) for phase in self.phases)
        sums = sum(len(phase.reductions) for phase in self.phases)
        return TraceMark(label, block, len(self.events), calls, sums)

    def set_purpose_of_storages(self, purpose: str, tensors: Iterable[torch.Tensor | None]) -> None:
        """Set the purpose of the tensors' storages. Unknown storages are logged from now on."""
        for t in tensors:
            if t is not None:
                self.tags[self._register_storage(get_local_shard(t))] = purpose

    # --- logging of operators --------------------------------------------------------------------

    def __enter__(self) -> OperatorTrace:
        # FSDP resizes the storages of its gathered parameters, which operators do not show.
        self._resize = original = torch.UntypedStorage.resize_

        def resize_(storage: torch.UntypedStorage, n_bytes: int) -> Any:
            result = original(storage, n_bytes)
            if (entry := self._known.get(get_storage_key(storage))) is not None:
                self._log_size_change(entry, storage.size())
                self.tags.setdefault(entry[0], "gathered")
            return result

        torch.UntypedStorage.resize_ = resize_
        return super().__enter__()

    def __exit__(self, *error: Any) -> None:
        torch.UntypedStorage.resize_ = self._resize
        super().__exit__(*error)

    def __torch_dispatch__(self, op: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        # C++ asks fake tensors for their device several times per operation. No kernel is launched.
        if op is DEVICE_QUERY:
            return FakeTensor.__torch_dispatch__(op, types, args)
        if any(t is DTensor for t in types):
            return NotImplemented  # DTensor then calls this mode with its local tensors
        kwargs = kwargs or {}
        collective = self._log_collective(op, args, kwargs)
        out = op(*args, **kwargs)
        made = [self._register_storage(t) for t in iter_nested_tensors(out)]
        phase = self.phases[-1]
        reached = phase.flops, phase.touched_bytes
        if not op.is_view:
            phase.operations += 1
            phase.touched_bytes += sum(t.nbytes for t in iter_nested_tensors((args, kwargs, out)))
            if op.overloadpacket in FLOP_FORMULAS:
                flops = FLOP_FORMULAS[op.overloadpacket](*args, **kwargs, out_val=out)
                phase.flops += flops
                phase.attention_flops += flops * ("attention" in op.__name__)
                phase.recomputed_flops += flops * is_recomputing_block()
        if self._on_cpu and op.overloadpacket in _CONVOLUTIONS:
            for copies_bytes in _CONVOLUTIONS[op.overloadpacket](args, out):
                self._log_temporary_allocations("scratch", copies_bytes)
        if not self._on_cpu and op.overloadpacket is CPU_ATTENTION_BACKWARD:
            self._log_temporary_allocations("scratch", _list_flash_attention_buffer_bytes(args[1]))
        if not self._on_cpu and op.overloadpacket in _SUMS:
            reduction = _SUMS[op.overloadpacket](args)
            if reduction is not None:
                phase.reductions.append((len(self.events), reduction))
        if op.namespace == "fsdp":
            self._tag_fsdp_buffers(op.__name__, args, kwargs, made)
        if collective is not None:
            phase.collectives.append(collective)
            phase.flops_and_bytes_before_collectives.append(reached)
        return out

    def _log_collective(self, op: Any, args: Any, kwargs: Any) -> CollectiveCall | None:
        """Log the memory that a collective takes, and return it. None for other operators."""
        collective = detect_collective(op, args, kwargs)
        if collective is None:
            return None
        if collective.collective_name in ("all_gather", "reduce_scatter"):
            for t in iter_nested_tensors((args, kwargs)):
                self.tags.setdefault(self._register_storage(t), "communication")
        if self._on_cpu:
            self._log_temporary_allocations("staging", [compute_gloo_staging_bytes(collective)])
        return collective

    def _tag_fsdp_buffers(self, name: str, args: Any, kwargs: Any, new_storages: list[int]) -> None:
        match name.partition(".")[0]:
            case "all_gather_copy_in":
                self.tags.update(dict.fromkeys(new_storages, "communication"))
                self.fsdp_stream_storages.update(new_storages)
            case "chunk_cat":  # copies full gradients into the tensor that is scattered
                for t in iter_nested_tensors(args):
                    self.tags.setdefault(self._register_storage(t), "gathered")
                scattered = [self._register_storage(t) for t in iter_nested_tensors(kwargs)]
                self.tags.update(dict.fromkeys(scattered, "communication"))
                self.fsdp_stream_storages.update(scattered)

    def _log_temporary_allocations(self, purpose: str, sizes_bytes: list[int]) -> None:
        """Log allocations that exist together while one operator runs."""
        numbers = range(self._count + 1, self._count + 1 + len(sizes_bytes))
        self._count += len(sizes_bytes)
        self.tags.update(dict.fromkeys(numbers, purpose))
        made = list(zip(numbers, sizes_bytes, strict=True))
        self.events += made
        self.events += [(number, -n_bytes) for number, n_bytes in reversed(made)]

    def _register_storage(self, tensor: torch.Tensor) -> int:
        """Return the number of the tensor's storage, and log its size if that has changed."""
        storage = tensor.untyped_storage()
        key = get_storage_key(storage)
        entry = self._known.get(key)
        if entry is None:
            self._count += 1
            entry = [self._count, 0, weakref.ref(storage, partial(self._log_freed_storage, key))]
            self._known[key] = entry
        self._log_size_change(entry, storage.size())
        return entry[0]

    def _log_size_change(self, storage_entry: list[Any], n_bytes: int) -> None:
        if n_bytes <= SCALAR_BYTES:
            n_bytes = 0
        n_bytes = -(-n_bytes // self._round_bytes) * self._round_bytes
        if n_bytes != storage_entry[1]:
            self.events.append((storage_entry[0], n_bytes - storage_entry[1]))
            storage_entry[1] = n_bytes

    def _log_freed_storage(self, address_key: int, _: object) -> None:
        number, n_bytes, _reference = self._known.pop(address_key)
        if n_bytes:
            self.events.append((number, -n_bytes))

    # --- results of the trace --------------------------------------------------------------------

    def list_live_bytes_after_events(self, first_event: int, last_event: int) -> list[int]:
        """Return the device's allocated bytes after each event, from one number to another."""
        away = {number for number, part in self.tags.items() if part in self._on_host}
        changes = (0 if number in away else n for number, n in self.events[:last_event])
        return list(accumulate(changes, initial=0))[first_event:]

    def find_max_fsdp_stream_bytes(self, first_event: int, last_event: int) -> int:
        """Return the maximum bytes of FSDP's communication buffers between two events."""
        changes = (
            n if number in self.fsdp_stream_storages else 0
            for number, n in self.events[:last_event]
        )
        return max(list(accumulate(changes, initial=0))[first_event:])

    def get_device_bytes_by_purpose(self, num_events: int) -> dict[str, int]:
        """Return the bytes on the device after the first `num_events` events, by purpose."""
        parts = self._get_all_bytes_by_purpose(num_events)
        return parts | dict.fromkeys(self._on_host, 0)

    def get_host_bytes_by_purpose(self, num_events: int) -> dict[str, int]:
        """Return the bytes on the host after the first `num_events` events, by purpose."""
        parts = self._get_all_bytes_by_purpose(num_events)
        return {part: parts[part] for part in self._on_host}

    def _get_all_bytes_by_purpose(self, num_events: int) -> dict[str, int]:
        sizes: dict[int, int] = {}
        born: dict[int, int] = {}
        for i, (number, change) in enumerate(self.events[:num_events]):
            sizes[number] = sizes.get(number, 0) + change
            born.setdefault(number, i)
        parts = dict.fromkeys(PARTS, 0)
        for number, n_bytes in sizes.items():
            parts[self._find_storage_purpose(number, born[number])] += n_bytes
        return parts

    def get_phase_name_of_event(self, event: int) -> str:
        """Return the name of the phase that an event belongs to."""
        return [p.name for p in self.phases if p.first_event <= event][-1]

    def _find_storage_purpose(self, storage_number: int, first_event: int) -> str:
        if storage_number in self.tags:
            return self.tags[storage_number]
        in_forward = self.get_phase_name_of_event(first_event) in ("forward", "evaluate")
        return "activations" if in_forward else "temporaries"


def _list_convolution_forward_copy_bytes(args: Any, out: torch.Tensor) -> list[list[int]]:
    """Return the bytes of oneDNN's copies in the forward of a convolution.

    The copies are of input, weight and result, in oneDNN's blocked layout.
    """
    return [[args[0].nbytes, args[1].nbytes, out.nbytes]]


def _list_convolution_backward_copy_bytes(args: Any, out: Any) -> list[list[int]]:
    """Return the bytes of oneDNN's copies in the backward of a convolution.

    The copies are for the input's gradient and for the weight's.
    """
    grad, x, weight = (t.nbytes for t in args[:3])
    return [[grad, weight, x], [x, grad, weight]] if out[0] is not None else [[x, grad, weight]]


_CONVOLUTIONS = {
    torch.ops.aten.convolution: _list_convolution_forward_copy_bytes,
    torch.ops.aten.convolution_backward: _list_convolution_backward_copy_bytes,
}


def _make_sum_reduction(args: Any) -> Reduction | None:
    x, dims = args[0], args[1] if len(args) > 1 else None
    return _make_reduction(x, {d % x.dim() for d in dims or range(x.dim())}) if x.dim() else None


def _make_bias_reduction(args: Any) -> Reduction | None:
    """Return the reduction that computes the gradient of a convolution's bias.

    It is None if the bias needs no gradient, or the reduction no buffer.
    """
    grad, wanted = args[0], args[-1]
    return _make_reduction(grad, {d for d in range(grad.dim()) if d != 1}) if wanted[2] else None


def _make_reduction(x: torch.Tensor, dims: set[int]) -> Reduction | None:
    x = get_local_shard(x)
    return Reduction.from_tensor_layout(
        x.shape, x.stride(), dims, x.storage_offset(), x.element_size()
    )


_SUMS = {
    torch.ops.aten.sum: _make_sum_reduction,
    torch.ops.aten.mean: _make_sum_reduction,
    torch.ops.aten.convolution_backward: _make_bias_reduction,
}


def _list_flash_attention_buffer_bytes(query: torch.Tensor) -> list[int]:
    """Return the bytes of each buffer of flash attention in backward.

    The buffers are the query's padded gradient, and row sums. Both have 32 bits, as in PyTorch 2.11 (mha_bwd,
    transformers/cuda/flash_attn/flash_api.cpp). Flash attention only supports 16-bit inputs.
    """
    if query.element_size() != 2:
        return [0, 0]
    *many, time, width = query.shape
    rows = math.prod(many) * -(-time // 128) * 128
    return [4 * rows * -(-width // 32) * 32, 4 * rows]
