"""Flat tensors: the model computes in them, and a server can map them."""

from __future__ import annotations

import fcntl
import os

import pytest
import torch
import torch.nn.functional as F
from ps_harness import small_model
from torch import nn

from stratbench.extensions.servers.ps.device import Countdown, group_shards_into_buckets
from stratbench.extensions.servers.ps.flat import FlatSpace, cut_into_shards
from stratbench.extensions.servers.wire.shm import allocate_flat_tensors, attach_flat_tensors
from stratbench.workload.flat import ALIGN_BYTES


def step(model, x, y):
    F.cross_entropy(model(x), y).backward()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter -= 0.1 * parameter.grad


@pytest.mark.parametrize("shared", [False, True])
@pytest.mark.parametrize("memory_format", [torch.contiguous_format, torch.channels_last])
def test_a_model_trains_in_flat_tensors_as_it_does_outside(shared, memory_format):
    plain = small_model().to(memory_format=memory_format)
    homed = small_model().to(memory_format=memory_format)
    flat = FlatSpace(homed, shared)
    x, y = torch.randn(4, 1, 6, 6, dtype=torch.float64), torch.tensor([0, 1, 2, 3])
    for _ in range(3):
        plain.zero_grad()
        step(plain, x, y)
        flat.zero_grads()
        step(homed, x, y)
    for name, tensor in plain.state_dict().items():
        assert torch.equal(homed.state_dict()[name], tensor), name
        assert homed.state_dict()[name].stride() == tensor.stride()
    flat.check_gradient_views()
    mine = {p.untyped_storage().data_ptr() for p in homed.parameters()}
    assert mine == {flat.weights.untyped_storage().data_ptr()}


def test_tensors_start_on_aligned_places_and_padding_stays_zero():
    model = small_model()
    flat = FlatSpace(model)
    flat.weights.fill_(1.0)
    model[0].weight.data.zero_()
    for parameter in model.parameters():
        assert parameter.data_ptr() % ALIGN_BYTES == 0
    assert flat.layout.numel > sum(p.numel() for p in model.parameters())
    for start in flat.starts:
        assert start * 8 % ALIGN_BYTES == 0


def test_whole_number_buffers_and_frozen_parameters_stay_where_they_are():
    model = small_model()
    model[4].weight.requires_grad_(False)
    frozen, counter = model[4].weight.data_ptr(), model[1].num_batches_tracked
    flat = FlatSpace(model)
    assert model[4].weight.data_ptr() == frozen
    assert model[4].weight.grad is None
    assert model[1].num_batches_tracked is counter
    assert flat.layout.buffer_numel == 16  # twice 3 statistics, padded to 8


def test_shared_parameters_are_homed_once():
    model = nn.Sequential(nn.Linear(8, 8, bias=False), nn.Linear(8, 8, bias=False))
    model[1].weight = model[0].weight
    assert FlatSpace(model).layout.numel == 64
    assert model[1].weight is model[0].weight


def test_loading_a_state_dict_keeps_the_views():
    model = small_model()
    flat = FlatSpace(model)
    model.load_state_dict({k: torch.ones_like(v) for k, v in model.state_dict().items()})
    assert flat.weights.sum() == sum(p.numel() for p in model.parameters())
    assert flat.buffers.sum() == 6


def test_zero_grad_that_drops_the_views_is_noticed():
    model = small_model()
    flat = FlatSpace(model)
    flat.check_gradient_views()
    model.zero_grad()
    with pytest.raises(RuntimeError, match=r"call FlatSpace.zero_grads\(\)"):
        flat.check_gradient_views()


def test_models_of_mixed_dtypes_and_of_no_parameters_are_refused():
    model = small_model()
    model[4].half()
    with pytest.raises(ValueError, match=r"several dtypes \(torch.float16, torch.float64\)"):
        FlatSpace(model)
    with pytest.raises(ValueError, match="no trainable parameters"):
        FlatSpace(nn.ReLU())


def test_layouts_tell_models_apart():
    def fingerprint(model):
        return FlatSpace(model).layout.fingerprint

    same = fingerprint(small_model())
    assert fingerprint(small_model()) == same
    assert fingerprint(nn.Sequential(*small_model()[:4], nn.Linear(48, 5).double())) == same
    narrow = nn.Linear(48, 5, bias=False).double()
    assert fingerprint(nn.Sequential(*small_model()[:4], narrow)) != same
    assert fingerprint(nn.Linear(4, 6)) != fingerprint(nn.Linear(6, 4))


def test_shards_cover_a_flat_tensor():
    assert cut_into_shards(10, 4) == [(0, 4), (4, 8), (8, 10)]
    assert cut_into_shards(8, 8) == [(0, 8)]


# --- memory a server maps --------------------------------------------------------------------------


def test_a_mapped_space_is_the_same_memory():
    flat = FlatSpace(small_model())
    mapped = attach_flat_tensors(os.dup(flat.host.shared_memory_descriptor), flat.layout)
    flat.grads.fill_(3.0)
    mapped.weights.fill_(7.0)
    mapped.buffers.fill_(5.0)
    assert (mapped.grads == 3).all()
    assert (flat.weights == 7).all()
    assert (flat.buffers == 5).all()


def test_a_worker_cannot_shrink_memory_that_a_server_has_mapped():
    host = allocate_flat_tensors(FlatSpace(small_model()).layout, shared=True)
    with pytest.raises(PermissionError):
        os.ftruncate(host.shared_memory_descriptor, 0)


def test_memory_that_could_shrink_or_has_another_size_is_refused():
    layout = FlatSpace(small_model()).layout
    for seals, size, reason in (
        (0, 1 << 16, "is not sealed"),
        (fcntl.F_SEAL_SHRINK, 4096, "has 4096 bytes, expected"),
    ):
        descriptor = os.memfd_create("test", os.MFD_ALLOW_SEALING)
        os.ftruncate(descriptor, size)
        fcntl.fcntl(descriptor, fcntl.F_ADD_SEALS, seals)
        with pytest.raises(ValueError, match=reason):
            attach_flat_tensors(descriptor, layout)
    read_end, _ = os.pipe()
    with pytest.raises(ValueError, match="not sealed"):
        attach_flat_tensors(read_end, layout)


# --- which gradients may leave during backward -----------------------------------------------------


def test_a_bucket_is_complete_with_the_last_gradient_that_touches_it():
    countdown = Countdown(spans=[(0, 10), (10, 30), (30, 32)], edges=[(0, 16), (16, 31), (31, 32)])
    for _ in range(2):
        countdown.reset()
        assert countdown.mark_gradient_final(2) == [2]
        assert countdown.mark_gradient_final(0) == []
        assert countdown.mark_gradient_final(1) == [0, 1]


def test_buckets_are_runs_of_whole_shards():
    megabyte_shards = cut_into_shards((40 << 20) // 4, (1 << 20) // 4)
    assert group_shards_into_buckets(megabyte_shards, 4) == [(0, 16), (16, 32), (32, 40)]
    assert group_shards_into_buckets([(0, 5)], 4) == [(0, 1)]
