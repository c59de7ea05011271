"""Copies of a CUDA worker's gradients to the host during backward, and of new weights to the device.

Gradients become final in about the reverse order of the forward. Once all gradients of a bucket are final, a
side stream copies the bucket to pinned host memory, and its shards are sent. With a loss scale, the side
stream first divides the bucket by the scale and looks for overflows in the same pass. The result of this
check is copied after the last bucket. A second side stream copies weights to the device, shard by shard,
because a device can copy in both directions at once.
"""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable
from typing import Any

import torch

from stratbench.extensions.servers.ps.flat import FlatSpace, ShardBounds, make_host_scalar
from stratbench.extensions.servers.ps.scale import LossScale, Unscaler

#: Approximate bytes of gradients that one copy from device to host moves.
BUCKET_BYTES = 16 << 20


def group_shards_into_buckets(bounds: ShardBounds, itemsize: int) -> list[tuple[int, int]]:
    """Group successive shards into buckets of about `BUCKET_BYTES`.

    Args:
        bounds: First element and end of each shard in the flat tensor.
        itemsize: Bytes per element.

    Returns:
        First shard and end of each bucket, in ascending order.
    """
    numel = bounds[0][1] - bounds[0][0]
    per_bucket = max(1, BUCKET_BYTES // (numel * itemsize))
    return [(k, min(k + per_bucket, len(bounds))) for k in range(0, len(bounds), per_bucket)]


class Countdown:
    """Counts the gradients that each bucket still lacks, so that it is known when a bucket is complete.

    `spans` has the first element and the end of each parameter in the flat tensor, and `edges` those of each
    bucket.
    """

    def __init__(self, spans: list[tuple[int, int]], edges: list[tuple[int, int]]) -> None:
        self._touching = [
            [b for b, (low, high) in enumerate(edges) if start < high and low < stop]
            for start, stop in spans
        ]
        self._total = [0] * len(edges)
        for touched in self._touching:
            for bucket in touched:
                self._total[bucket] += 1
        self.reset()

    def reset(self) -> None:
        """Start a new step, in which no gradient is final yet."""
        self._left = list(self._total)
        self._final: set[int] = set()

    def mark_gradient_final(self, parameter: int) -> list[int]:
        """Mark a parameter's gradient as final, and return the buckets that it completes.

        Raises:
            RuntimeError: If the gradient was final already in this step.
        """
        if parameter in self._final:
            raise RuntimeError(
                "backward changed a gradient after the gradient was sent; use activation checkpointing with "
                "use_reentrant=False"
            )
        self._final.add(parameter)
        complete = []
        for bucket in self._touching[parameter]:
            self._left[bucket] -= 1
            if self._left[bucket] == 0:
                complete.append(bucket)
        return complete


class Staging:
    """Copies a CUDA worker's flat tensors to pinned tensors on the host, and back."""

    def __init__(
        self,
        flat: FlatSpace,
        bounds: ShardBounds,
        push_buffers: Callable[[], None],
        push_shards: Callable[[int, int], None],
        end_push: Callable[[bool], None],
        scale: LossScale | None,
        weigh: Callable[[torch.Tensor], None] = lambda weight: None,
    ) -> None:
        """Allocate memory on the host, and register hooks that run when a gradient is final.

        Args:
            flat: Flat tensors of the model.
            bounds: First element and end of each shard.
            push_buffers: Sends the float buffers, once they are on the host.
            push_shards: Sends the shards from its first argument to before its second, once they are on the
                host.
            end_push: Called at the end of a push with whether a gradient overflowed, if there is a `scale`.
            scale: Loss scale, or None.
            weigh: Called before the gradients are sent with the weight of the push, once it is on the host.
        """
        #: Weight of the next push in an average of pushes, a scalar on the device. None: pushes are not
        #: weighted.
        self.weight: torch.Tensor | None = None
        self._set_weight, self._own_weight = weigh, make_host_scalar(flat.device, torch.float64)
        self.armed = self.overflowed = False
        self._flat, self._push_shards, self._push_buffers = flat, push_shards, push_buffers
        self._end_push, self._scale = end_push, scale
        self._unscaler = None if scale is None else Unscaler(flat.device)
        # The host's copy of the flag that says whether a gradient overflowed.
        self._found = make_host_scalar(flat.device)
        self._buckets = group_shards_into_buckets(bounds, flat.grads.element_size())
        self._edges = [(bounds[a][0], bounds[b - 1][1]) for a, b in self._buckets]
        spans = [
            (start, start + p.numel())
            for p, start in zip(flat.parameters, flat.starts, strict=True)
        ]
        self._countdown = Countdown(spans, self._edges)
        self._stream = torch.cuda.Stream(flat.device)
        self._back = torch.cuda.Stream(flat.device)
        self._arrivals = threading.Lock()  # guards `_accepting` and `_early`
        self._accepting = False
        # Ranges (start, stop) of weights that arrived while copies to the device were not allowed.
        self._early: list[tuple[int, int]] = []
        self._copied: queue.SimpleQueue[Any] = queue.SimpleQueue()
        self._waiting: set[int] = set()  # buckets whose copy to the host has not been started
        self._error: Exception | None = None
        self._hooks = [
            parameter.register_post_accumulate_grad_hook(
                lambda _, number=number: self._handle_final_gradient(number)
            )
            for number, parameter in enumerate(flat.parameters)
        ]

    def close(self) -> None:
        """Remove the hooks, so that another channel may copy these gradients."""
        self.armed = False
        for hook in self._hooks:
            hook.remove()

    def copy_buckets_during_backward(self) -> None:
        """Copy each bucket of gradients to the host during the next backward.

        A bucket is copied as soon as its gradients are final.
        """
        self._begin_push()
        self.armed = True

    def _begin_push(self) -> None:
        self._countdown.reset()
        self._waiting = set(range(len(self._buckets)))
        self._error = None
        if self._unscaler is not None:
            self.overflowed = False
            with torch.cuda.stream(self._stream):
                self._unscaler.begin_step(self._scale)
        self._sender = threading.Thread(target=self._send_copied_tensors, daemon=True)
        self._sender.start()
        if self.weight is not None:
            self._copy_tensor_to_host(
                self.weight, self._own_weight, lambda: self._set_weight(self._own_weight)
            )
        # Running statistics are final after forward. So they are copied before backward.
        self._copy_tensor_to_host(self._flat.buffers, self._flat.host.buffers, self._push_buffers)

    def _handle_final_gradient(self, parameter: int) -> None:
        if self.armed:
            for bucket in self._countdown.mark_gradient_final(parameter):
                self._copy_bucket(bucket)

    def _copy_bucket(self, bucket: int) -> None:
        low, high = self._edges[bucket]
        first, stop = self._buckets[bucket]
        self._waiting.discard(bucket)
        self._copy_tensor_to_host(
            self._flat.grads[low:high],
            self._flat.host.grads[low:high],
            lambda: self._push_shards(first, stop),
            self._unscaler,
        )

    def _copy_tensor_to_host(
        self,
        source: torch.Tensor,
        target: torch.Tensor,
        send: Callable[[], None],
        unscaler: Unscaler | None = None,
    ) -> None:
        """Copy a tensor to the host as soon as the current stream has computed it.

        The sending thread calls `send` once the copy is complete.
        """
        self._stream.wait_stream(torch.cuda.current_stream(self._flat.device))
        with torch.cuda.stream(self._stream):
            if unscaler is not None:
                unscaler.unscale(source)
            target.copy_(source, non_blocking=True)
            # With blocking=True, a thread that waits for this event does not keep a CPU core busy.
            arrived = torch.cuda.Event(blocking=True)
            arrived.record()
        self._copied.put((arrived, send))

    def _send_copied_tensors(self) -> None:
        try:
            # A new thread has device 0 as its current device.
            torch.cuda.set_device(self._flat.device)
            while (item := self._copied.get()) is not None:
                arrived, send = item
                arrived.synchronize()
                send()
        except Exception as error:
            self._error = error  # the method `finish_push` raises this error in the worker's thread

    def finish_push(self) -> None:
        """Copy the buckets that were not copied during backward, and wait until all are sent."""
        self.start_accepting_weights()  # backward no longer needs the old weights
        if not self.armed:
            self._begin_push()
        self.armed = False
        for bucket in sorted(self._waiting, reverse=True):
            self._copy_bucket(bucket)
        if self._unscaler is not None:
            self._copy_tensor_to_host(
                self._unscaler.overflow_flag, self._found, self._report_overflow
            )
        self._copied.put(None)
        self._sender.join()
        # After an error, the sending thread leaves items in the queue.
        while not self._copied.empty():
            self._copied.get()
        if self._error is not None:
            raise self._error

    def _report_overflow(self) -> None:
        self.overflowed = bool(self._found)
        self._end_push(self.overflowed)

    def copy_initial_tensors_to_host(self) -> None:
        """Copy the model's initial weights and float buffers to the host."""
        self._flat.host.weights.copy_(self._flat.weights)
        self._flat.host.buffers.copy_(self._flat.buffers)

    def start_accepting_weights(self) -> None:
        """Allow that weights are copied to the device as soon as they arrive.

        Copies start after the current stream's work. Call this method when no kernel reads the old weights
        any more: after a backward, or before the first pull.
        """
        self._back.wait_stream(torch.cuda.current_stream(self._flat.device))
        with self._arrivals:
            self._accepting = True
            for start, stop in self._early:
                self._start_weight_copy(start, stop)
            self._early.clear()

    def copy_weights_to_device(self, start: int, stop: int) -> None:
        """Copy weights `start` to `stop` - 1 from the host to the device.

        While a backward may read the old weights, the next `start_accepting_weights` makes the copy.
        Any thread may call this method. The host does not wait.
        """
        with self._arrivals:
            if self._accepting:
                self._start_weight_copy(start, stop)
            else:
                self._early.append((start, stop))

    def _start_weight_copy(self, start: int, stop: int) -> None:
        torch.cuda.set_device(self._flat.device)  # a new thread has device 0 as its current device
        with torch.cuda.stream(self._back):
            self._flat.weights[start:stop].copy_(
                self._flat.host.weights[start:stop], non_blocking=True
            )

    def make_stream_wait_for_weights(self) -> None:
        """Make the current stream wait until the arrived weights are on the device.

        The host does not wait.
        The host's copy is not written again before the next push, whose gradients need these weights.
        """
        with self._arrivals:
            self._accepting = False
        torch.cuda.current_stream(self._flat.device).wait_stream(self._back)
