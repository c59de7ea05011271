"""Runs trial steps of a model with two samples before any training, to detect its properties.

Jobs and `stratbench check` run these steps, with real or fake tensors.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from stratbench.workload.generators import (
    Generators,
    preserve_random_generators,
    seed_random_generators,
)
from stratbench.workload.network.changes import Changes
from stratbench.workload.tasks import Classification
from stratbench.workload.torch_internals import (
    DataDependentOutputException,
    DynamicOutputShapeException,
    FakeTensor,
    UnsupportedOperatorException,
    get_parameters,
    get_write_count,
    has_gradient_hooks,
    is_view,
    tree_leaves,
)
from stratbench.workload.users_code import ERRORS, ModelError, format_user_error

#: Number of samples of a trial step. BatchNorm cannot normalise a single sample.
SAMPLES = 2
#: Number of random batches with which a model is tried, if its forward may depend on the values of a batch.
BATCHES = 4
#: PyTorch functions that return values of a tensor, or a tensor whose shape depends on values.
READS_VALUES = frozenset(
    {Tensor.item, Tensor.tolist, Tensor.numpy, Tensor.__bool__, Tensor.__int__, Tensor.__float__}
    | {Tensor.__index__, torch.equal, torch.allclose, Tensor.equal, Tensor.allclose}
    | {torch.nonzero, Tensor.nonzero, torch.argwhere, Tensor.argwhere, torch.bincount}
    | {Tensor.bincount, torch.masked_select, Tensor.masked_select, torch.unique, Tensor.unique}
    | {torch.unique_consecutive, Tensor.unique_consecutive, torch.repeat_interleave}
    | {Tensor.repeat_interleave}
)
#: Exceptions that PyTorch raises if an operation on fake tensors needs their values.
NO_VALUES = (
    DataDependentOutputException, DynamicOutputShapeException, UnsupportedOperatorException,
)  # fmt: skip


#: Names of parameters, buffers, attributes or modules of a model.
Names = tuple[str, ...]


class PassFailed(ModelError):
    """A model's forward or backward failed, perhaps only because the tensors are fake."""


@dataclass(frozen=True)
class Trial:
    """Properties of a model that trial steps have found: names of parameters, buffers and modules."""

    #: Names of trainable parameters that got no gradient in a trial step.
    parameters_without_gradient: tuple[str, ...] = ()
    #: Names of parameters whose gradient is sparse.
    sparse_gradient_parameters: tuple[str, ...] = ()
    #: Names of parameters to whose gradient one backward adds several times.
    repeatedly_added_parameters: tuple[str, ...] = ()
    #: Names of parameters with gradient hooks.
    hooked_parameters: tuple[str, ...] = ()
    #: Parameters of a shard group that forward reads before it calls a module of the group.
    parameters_read_before_call: tuple[str, ...] = ()
    #: Parameters of a shard group that forward reads after it has called all modules of the group.
    parameters_read_after_calls: tuple[str, ...] = ()
    #: Parameters that forward reads by a reference outside of their module, such as in a list.
    parameters_read_elsewhere: tuple[str, ...] = ()
    #: Parameters whose class or attributes change the result of forward.
    class_dependent_parameters: tuple[str, ...] = ()
    #: Buffers that forward changes in place.
    written_buffers: tuple[str, ...] = ()
    #: Buffers that forward replaces by another tensor.
    replaced_buffers: tuple[str, ...] = ()
    #: Names of parameters that forward changes in place.
    overwritten_parameters: tuple[str, ...] = ()
    #: Names of parameters that forward changes in place, depending on the batch.
    data_dependent_parameters: tuple[str, ...] = ()
    #: Paths of module attributes, besides parameters and buffers, that forward changes.
    changed_attributes: tuple[str, ...] = ()
    #: Names of parameters, buffers and attributes that forward changes and on which evaluation depends.
    #: Buffers of real numbers are left out.
    unsaved_evaluation_state: tuple[str, ...] = ()
    #: Names of buffers and attributes that forward changes, and on which later training steps depend.
    changing_training_state: tuple[str, ...] = ()
    #: Names of modules that only some forwards call, at random.
    randomly_called_modules: tuple[str, ...] = ()
    #: Names of modules and parameters that are used only with some batches: forward then calls the module, or
    #: the parameter gets a gradient.
    data_dependent_modules: tuple[str, ...] = ()
    #: Labels of the shard groups of which forward calls no module.
    uncalled_groups: tuple[str, ...] = ()
    #: Whether forward reads values of tensors. It may then call other modules for another batch.
    forward_reads_values: bool = False
    #: Whether forward draws random numbers.
    forward_draws_random_numbers: bool = False
    #: Whether backward reaches each shard group that forward calls, by the group's index in the order of the
    #: calls. Backward does not reach a group if this group and all groups before it are frozen.
    backward_reaches_group: dict[int, bool] = field(default_factory=dict)
    #: Labels of the shard groups that return a view of a tensor, which forward later changes in place.
    groups_with_written_views: tuple[str, ...] = ()

    @property
    def names_skipped_in_some_steps(self) -> tuple[str, ...]:
        """Names of parameters and modules that some steps may skip.

        In such a step, the parameter has no gradient, or forward does not call the module.
        """
        return (
            self.parameters_without_gradient
            + self.randomly_called_modules
            + self.data_dependent_modules
        )

    @property
    def names_without_gradient_in_some_steps(self) -> tuple[str, ...]:
        """Names of parameters and modules that get a gradient in some steps only."""
        return (
            self.randomly_called_modules
            or self.data_dependent_modules
            or (self.parameters_without_gradient if self.forward_reads_values else ())
        )

    @classmethod
    def from_dict(cls, fields: Mapping[str, Any]) -> Trial:
        """Return the trial with the fields of a dict. The dict may have been converted to JSON and back."""
        each = {k: tuple(v) if isinstance(v, list) else v for k, v in fields.items()}
        return cls(
            **each
            | {
                "backward_reaches_group": {
                    int(i): v for i, v in each["backward_reaches_group"].items()
                }
            }
        )


