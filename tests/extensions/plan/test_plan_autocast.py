"""Autocast as on CUDA: PyTorch's lists of what CUDA computes in float32, against what the plan follows."""

from __future__ import annotations

import re
import sys
from pathlib import Path
from types import ModuleType

import pytest
import torch
import torch.nn.functional as F

from stratbench.extensions.plan.footprint import cuda_autocast as ours
from stratbench.extensions.plan.footprint.cuda_autocast import emulate_cuda_autocast


def pytorchs_test_lists():
    """What PyTorch tests its autocast on CUDA by; without its test cases, which need other packages."""
    needed = ModuleType("torch.testing._internal.common_utils")
    needed.TEST_WITH_ROCM, needed.TestCase = False, object
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(sys.modules, needed.__name__, needed)
        from torch.testing._internal.autocast_test_lists import AutocastTestLists

        return AutocastTestLists("cpu")


HEADER = Path(torch.__file__).parent / "include" / "ATen" / "autocast_mode.h"
LISTS = pytorchs_test_lists()
ASKED = {f"{i} {entry[0]}": entry for i, entry in enumerate(LISTS.torch_fp32 + LISTS.nn_fp32)}
SHORT = torch.rand(4, 4).bfloat16()


#: What named tensors call, up to PyTorch 2.12.
NAMED = re.compile(r"[Dd]imname|\.names_")


def listed(macro: str) -> set[str]:
    """The operations of one of PyTorch's lists, as `name.overload`."""
    text = HEADER.read_text().partition(f"#define {macro}(_)")[2].partition("#define")[0]
    return {".".join(re.split(r",\s*", found)) for found in re.findall(r"_\((\w[\w, ]*)\)", text)}


def test_the_lists_are_those_of_the_installed_pytorch():
    assert listed("AT_FORALL_FP32") == ours.FLOAT32
    assert {
        n for n in listed("AT_FORALL_FP32_SET_OPT_DTYPE") if not NAMED.search(n)
    } == ours.BY_DTYPE
    text = HEADER.read_text().partition("#define AT_FORALL_DIFFERENT_REDISPATCH_SIGNATURE")[2]
    others = {n for n in re.findall(r'"(norm\.\w+)"', text) if not NAMED.search(n)}
    assert others == set(ours.BY_OTHER)


@pytest.mark.parametrize("name", ASKED)
def test_what_pytorch_tests_in_float32_on_cuda_is_computed_so(name):
    called, args, *kwargs = ASKED[name]
    function = getattr(torch, called, None) or getattr(torch._C._nn, called)
    with emulate_cuda_autocast(), torch.autocast("cpu", dtype=torch.float16):
        assert function(*args, **(kwargs[0] if kwargs else {})).dtype == torch.float32


@pytest.mark.parametrize(
    "call",
    [
        lambda x: x.softmax(-1), lambda x: F.softmax(x, -1), lambda x: F.normalize(x),
        lambda x: x.norm(dim=-1), lambda x: x.sum(), lambda x: x**2, lambda x: x.pow(2).mean(-1).rsqrt(),
        lambda x: torch.nn.GroupNorm(2, 4)(x), lambda x: F.cosine_similarity(x, x),
        lambda x: F.interpolate(x[None, None], scale_factor=2, mode="bilinear"),
    ],
)  # fmt: skip
def test_methods_and_what_is_made_of_several_operations_are_cast_too(call):
    with torch.autocast("cpu", dtype=torch.bfloat16):
        with emulate_cuda_autocast():
            assert call(SHORT).dtype == torch.float32
            assert F.softmax(SHORT, -1, dtype=torch.bfloat16).dtype == torch.bfloat16
            assert (SHORT @ SHORT).dtype == F.gelu(SHORT).dtype == torch.bfloat16
        assert F.softmax(SHORT, -1).dtype == torch.bfloat16  # as it is on a CPU, once it has ended
    with emulate_cuda_autocast():
        assert SHORT.softmax(-1).dtype == torch.bfloat16


def test_cross_entropy_makes_the_logarithms_in_the_scores_own_format():
    scores = SHORT.clone().requires_grad_()
    with emulate_cuda_autocast(), torch.autocast("cpu", dtype=torch.bfloat16):
        loss = F.cross_entropy(scores, torch.arange(4))
    assert loss.dtype == torch.float32
    logarithms = F.log_softmax(SHORT, -1)
    assert loss == F.nll_loss(logarithms.float(), torch.arange(4))
    loss.backward()
    assert scores.grad.dtype == torch.bfloat16
