"""Saves the state that a warm-up changes, and restores it exactly."""

from __future__ import annotations

from collections.abc import Sequence
from copy import deepcopy
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor

from stratbench.telemetry.memory import get_optimizer_state
from stratbench.telemetry.shards import get_local_shard
from stratbench.workload.network.changes import Attributes


class Stateful(Protocol):
    """An object whose state can be copied and loaded, such as torch's schedulers and samplers."""

    def state_dict(self) -> dict[str, Any]: ...

    def load_state_dict(self, state_dict: dict[str, Any]) -> None: ...


class _HostCopy(NamedTuple):
    """Copy of a tensor in host memory. So the warm-up needs no more device memory.

    Attributes:
        copy: The copy.
        device: Device of the original tensor.
    """

    copy: Tensor
    device: torch.device


class SavedState:
    """Copy of a training's state in host memory: tensors, optimizer and other objects.

    `restore_into` makes the originals equal to the copies again, bit for bit.
    """

    def __init__(
        self,
        tensors: Sequence[Tensor],
        optimizer: torch.optim.Optimizer | None,
        extra: Sequence[Tensor | Stateful],
        attributes: Attributes | None = None,
    ) -> None:
        """Copy to host memory the present state of the tensors, the optimizer and other objects.

        Args:
            tensors: Tensors to copy.
            optimizer: Optimizer whose state to copy.
            extra: Further tensors, and objects with a state.
            attributes: Present values of the model's attributes, or None if its forward changes none.
        """
        self._attributes = attributes
        self._tensors = [_copy_to_host(get_local_shard(t)).copy for t in tensors]
        self._extra = [
            _copy_to_host(e) if torch.is_tensor(e) else deepcopy(e.state_dict()) for e in extra
        ]
        self._states: dict[Any, dict[str, Any]] = {}
        self._groups: list[dict[str, Any]] = []
        if optimizer is not None:
            self._states = {
                p: {name: _copy_to_host(value) for name, value in entry.items()}
                for p, entry in get_optimizer_state(optimizer).items()
            }
            self._groups = [
                deepcopy({name: value for name, value in group.items() if name != "params"})
                for group in optimizer.param_groups
            ]

    def restore_into(
        self,
        tensors: Sequence[Tensor],
        optimizer: torch.optim.Optimizer | None,
        extra: Sequence[Tensor | Stateful],
    ) -> None:
        """Copy the saved state back into the tensors, the optimizer and other objects.

        State that the optimizer has created since then, such as moments of its first step, is removed.

        Args:
            tensors: The tensors that were saved.
            optimizer: The optimizer that was saved.
            extra: The further tensors and objects that were saved.

        Raises:
            ValueError: If `extra` has another length than when it was saved.
        """
        if len(extra) != len(self._extra):
            raise ValueError(
                f"the strategy's extra_state() returned {len(self._extra)} entries at the save and "
                f"{len(extra)} at the restore; return the same number always, and reset other state in "
                "reset()"
            )
        if self._attributes is not None:
            self._attributes.restore_user_attributes()
        with torch.no_grad():
            for now, then in zip(tensors, self._tensors, strict=True):
                get_local_shard(now).copy_(then)
            for now, then in zip(extra, self._extra, strict=True):
                if torch.is_tensor(now):
                    now.copy_(then.copy)
                else:
                    now.load_state_dict(deepcopy(then))
            if optimizer is not None:
                self._restore_optimizer(optimizer)

    def _restore_optimizer(self, optimizer: torch.optim.Optimizer) -> None:
        state = get_optimizer_state(optimizer)
        for p in [p for p in state if p not in self._states]:
            del state[p]
        for p, entry in self._states.items():
            now = state.get(p, {})
            state[p] = {name: _restore_value(then, now.get(name)) for name, then in entry.items()}
        for group, then in zip(optimizer.param_groups, self._groups, strict=True):
            parameters = group["params"]
            group.clear()
            group.update(deepcopy(then) | {"params": parameters})


def _copy_to_host(value: Any) -> Any:
    if not torch.is_tensor(value):
        return deepcopy(value)
    return _HostCopy(value.detach().to("cpu", copy=True), value.device)


def _restore_value(saved: Any, present: Any) -> Any:
    """Return a saved value, copied into the present tensor if possible.

    A copy is possible if the present tensor has the same shape, dtype and device.
    """
    if not isinstance(saved, _HostCopy):
        return deepcopy(saved)
    if torch.is_tensor(present) and (present.shape, present.dtype, present.device) == (
        saved.copy.shape,
        saved.copy.dtype,
        saved.device,
    ):
        return present.copy_(saved.copy)
    return saved.copy.to(saved.device, copy=True)