def run_trial_steps(
    label: object,
    model: nn.Module,
    x: Tensor,
    y: Tensor,
    output_shape: Sequence[int],
    shard_groups: Sequence[tuple[str, list[nn.Module]]] = (),
    classes: int = 2,
) -> Trial:
    """Run forward and backward on trial batches, and return the properties of the model.

    Afterwards the model and the random generators have their former state, and no gradient remains.

    Args:
        label: Name of the model in messages.
        model: The model.
        x: Inputs.
        y: Targets.
        output_shape: Shape that the model's outputs must have.
        shard_groups: Shard groups of the model.
        classes: Number of different tokens of a text.

    Raises:
        ModelError: If the model does not return a tensor of this shape, or if forward or backward fails.
    """
    with preserve_random_generators(x.device), Changes(model) as changes:
        try:
            return _TrialRun(
                label, model, x, y, list(output_shape), shard_groups, classes, changes
            ).detect_properties()
        finally:
            changes.restore_model()


class _TrialRun:
    """A trial of a model that is in progress. Each method tests one property."""

    def __init__(
        self,
        label: object,
        model: nn.Module,
        x: Tensor,
        y: Tensor,
        outputs: list[int],
        groups: Sequence[tuple[str, list[nn.Module]]],
        classes: int,
        changes: Changes,
    ) -> None:
        self.who, self.model, self.x, self.y, self.outputs = label, model, x, y, outputs
        self.groups, self.classes, self.changes = groups, classes, changes
        self.names = {p: name for name, p in model.named_parameters()}
        self.on_fakes = isinstance(x, FakeTensor)

    def detect_properties(self) -> Trial:
        model, changes, names = self.model, self.changes, self.names
        before = self.compute_evaluation_scores(), self.compute_training_scores()
        draws, changes.draws = Generators.capture_states(self.x.device), False
        gathering = _Gathering(self.groups)
        with gathering:
            scores = self.compute_checked_scores(self.x)
        written_views = gathering.indices_of_groups_with_written_views
        advanced = (
            changes.draws
            if self.on_fakes
            else draws.differ_from(Generators.capture_states(self.x.device))
        )
        changed_names = {
            "overwritten_parameters": changes.overwritten_parameters,
            "written_buffers": changes.written_buffers,
            "replaced_buffers": changes.replaced_buffers,
            "changed_attributes": changes.changed_attributes,
        }
        reached = self.run_backward(scores)
        kept_aside, counts = self.find_state_that_changes_scores(changed_names, *before)
        changes.restore_model()
        by_data, parted = self.find_names_used_by_some_batches(
            gathering, changed_names["overwritten_parameters"]
        )
        elsewhere, remade = self.find_parameters_read_elsewhere()
        trainable = {p: name for p, name in names.items() if p.requires_grad}
        return Trial(
            **{key: tuple(value) for key, value in changed_names.items()},
            parameters_without_gradient=tuple(
                name for p, name in trainable.items() if p not in reached
            ),
            sparse_gradient_parameters=tuple(
                n for p, n in trainable.items() if p in reached and reached[p].is_sparse
            ),
            repeatedly_added_parameters=tuple(
                n for p, n in trainable.items() if p in reached and reached[p].num_additions > 1
            ),
            hooked_parameters=tuple(name for p, name in names.items() if has_gradient_hooks(p)),
            parameters_read_before_call=tuple(names[p] for p in gathering.uncalled),
            parameters_read_after_calls=tuple(names[p] for p in gathering.late),
            parameters_read_elsewhere=elsewhere,
            class_dependent_parameters=remade,
            data_dependent_parameters=parted,
            unsaved_evaluation_state=kept_aside,
            changing_training_state=counts,
            randomly_called_modules=find_randomly_called_modules(model, self.x, changes),
            data_dependent_modules=by_data,
            uncalled_groups=tuple(
                g[0] for i, g in enumerate(self.groups) if i not in gathering.in_backward
            ),
            forward_reads_values=gathering.reads_values,
            forward_draws_random_numbers=advanced,
            backward_reaches_group=gathering.in_backward,
            groups_with_written_views=tuple(self.groups[i][0] for i in written_views),
        )

    def compute_checked_scores(self, x: Tensor) -> Tensor:
        try:
            scores = self.model(x)
        except ERRORS as e:
            _raise_model_error(self.who, e, f"forward of a batch {list(x.shape)}")
        _check_model_output(self.who, scores, x, self.y, self.outputs)
        return scores

    def run_backward(self, scores: Tensor) -> dict[nn.Parameter, _Gradient]:
        """Run backward from the scores. Return the parameters that got a gradient."""
        with _record_and_free_gradients(self.names) as reached:
            try:
                # A built-in loss replaces that of the user's task. Errors of the task would look like errors
                # of the model.
                are_scores = _are_class_scores(self.outputs, self.y)
                loss = Classification().loss(scores, self.y) if are_scores else scores.sum()
                loss.backward()
            except ERRORS as e:
                _raise_model_error(self.who, e, f"backward of a batch {list(self.x.shape)}")
        return reached

    def compute_evaluation_scores(self) -> Tensor:
        """Return the batch's scores in evaluation mode, with seeded random generators."""
        modes = [(m, m.training) for m in self.model.modules()]
        self.model.eval()
        try:
            with preserve_random_generators(self.x.device), torch.no_grad():
                seed_random_generators(0)
                return self.compute_checked_scores(self.x)
        finally:
            for module, training in modes:
                module.training = training

    def compute_training_scores(
        self, watching_context: AbstractContextManager | None = None
    ) -> Tensor:
        """Return the batch's scores in training mode, with seeded random generators.

        The model is restored afterwards.

        Args:
            watching_context: Context in which forward runs, if any.
        """
        seed_random_generators(0)
        try:
            with torch.no_grad(), watching_context or nullcontext():
                return self.compute_checked_scores(self.x)
        finally:
            self.changes.restore_model()

    def find_state_that_changes_scores(
        self,
        changed_names: Mapping[str, list[str]],
        evaluation_scores: Tensor,
        training_scores: Tensor,
    ) -> tuple[Names, Names]:
        """Return names of changed state that affects evaluation, and of state that affects training.

        Args:
            changed_names: Changed names by kind.
            evaluation_scores: Scores of evaluation before any change.
            training_scores: Scores of training before any change.
        """
        by_name = dict(self.model.named_parameters())
        frozen = [
            name
            for name in changed_names["overwritten_parameters"]
            if not by_name[name].requires_grad
        ]
        if self.on_fakes:
            return tuple(frozen), ()
        buffers = dict(self.model.named_buffers())
        others = [n for n in changed_names["written_buffers"] if not buffers[n].is_floating_point()]
        others += changed_names["replaced_buffers"] + changed_names["changed_attributes"]
        self.changes.restore_model(other_state=False)
        if not others or _are_scores_equal(self.compute_evaluation_scores(), evaluation_scores):
            others = []
        self.changes.restore_model()
        self.compute_checked_scores(self.x)
        self.changes.restore_model(float_buffers=False, other_state=False)
        counted = (
            changed_names["written_buffers"]
            + changed_names["replaced_buffers"]
            + changed_names["changed_attributes"]
        )
        if not counted or _are_scores_equal(self.compute_training_scores(), training_scores):
            counted = []
        return tuple(frozen + others), tuple(counted)

    def find_names_used_by_some_batches(
        self, gathering: _Gathering, overwritten_parameters: Sequence[str]
    ) -> tuple[Names, Names]:
        """Return modules that only some batches use, and parameters that batches change differently."""
        if self.on_fakes or not (gathering.reads_values or overwritten_parameters):
            return (), ()
        reached: list[set[str]] = []
        values: list[dict[str, Tensor]] = []
        for seed in range(BATCHES):
            x = _make_batch_like(self.x, self.classes, seed)
            seed_random_generators(0)
            with _record_called_modules(self.model) as called:
                scores = self.compute_checked_scores(x)
            values.append(self.changes.copy_parameters(overwritten_parameters))
            trained = self.run_backward(scores)
            reached.append(called | {self.names[p] for p in trained})
            self.changes.restore_model()
        parted = [
            n for n in overwritten_parameters if any(not v[n].equal(values[0][n]) for v in values)
        ]
        return _find_names_not_in_all_sets(reached), tuple(parted)

    def find_parameters_read_elsewhere(self) -> tuple[Names, Names]:
        """Return the names of parameters that forward would not find if FSDP had replaced them.

        The first are read outside of their modules. The second have a class or attributes on which forward
        depends. Both are found by a forward with copied parameters.
        """
        more = {n for p, n in self.names.items() if type(p) is not nn.Parameter or vars(p)}
        if self.on_fakes:
            more = set()
        reading = _Reading(self.names)
        scores, with_copies = self.compute_training_scores() if more else None, None
        with _replace_parameters_by_copies(self.model):
            try:
                with_copies = self.compute_training_scores(reading)
            except ModelError:
                if not more:
                    raise
        is_equal = with_copies is not None and (scores is None or torch.equal(scores, with_copies))
        return tuple(reading.read), () if is_equal else tuple(sorted(more))


