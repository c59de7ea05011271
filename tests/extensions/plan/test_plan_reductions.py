"""The buffers of CUDA's reductions: the plan's rule against what PyTorch asked its allocator for."""

from __future__ import annotations

from dataclasses import asdict

import pytest
import torch

from stratbench.extensions.plan.footprint import footprint
from stratbench.extensions.plan.footprint.footprint import Affine, Moment, ReductionSize
from stratbench.extensions.plan.footprint.reductions import Reduction
from stratbench.extensions.plan.footprint.trace import OperatorTrace

#: Multiprocessors times threads of each: A100, H100, A10G, T4.
GPUS = (108 * 2048, 132 * 2048, 80 * 1536, 40 * 1024)
#: PyTorch 2.11's CUDA build on a CUDA runtime in software that tells these sizes: shape, strides, summed
#: dimensions, format; then on each GPU the bytes by which `x.sum(dims)` and `x.mean(dims)` raised
#: `requested_bytes.all.peak` beside their result.
MEASURED = """
2048x768 768,1 0 fp32 12582936 12582936 12582936 12582936
2048x768 768,1 0 bf16 12582936 12582936 12582936 12582936
2048x768 768,1 0 fp64 25165848 25165848 25165848 25165848
2048x2304 2304,1 0 fp32 37748808 37748808 37748808 21233736
2048x2304 2304,1 0 bf16 37748808 37748808 37748808 21233736
2048x2304 2304,1 0 fp64 75497544 75497544 75497544 42467400
2048x3072 3072,1 0 fp32 50331744 50331744 50331744 22020192
2048x3072 3072,1 0 bf16 50331744 50331744 50331744 22020192
2048x3072 3072,1 0 fp64 100663392 100663392 100663392 44040288
6304x3072 3072,1 0 fp32 113246304 138412128 62914656 22020192
6304x3072 3072,1 0 bf16 113246304 138412128 62914656 22020192
65536x3072 3072,1 0 fp32 113246304 138412128 100663392 100663392
65536x3072 3072,1 0 bf16 113246304 138412128 100663392 100663392
255x768 768,1 0 fp32 0 0 0 0
255x768 768,1 0 bf16 0 0 0 0
1000x768 768,1 0 fp32 0 0 0 0
1000x768 768,1 0 bf16 0 0 0 0
1024x768 768,1 0 fp32 6291480 6291480 6291480 6291480
1024x768 768,1 0 bf16 6291480 6291480 6291480 6291480
2048x30 30,1 0 fp32 0 0 0 0
2048x30 30,1 0 bf16 0 0 0 0
2048x30 30,1 0 fp64 0 0 0 0
4096x1002 1002,1 0 fp32 8208448 8208448 7695424 2565184
4096x1002 1002,1 0 bf16 8208448 8208448 7695424 2565184
16384x1001 1001,1 0 fp32 1793920 2178304 1025152 512640
16384x1001 1001,1 0 bf16 1793920 2178304 1025152 512640
4096x10 10,1 0 fp32 0 0 0 0
4096x10 10,1 0 bf16 0 0 0 0
100352x4 4,1 0 fp32 3140 3140 3140 3140
100352x4 4,1 0 bf16 3140 3140 3140 3140
2048x50257 50257,1 0 fp32 0 0 0 0
2048x50257 50257,1 0 bf16 0 0 0 0
2048x50257 50257,1 0 fp64 0 0 0 0
32x64x32x32 65536,1,2048,64 0,2,3 fp32 4194308 4194308 4194308 4194308
32x64x32x32 65536,1,2048,64 0,2,3 bf16 4194308 4194308 4194308 4194308
32x512x4x4 8192,1,2048,512 0,2,3 fp32 0 0 0 0
32x512x4x4 8192,1,2048,512 0,2,3 bf16 0 0 0 0
128x96x56x56 301056,1,5376,96 0,2,3 fp32 21233672 25952264 11796488 4816904
128x96x56x56 301056,1,5376,96 0,2,3 bf16 21233672 25952264 11796488 4816904
16x192x8x8 12288,1,1536,192 0,2,3 fp32 1572872 1572872 1572872 1572872
16x192x8x8 12288,1,1536,192 0,2,3 bf16 1572872 1572872 1572872 1572872
32x64x32x32 65536,1024,32,1 0,2,3 fp32 0 0 0 0
32x64x32x32 65536,1024,32,1 0,2,3 bf16 0 0 0 0
32x128x112x112 1605632,1,14336,128 2,3 fp32 113246336 138412160 62914688 27263104
32x128x112x112 1605632,1,14336,128 2,3 bf16 113246336 138412160 62914688 27263104
8x256x768 196608,768,1 0,1 fp32 12582936 12582936 12582936 12582936
8x256x768 196608,768,1 0,1 bf16 12582936 12582936 12582936 12582936
8x256x768 196608,768,1 0 fp32 0 0 0 0
8x256x768 196608,768,1 0 bf16 0 0 0 0
32x197x768 768,24576,1 0,1 fp32 38928408 38928408 38928408 21233688
32x197x768 768,24576,1 0,1 bf16 38928408 38928408 38928408 21233688
"""
ITEM_BYTES = {"bf16": 2, "fp32": 4, "fp64": 8}


