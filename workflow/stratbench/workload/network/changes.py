"""Detects changes of a model's parameters, buffers and attributes, and undoes them."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Mapping
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from stratbench.workload.torch_internals import (
    TorchDispatchMode,
    get_buffers,
    get_schema_arguments,
    get_storage_key,
    get_write_count,
    has_mutable_argument,
    iter_written_tensors,
)

#: Names of the attributes that every nn.Module has. All other attributes are the user's.
_OWN = frozenset(vars(nn.Module()))


class Attributes:
    """A copy of a model's attributes, except parameters, buffers and modules, to restore them.

    Args:
        model: The model.
        names: Paths of the attributes to copy, as `list_changed_attribute_paths` returns them, or None for
            all.
    """

    def __init__(self, model: nn.Module, names: Iterable[str] | None = None) -> None:
        self._names = None if names is None else frozenset(names)
        self._modules = {
            prefix: (m, _get_user_attributes(m)) for prefix, m in model.named_modules()
        }
        self._kept = {
            (prefix, key): _SavedValue(value)
            for prefix, (_, own) in self._modules.items()
            for key, value in own.items()
            if self._is_attribute_included(prefix, key)
        }

    def _is_attribute_included(self, prefix: str, key: str) -> bool:
        return self._names is None or _join_attribute_path(prefix, key) in self._names

    def list_changed_attribute_paths(self) -> list[str]:
        """Return the paths of the attributes that were changed, added or removed since the copy."""
        return [
            _join_attribute_path(prefix, key)
            for prefix, (module, own) in self._modules.items()
            for key in dict.fromkeys((*own, *_get_user_attributes(module)))
            if self._is_attribute_included(prefix, key)
            and self._has_attribute_changed(prefix, key, _get_user_attributes(module))
        ]

    def _has_attribute_changed(
        self, prefix: str, key: str, current_attributes: Mapping[str, Any]
    ) -> bool:
        saved = self._kept.get((prefix, key))
        return (
            saved is None
            or key not in current_attributes
            or saved.differs_from(current_attributes[key])
        )

    def restore_user_attributes(self) -> None:
        """Restore each attribute to the object that was copied, and the content of this object."""
        for prefix, (module, own) in self._modules.items():
            for key in [
                k
                for k in _get_user_attributes(module)
                if k not in own and self._is_attribute_included(prefix, k)
            ]:
                del vars(module)[key]
        for (prefix, key), saved in self._kept.items():
            vars(self._modules[prefix][0])[key] = saved.restore_value()


def _get_user_attributes(module: nn.Module) -> dict[str, Any]:
    """Return the attributes of a module that its user's code has set, except submodules."""
    return {k: v for k, v in vars(module).items() if k not in _OWN and not isinstance(v, nn.Module)}


def _join_attribute_path(prefix: str, key: str) -> str:
    return f"{prefix}.{key}" if prefix else key


class _SavedValue:
    """An attribute's value, and a copy of the value's content, to restore the content in place."""

    def __init__(self, value: Any) -> None:
        self.value, self._content = value, None
        if isinstance(value, Tensor) and not isinstance(value, nn.Parameter):
            self._version = get_write_count(value)
            self._content = value.detach().clone()
        elif isinstance(value, np.ndarray):
            self._content = value.copy()
        elif isinstance(value, list | deque):
            self._content = [_SavedValue(v) for v in value]
        elif isinstance(value, dict):
            self._content = {k: _SavedValue(v) for k, v in value.items()}
        elif isinstance(value, set):
            self._content = set(value)

    def differs_from(self, current_value: Any) -> bool:
        content = self._content
        if content is None:
            plain = isinstance(current_value, bool | int | float | complex | str | tuple)
            return current_value is not self.value and not (
                plain and type(current_value) is type(self.value) and current_value == self.value
            )
        if current_value is not self.value:
            return True
        if isinstance(current_value, Tensor):
            return get_write_count(current_value) != self._version
        if isinstance(current_value, np.ndarray):
            return not np.array_equal(current_value, content)
        if isinstance(current_value, set):
            return current_value != content
        if len(current_value) != len(content):
            return True
        if isinstance(current_value, dict):
            return any(
                k not in content or content[k].differs_from(v) for k, v in current_value.items()
            )
        return any(k.differs_from(v) for k, v in zip(content, current_value, strict=True))

    def restore_value(self) -> Any:
        value, content = self.value, self._content
        if isinstance(content, Tensor):
            if get_write_count(value) != self._version:
                with torch.no_grad():
                    value.copy_(content)
        elif isinstance(content, np.ndarray):
            value[...] = content
        elif isinstance(content, list):
            inner = [k.restore_value() for k in content]
            value.clear()
            value.extend(inner)
        elif isinstance(content, dict):
            inner = {key: k.restore_value() for key, k in content.items()}
            value.clear()
            value.update(inner)
        elif isinstance(content, set):
            value.clear()
            value.update(content)
        return value