def _are_scores_equal(scores: Tensor, other_scores: Tensor) -> bool:
    return torch.allclose(scores, other_scores, rtol=1e-5, atol=1e-8, equal_nan=True)


def _make_batch_like(batch: Tensor, classes: int, seed: int) -> Tensor:
    """Return a batch of random numbers or random tokens, shaped like another batch."""
    generator = torch.Generator().manual_seed(seed)
    if not batch.is_floating_point():
        made = torch.randint(classes, batch.shape, generator=generator)
    else:
        made = torch.randn(batch.shape, generator=generator)
    return torch.empty_like(batch).copy_(made)


def find_randomly_called_modules(
    model: nn.Module, batch: Tensor, changes: Changes
) -> tuple[str, ...]:
    """Return the names of the modules that only some of several forwards call.

    The forwards have different seeds, since a model that skips modules draws random numbers. PyTorch's
    numbers have no values if tensors are fake. So one forward is then enough, unless it draws
    from NumPy or Python.

    Args:
        model: The model.
        batch: Inputs.
        changes: Restores the model.
    """
    called: list[set[str]] = []
    with torch.no_grad():
        for seed in range(8):
            seed_random_generators(seed)
            before = Generators.capture_states()
            with _record_called_modules(model) as now:
                model(batch)
            called.append(now)
            changes.restore_model()
            if isinstance(batch, FakeTensor) and not before.differ_in_python_or_numpy(
                Generators.capture_states()
            ):
                break
    return _find_names_not_in_all_sets(called)