@pytest.mark.parametrize("line", MEASURED.split("\n")[1:-1])
def test_a_sums_buffer_is_what_pytorch_asked_for(line):
    shape, strides, dims, dtype, *measured = line.split()
    numbers = [int(n) for n in strides.split(",")]
    dims = {int(d) for d in dims.split(",")}
    made = Reduction.from_tensor_layout(
        [int(n) for n in shape.split("x")], numbers, dims, 0, ITEM_BYTES[dtype]
    )
    if made is None:  # along neighbours in memory
        assert max(map(int, measured)) < 1 << 20
    else:
        assert [made.compute_kernel_buffer_bytes(threads) for threads in GPUS] == [
            int(n) for n in measured
        ]


def test_the_table_holds_sums_with_and_without_a_buffer():
    on_a100 = [int(line.split()[4]) for line in MEASURED.split("\n")[1:-1]]
    assert on_a100.count(0) > 5
    assert sum(n > 1 << 20 for n in on_a100) > 20


def test_an_offset_that_is_no_multiple_takes_vectors_away():
    aligned, shifted = (
        Reduction.from_tensor_layout((2048, 768), (768, 1), {0}, offset, 4) for offset in (8, 2)
    )
    assert (aligned.sums_per_thread, shifted.sums_per_thread) == (4, 2)


def test_the_trace_notes_the_sums_that_may_need_a_buffer():
    trace = OperatorTrace()
    x = torch.ones(8, 6, 4, 4)
    weight, bias = torch.ones(5, 6, 3, 3), torch.ones(5)
    with trace:
        x.flatten(1).sum(0)
        x.sum((0, 2, 3))  # along neighbours
        x.to(memory_format=torch.channels_last).mean((2, 3))
        leaf = bias.requires_grad_()
        out = torch.nn.functional.conv2d(x.to(memory_format=torch.channels_last), weight, leaf)
        out.backward(torch.ones_like(out, memory_format=torch.channels_last))
    noted = [(r.outputs, r.inputs) for _, r in trace.phases[-1].reductions]
    assert noted == [(96, 8), (48, 16), (5, 32)]
    on_cpu = OperatorTrace(on_cpu=True)
    with on_cpu:
        x.flatten(1).sum(0)
    assert on_cpu.phases[-1].reductions == []


def test_a_peak_holds_the_buffer_for_the_batch_and_the_gpu():
    """2048 tokens of width 768 take 12 MiB on an A100 (the table), and none on a CPU."""
    sums = ReductionSize(Affine(768, 0), Affine(0, 256), together=4, partial_sum_bytes=4)
    moments = [
        Moment("forward", Affine(20 << 20, 0), {"activations": Affine(20 << 20, 0)}),
        Moment("backward", Affine(10 << 20, 0), {"gradients": Affine(10 << 20, 0)}, sums),
    ]
    kept = footprint._select_highest_moments(moments, 1)
    assert kept == moments
    made = footprint.Footprint(
        {}, {}, kept, footprint.MemoryPeak(0, "evaluation", {}), [], 0, 0, 0, Affine(0, 0), {}
    )
    assert made.compute_training_peak(8).phase == "forward"
    peak = made.compute_training_peak(8, GPUS[0])
    assert peak.n_bytes == (10 << 20) + 12582912 + 24
    assert peak.parts_bytes == {"gradients": 10 << 20, "scratch": 12582912 + 24}
    assert made.compute_training_peak(1, GPUS[0]).phase == "forward"
    assert made.compute_needed_bytes(8, GPUS[0]) == peak.n_bytes
    assert made.largest_batch(peak.n_bytes, GPUS[0]) < made.largest_batch(1 << 40)
    assert footprint.Footprint.from_dict(asdict(made)) == made


@pytest.mark.parametrize(
    ("dtype", "scratch"), [(torch.bfloat16, [98304, 1536]), (torch.float32, [])]
)
def test_flash_attentions_backward_has_a_workspace_in_16_bits(dtype, scratch):
    """Of 3 heads, 128 rows (of 5, padded) and a width of 64, in 32 bits; and a number for each row."""
    q, k, v = (torch.ones(1, 3, 5, 64, dtype=dtype, requires_grad=True) for _ in range(3))
    trace = OperatorTrace()
    with trace:
        torch.nn.functional.scaled_dot_product_attention(q, k, v).sum().backward()
    tagged = {number for number, part in trace.tags.items() if part == "scratch"}
    assert [n for number, n in trace.events if number in tagged and n > 0] == scratch
