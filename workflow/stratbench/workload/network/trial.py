"""One step of a network on two samples, before anything is trained: what it shows that nobody has said.

Jobs and the check of a study take it, on real tensors or on fake ones. Importing this file imports torch.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import (
    DataDependentOutputException,
    DynamicOutputShapeException,
    UnsupportedOperatorException,
)
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_leaves

from stratbench.workload.tasks import Classification
from stratbench.workload.users_code import ModelError, error_text

#: Samples of the step; BatchNorm cannot normalise one.
SAMPLES = 2
#: What of a tensor gives Python a value that forward may branch on.
READS_VALUES = frozenset(
    {Tensor.item, Tensor.tolist, Tensor.numpy, Tensor.__bool__, Tensor.__int__, Tensor.__float__}
    | {Tensor.__index__, torch.equal, torch.allclose, Tensor.equal, Tensor.allclose}
)
#: What fake tensors raise where they would need values that they do not have.
NO_VALUES = (
    DataDependentOutputException, DynamicOutputShapeException, UnsupportedOperatorException,
)  # fmt: skip


class NeedsData(ModelError):
    """The network asks for the values of tensors, and these are fake ones, which have none."""


@dataclass(frozen=True)
class Trial:
    """What the step showed. Parameters and buffers are told by their names in the network.

    `unused`: trainable parameters that got no gradient. `sparse`: those whose gradient is sparse.
    `uncalled`: parameters of a shard group that were read before a module of that group was called;
    `late`: after all of them had been. `written`: buffers that forward changed in place; `replaced`:
    buffers in whose place it put another tensor; `overwritten`: parameters that it changed.
    `by_chance`: modules that not every forward calls (`modules_by_chance`). `unopened`: labels of shard
    groups of which forward called no module; `reads_values`: whether it read values of tensors, so that
    other data may make it call others. `in_backward`: the numbers of those that it called, in this order,
    and whether backward comes to them: not where all before them is frozen, and they are themselves.
    """

    unused: tuple[str, ...] = ()
    sparse: tuple[str, ...] = ()
    uncalled: tuple[str, ...] = ()
    late: tuple[str, ...] = ()
    written: tuple[str, ...] = ()
    replaced: tuple[str, ...] = ()
    overwritten: tuple[str, ...] = ()
    by_chance: tuple[str, ...] = ()
    unopened: tuple[str, ...] = ()
    reads_values: bool = False
    in_backward: dict[int, bool] = field(default_factory=dict)
    #: Labels of shard groups that give a view of a tensor, which forward then changes in place.
    written_views: tuple[str, ...] = ()

    @property
    def skipped(self) -> tuple[str, ...]:
        """What is known to get no gradient in some steps: parameters, and modules that may not be called."""
        return self.unused + self.by_chance

    @classmethod
    def from_dict(cls, fields: Mapping[str, Any]) -> Trial:
        """The inverse of `dataclasses.asdict`, also after JSON."""
        each = {k: tuple(v) if isinstance(v, list) else v for k, v in fields.items()}
        return cls(**each | {"in_backward": {int(i): v for i, v in each["in_backward"].items()}})


def take_trial(
    who: object,
    model: nn.Module,
    x: Tensor,
    y: Tensor,
    outputs: Sequence[int],
    groups: Sequence[tuple[str, list[nn.Module]]] = (),
) -> Trial:
    """One forward and backward of the batch `x` with targets `y`; `groups`: the shard groups.

    Buffers are left as they were, and no gradient is kept. ModelError where the model does not give a
    tensor of the shape `outputs`, or a pass fails; `who` is the model in words.
    """
    names = {p: name for name, p in model.named_parameters()}
    versions = {p: p._version for p in names}
    gathering = _Gathering(groups)
    with _restored_buffers(model) as changed:
        try:
            with gathering:
                scores = model(x)
        except Exception as e:
            _raise_model_error(who, e, f"forward of a batch {list(x.shape)}")
        _check_scores(who, scores, x, y, list(outputs))
        overwritten = [name for p, name in names.items() if p._version != versions[p]]
        with _gradients_dropped(names) as reached:
            try:
                # What a user's task makes of other outputs is not the network's fault.
                loss = Classification().loss(scores, y) if _are_scores(outputs, y) else scores.sum()
                loss.backward()
            except Exception as e:
                _raise_model_error(who, e, f"backward of a batch {list(x.shape)}")
    trainable = {p: name for p, name in names.items() if p.requires_grad}
    return Trial(
        unused=tuple(name for p, name in trainable.items() if p not in reached),
        sparse=tuple(name for p, name in trainable.items() if reached.get(p)),
        uncalled=tuple(names[p] for p in gathering.uncalled),
        late=tuple(names[p] for p in gathering.late),
        written=tuple(changed["written"]),
        replaced=tuple(changed["replaced"]),
        overwritten=tuple(overwritten),
        by_chance=modules_by_chance(model, x),
        unopened=tuple(g[0] for i, g in enumerate(groups) if i not in gathering.in_backward),
        reads_values=gathering.reads_values,
        in_backward=gathering.in_backward,
        written_views=tuple(groups[i][0] for i in gathering.written_views),
    )


def modules_by_chance(model: nn.Module, x: Tensor) -> tuple[str, ...]:
    """Names of modules that some of eight forward passes of `x` call, and some do not.

    Whoever skips a module throws dice, with torch's random numbers or with Python's.
    """
    import random

    called: list[set[str]] = []
    handles = [
        module.register_forward_pre_hook(lambda _m, _x, name=name: called[-1].add(name))
        for name, module in model.named_modules()
    ]
    kept = random.getstate()
    try:
        with _restored_buffers(model), torch.no_grad():
            for seed in range(8):
                random.seed(seed)
                torch.manual_seed(seed)
                called.append(set())
                model(x)
    finally:
        random.setstate(kept)
        for handle in handles:
            handle.remove()
    sometimes = set.union(*called) - set.intersection(*called)
    return tuple(
        sorted(n for n in sometimes if not any(n.startswith(f"{other}.") for other in sometimes))
    )


def tied_parameters(model: nn.Module) -> list[list[str]]:
    """The names of each parameter that has several."""
    names: dict[nn.Parameter, list[str]] = {}
    for name, p in model.named_parameters(remove_duplicate=False):
        names.setdefault(p, []).append(name)
    return [aliases for aliases in names.values() if len(aliases) > 1]


def _are_scores(outputs: Sequence[int], y: Tensor) -> bool:
    """Whether outputs of this shape are scores of the classes that `y` has."""
    return not y.is_floating_point() and list(outputs[:-1]) == list(y.shape)


def _check_scores(who: object, scores: Any, x: Tensor, y: Tensor, wanted: list[int]) -> None:
    if not isinstance(scores, Tensor):
        raise ModelError(
            f"{who}: returned a {type(scores).__name__} for a batch; return one tensor of scores {wanted}"
        )
    if list(scores.shape) != wanted:
        why = f"with {wanted[-1]} classes" if _are_scores(wanted, y) else "for its task"
        raise ModelError(
            f"{who}: returned a tensor {list(scores.shape)} for a batch {list(x.shape)}; {why} it must be "
            f"{wanted}"
        )


def _raise_model_error(who: object, e: Exception, what: str) -> None:
    """ModelError in one sentence; an error that is no fault of the model stays what it is."""
    if isinstance(e, MemoryError | torch.OutOfMemoryError):
        raise e
    if isinstance(e, NO_VALUES):
        raise NeedsData(f"{who}: its {what} asks for the values of tensors ({e})") from e
    raise ModelError(f"{who}: its {what} raised {error_text(e)}") from e


@contextmanager
def _restored_buffers(model: nn.Module) -> Iterator[dict[str, list[str]]]:
    """Buffers are as before after the block; yields the names of those that were changed, by how."""
    kept = [
        (module, key, f"{prefix}.{key}" if prefix else key, b, b.detach().clone(), b._version)
        for prefix, module in model.named_modules()
        for key, b in module.named_buffers(recurse=False)
    ]
    changed: dict[str, list[str]] = {"written": [], "replaced": []}
    try:
        yield changed
    finally:
        for module, key, name, tensor, before, version in kept:
            if module._buffers[key] is not tensor:
                changed["replaced"].append(name)
                module._buffers[key] = tensor
            if tensor._version != version:
                changed["written"].append(name)
            with torch.no_grad():  # also where BatchNorm has not counted its change
                tensor.copy_(before)


@contextmanager
def _gradients_dropped(parameters: Iterable[nn.Parameter]) -> Iterator[dict[nn.Parameter, bool]]:
    """Each gradient is dropped when it is final: all together would take the model's memory again.

    Yields the parameters that got one, and whether it was sparse.
    """
    reached: dict[nn.Parameter, bool] = {}

    def drop(p: nn.Parameter) -> None:
        reached[p] = p.grad.layout != torch.strided
        p.grad = None

    hooks = [p.register_post_accumulate_grad_hook(drop) for p in parameters if p.requires_grad]
    try:
        yield reached
    finally:
        for hook in hooks:
            hook.remove()


class _Gathering(TorchFunctionMode):
    """Follows which shard groups FSDP would hold gathered, and notes parameters that are read otherwise.

    A group is gathered when one of its modules is called, and freed when all have been
    (torch/distributed/fsdp/_fully_shard/_fsdp_state.py, _register_group_forward_hooks).
    """

    def __init__(self, groups: Sequence[tuple[str, list[nn.Module]]]) -> None:
        super().__init__()
        self.uncalled: dict[nn.Parameter, None] = {}
        self.late: dict[nn.Parameter, None] = {}
        self.reads_values = False
        #: Of each group that was called: whether what comes out of it needs a gradient.
        self.in_backward: dict[int, bool] = {}
        self._group_of = {
            p: i for i, (_, modules) in enumerate(groups) for m in modules for p in m.parameters()
        }
        self._groups = [modules for _, modules in groups]
        self._waiting: list[set[nn.Module]] = [set() for _ in groups]
        self._views: list[tuple[int, Tensor, int]] = []

    def __enter__(self) -> _Gathering:
        self._hooks = []
        for i, modules in enumerate(self._groups):
            for m in modules:
                # FSDP gathers before hooks of the user's, which may read or make a parameter.
                opens = m.register_forward_pre_hook(partial(self._open, i), prepend=True)
                self._hooks.append(opens)
                self._hooks.append(m.register_forward_hook(partial(self._close, i)))
        super().__enter__()
        return self

    def __exit__(self, *raised: Any) -> None:
        super().__exit__(*raised)
        for hook in self._hooks:
            hook.remove()

    def _open(self, i: int, _module: nn.Module, _inputs: Any) -> None:
        if not self._waiting[i]:
            self._waiting[i] = set(self._groups[i])

    def _close(self, i: int, module: nn.Module, _inputs: Any, output: Any) -> None:
        self._waiting[i].discard(module)
        tensors = [t for t in tree_leaves(output) if isinstance(t, Tensor)]
        self._views += [(i, t, t._version) for t in tensors if t._is_view()]
        needs_gradient = any(t.requires_grad for t in tensors)
        self.in_backward[i] = self.in_backward.get(i, False) or needs_gradient

    @property
    def written_views(self) -> list[int]:
        """The groups whose views were changed since."""
        changed = (i for i, view, version in self._views if view._version != version)
        return list(dict.fromkeys(changed))

    def __torch_function__(
        self,
        func: Any,
        types: Any,
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        self.reads_values = self.reads_values or func in READS_VALUES
        result = func(*args, **(kwargs or {}))
        if isinstance(result, Tensor | tuple | list):  # others ask for a shape or a dtype
            for p in _parameters_in([*args, *(kwargs or {}).values()]):
                i = self._group_of.get(p)
                if i is not None and not self._waiting[i]:
                    (self.late if i in self.in_backward else self.uncalled)[p] = None
        return result


def _parameters_in(values: Iterable[Any]) -> Iterator[nn.Parameter]:
    for value in values:
        if isinstance(value, nn.Parameter):
            yield value
        elif isinstance(value, tuple | list):
            yield from _parameters_in(value)