@contextmanager
def _record_called_modules(model: nn.Module) -> Iterator[set[str]]:
    """Collect the names of modules that are called within the block. The yielded set gets these names."""
    called: set[str] = set()
    handles = [
        module.register_forward_pre_hook(lambda _m, _x, name=name: called.add(name))
        for name, module in model.named_modules()
    ]
    try:
        yield called
    finally:
        for handle in handles:
            handle.remove()


def _find_names_not_in_all_sets(name_sets: Sequence[set[str]]) -> tuple[str, ...]:
    """Return the names that are in some sets but not in all.

    Submodules of a module that is in the result are left out.
    """
    some = set.union(*name_sets) - set.intersection(*name_sets)
    return tuple(sorted(n for n in some if not any(n.startswith(f"{other}.") for other in some)))


@contextmanager
def _replace_parameters_by_copies(model: nn.Module) -> Iterator[None]:
    """Replace each parameter of a model until the block ends.

    The replacement is another object in the same memory.
    """
    originals = [
        (module, key, p)
        for module in model.modules()
        for key, p in list(module.named_parameters(recurse=False, remove_duplicate=False))
    ]
    copies = {p: nn.Parameter(p.detach(), requires_grad=p.requires_grad) for _, _, p in originals}
    try:
        for module, key, p in originals:
            _set_parameter(module, key, copies[p])
        yield
    finally:
        for module, key, p in originals:
            _set_parameter(module, key, p)