class Changes(TorchDispatchMode):
    """Context manager that records how a model's parameters, buffers and attributes change.

    A parameter is copied before an operator writes to its memory, also by `.data` or a view. Buffers and
    attributes are copied at the start. `restore_model` restores all of them.
    """

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model
        #: Whether an operator has drawn random numbers. With fake tensors, generators do not show this.
        self.draws = False
        self._by_storage: dict[int, list[tuple[str, nn.Parameter]]] = {}
        for name, p in model.named_parameters():
            self._by_storage.setdefault(get_storage_key(p.untyped_storage()), []).append((name, p))
        self._parameters: dict[str, tuple[nn.Parameter, Tensor]] = {}
        self._buffers = [
            (
                module,
                key,
                _join_attribute_path(prefix, key),
                b,
                b.detach().clone(),
                get_write_count(b),
            )
            for prefix, module in model.named_modules()
            for key, b in module.named_buffers(recurse=False)
        ]
        self._attributes = Attributes(model)

    @property
    def overwritten_parameters(self) -> list[str]:
        """Names of the model's parameters that were changed in place."""
        return list(self._parameters)

    @property
    def written_buffers(self) -> list[str]:
        """Names of the model's buffers that were changed in place."""
        return [
            name
            for *_, name, tensor, _copy, version in self._buffers
            if get_write_count(tensor) != version
        ]

    @property
    def replaced_buffers(self) -> list[str]:
        """Names of the model's buffers that were replaced by other tensors."""
        return [
            name
            for module, key, name, tensor, *_ in self._buffers
            if get_buffers(module).get(key) is not tensor
        ]

    @property
    def changed_attributes(self) -> list[str]:
        """Paths of the model's other attributes that were changed."""
        return self._attributes.list_changed_attribute_paths()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if torch.Tag.nondeterministic_seeded in func.tags:
            self.draws = self.draws or _operator_draws_random_numbers(func, args, kwargs)
        for t in iter_written_tensors(func, args, kwargs) if has_mutable_argument(func) else ():
            for name, p in self._by_storage.get(get_storage_key(t.untyped_storage()), ()):
                if name not in self._parameters:
                    self._parameters[name] = p, p.detach().clone()
        return func(*args, **kwargs)

    def copy_parameters(self, names: Iterable[str]) -> dict[str, Tensor]:
        """Return copies of the current values of the named parameters, by name."""
        by_name = dict(self.model.named_parameters())
        return {name: by_name[name].detach().clone() for name in names}

    def restore_model(self, float_buffers: bool = True, other_state: bool = True) -> None:
        """Restore the model's parameters and, if requested, its buffers and other attributes.

        Args:
            float_buffers: Whether to restore buffers of real numbers.
            other_state: Whether to restore other buffers, replaced buffers and attributes.
        """
        with torch.no_grad():
            for p, before in self._parameters.values():
                p.copy_(before)
            for i, (module, key, name, tensor, before, _version) in enumerate(self._buffers):
                if other_state:
                    get_buffers(module)[key] = tensor
                if float_buffers if tensor.is_floating_point() else other_state:
                    # Restore each buffer, even if no write was counted: BatchNorm changes buffers without
                    # counting.
                    tensor.copy_(before)
                    self._buffers[i] = (module, key, name, tensor, before, get_write_count(tensor))
        if other_state:
            self._attributes.restore_user_attributes()


def _operator_draws_random_numbers(func: Any, args: Any, kwargs: Mapping[str, Any]) -> bool:
    """Return whether an operator draws random numbers with these arguments.

    Dropout with a probability of 0 and evaluation draw none.
    """
    for i, argument in enumerate(get_schema_arguments(func)):
        # PyTorch leaves out arguments that have their default, such as a probability of 0.5.
        given = kwargs.get(argument.name, argument.default_value)
        value = args[i] if i < len(args) else given
        if argument.name in ("dropout_p", "p"):
            return isinstance(value, Tensor) or value != 0
        if argument.name in ("train", "training"):
            return bool(value)
    return True