def _set_parameter(module: nn.Module, key: str, parameter: nn.Parameter) -> None:
    """Set a parameter as FSDP does: directly, unless the module's class has its own `__setattr__`."""
    if type(module).__setattr__ is nn.Module.__setattr__:
        get_parameters(module)[key] = parameter
    else:
        setattr(module, key, parameter)


def _are_class_scores(output_shape: Sequence[int], targets: Tensor) -> bool:
    """Return whether outputs of a given shape are one score per class for each target."""
    return not targets.is_floating_point() and list(output_shape[:-1]) == list(targets.shape)


def _check_model_output(
    label: object, scores: Any, inputs: Tensor, targets: Tensor, output_shape: list[int]
) -> None:
    if not isinstance(scores, Tensor):
        raise ModelError(
            f"{label}: returned a {type(scores).__name__} for a batch; return one tensor of scores "
            f"{output_shape}"
        )
    if list(scores.shape) != output_shape:
        reason = (
            f"with {output_shape[-1]} classes"
            if _are_class_scores(output_shape, targets)
            else "for its task"
        )
        raise ModelError(
            f"{label}: returned a tensor {list(scores.shape)} for a batch {list(inputs.shape)}; {reason} the "
            f"tensor must be {output_shape}"
        )


def _raise_model_error(label: object, e: BaseException, failed_step: str) -> None:
    """Raise a ModelError that names the failed step, or an out-of-memory error unchanged."""
    if isinstance(e, MemoryError | torch.OutOfMemoryError):
        raise e
    if isinstance(e, NO_VALUES):
        raise PassFailed(
            f"{label}: its {failed_step} reads values of tensors, which fake tensors do not have ({e})"
        ) from e
    raise PassFailed(f"{label}: its {failed_step} raised {format_user_error(e)}") from e


@dataclass
class _Gradient:
    """Properties of a parameter's gradient after one backward."""

    #: How many times backward has added to the gradient.
    num_additions: int = 0
    #: Whether the gradient is sparse.
    is_sparse: bool = False


@contextmanager
def _record_and_free_gradients(
    parameters: Iterable[nn.Parameter],
) -> Iterator[dict[nn.Parameter, _Gradient]]:
    """Free each gradient as soon as it is accumulated, to save memory.

    The yielded dictionary gets the parameters that had a gradient.
    """
    reached: dict[nn.Parameter, _Gradient] = {}

    def record_and_free_gradient(parameter: nn.Parameter) -> None:
        gradient = reached.setdefault(parameter, _Gradient())
        gradient.num_additions += 1
        gradient.is_sparse |= parameter.grad is not None and parameter.grad.layout != torch.strided
        parameter.grad = None

    hooks = [
        p.register_post_accumulate_grad_hook(record_and_free_gradient)
        for p in parameters
        if p.requires_grad
    ]
    try:
        yield reached
    finally:
        for hook in hooks:
            hook.remove()


class _Reading(TorchFunctionMode):
    """Context manager that collects the names of the parameters that PyTorch functions read."""

    def __init__(self, names: Mapping[nn.Parameter, str]) -> None:
        super().__init__()
        self.read: dict[str, None] = {}
        self._names = names

    def __torch_function__(
        self,
        func: Any,
        types: Any,
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        result = func(*args, **(kwargs or {}))
        for p in _iter_read_parameters(result, args, kwargs):
            if p in self._names:
                self.read[self._names[p]] = None
        return result


class _Gathering(TorchFunctionMode):
    """Context manager that finds parameters that forward reads while FSDP has not gathered them.

    FSDP gathers a shard group when one of its modules is called, and frees it when all of them have been
    called (torch/distributed/fsdp/_fully_shard/_fsdp_state.py, _register_group_forward_hooks).
    """

    def __init__(self, groups: Sequence[tuple[str, list[nn.Module]]]) -> None:
        super().__init__()
        self.uncalled: dict[nn.Parameter, None] = {}
        self.late: dict[nn.Parameter, None] = {}
        self.reads_values = False
        #: For each called shard group, by its index: whether its output needs a gradient.
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
                # Like FSDP's hook, this hook runs before the user's hooks, which may read a parameter.
                opens = m.register_forward_pre_hook(
                    partial(self._store_group_gathering, i), prepend=True
                )
                self._hooks.append(opens)
                self._hooks.append(m.register_forward_hook(partial(self._store_module_return, i)))
        super().__enter__()
        return self

    def __exit__(self, *raised: Any) -> None:
        super().__exit__(*raised)
        for hook in self._hooks:
            hook.remove()

    def _store_group_gathering(self, group_index: int, _module: nn.Module, _inputs: Any) -> None:
        if not self._waiting[group_index]:
            self._waiting[group_index] = set(self._groups[group_index])

    def _store_module_return(
        self, group_index: int, module: nn.Module, _inputs: Any, output: Any
    ) -> None:
        self._waiting[group_index].discard(module)
        tensors = [t for t in tree_leaves(output) if isinstance(t, Tensor)]
        self._views += [(group_index, t, get_write_count(t)) for t in tensors if is_view(t)]
        needs_gradient = any(t.requires_grad for t in tensors)
        self.in_backward[group_index] = self.in_backward.get(group_index, False) or needs_gradient

    @property
    def indices_of_groups_with_written_views(self) -> list[int]:
        """Indices of shard groups that returned a view of a tensor. The tensor was changed afterwards."""
        changed = (i for i, view, version in self._views if get_write_count(view) != version)
        return list(dict.fromkeys(changed))

    def __torch_function__(
        self,
        func: Any,
        types: Any,
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        self.reads_values = self.reads_values or _function_reads_values(func, args)
        result = func(*args, **(kwargs or {}))
        for p in _iter_read_parameters(result, args, kwargs):
            i = self._group_of.get(p)
            if i is not None and not self._waiting[i]:
                (self.late if i in self.in_backward else self.uncalled)[p] = None
        return result


def _function_reads_values(func: Any, args: Sequence[Any]) -> bool:
    """Return whether a function call reads values of tensors, as `item` and `nonzero` do."""
    if func is torch.where or func is Tensor.where:
        return len(args) == 1
    if func is Tensor.__getitem__:
        return any(isinstance(t, Tensor) and t.dtype == torch.bool for t in tree_leaves(args[1]))
    return func in READS_VALUES


def _iter_read_parameters(
    result: Any, args: Sequence[Any], kwargs: Mapping[str, Any] | None
) -> Iterator[nn.Parameter]:
    """Yield the parameters among a function's arguments whose values the function reads.

    A function without a tensor in its result reads only metadata, such as the shape.
    """
    if isinstance(result, Tensor | tuple | list):
        yield from _iter_parameters_in([*args, *(kwargs or {}).values()])


def _iter_parameters_in(values: Iterable[Any]) -> Iterator[nn.Parameter]:
    for value in values:
        if isinstance(value, nn.Parameter):
            yield value
        elif isinstance(value, tuple | list):
            yield from _iter_parameters_in(value)
