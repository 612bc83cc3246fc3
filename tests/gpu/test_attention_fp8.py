"""FP8 attention on the GPU: one set of bits in every phase, float64, what must not matter, and what must."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch import Tensor

pytest.importorskip("triton")
from jetrl.check import check_model
from jetrl.kernels.attention import Sequences
from jetrl.kernels.hopper import attention as bf16_kernel
from jetrl.kernels.hopper import attention_fp8 as kernel
from jetrl.kernels.hopper.heads import split_heads, split_heads_fp8
from jetrl.kernels.hopper.ops import HopperOps
from jetrl.kernels.hopper.quant import quantize_rows
from jetrl.kernels.ops import Heads, HeadWeights, Spec, Target
from jetrl.kernels.quant import Quantized, decode, dequantize_heads, quantize_heads, token_groups
from jetrl.model.context import KVCache, PackedContext, PagedContext
from tests.gpu.tensors import noise, same, vector
from tests.test_hopper_attention_fp8 import Case, far, on_cpu
from tests.tiny_models import tiny_model

pytestmark = pytest.mark.gpu

SHAPES = [(4, 4, 64), (9, 3, 64), (32, 8, 128), (28, 4, 128), (16, 2, 128), (8, 8, 32)]  # groups 1, 3, 4, 7, 8, 1
LONG = [4200, 65, 1, 700, 64, 128]


def run(case: Case, q: Quantized, new: list[int], contexts: list[int], table: Tensor | None = None) -> tuple[Tensor, Tensor]:
    table = case.table if table is None else table
    heads, kv_heads = q.codes.shape[1], case.operands[0].codes.shape[1]
    where = (table.int().cuda(), case.cache.block_size, "cuda")
    tiles = bf16_kernel.make_tiles(new, contexts, heads, kv_heads, None, *where)
    out, lse = kernel.attention(q, *case.operands, tiles, True)
    assert lse is not None
    return out, lse


def trained(case: Case, lengths: list[int]) -> tuple[Tensor, Tensor]:
    """The training forward of the same queries, keys and values: in fresh blocks of its own."""
    keys, values = case.operands
    size, device = case.cache.block_size, case.q.codes.device
    context = PackedContext.of(lengths, device, kv_fp8=True)
    target = context.target(0, *keys.codes.shape[1:4:2])
    for tensor in (target.keys, target.values):
        tensor.view(torch.uint8).fill_(0x7F)  # NaN
    position = torch.cat([torch.arange(n) for n in lengths])
    sequence = torch.repeat_interleave(torch.arange(len(lengths)), torch.tensor(lengths))
    block, at = case.table[sequence, position // size].cuda(), (position % size).cuda()
    found = [x.codes.view(torch.uint8) for x in (keys, values)]
    target.store(
        Quantized(found[0][block, :, at].view(keys.codes.dtype), keys.scales[block, :, at]),
        Quantized(found[1][block, :, :, at].view(keys.codes.dtype), values.scales[block, :, at]),
    )
    assert isinstance(context.layout, Sequences)
    groups = token_groups(lengths, device)
    _, out, lse = HopperOps(device).attention(case.q, *target.codes, context.layout, Spec(fp8=False, groups=groups))
    assert out is not None and lse is not None
    return out, lse


@pytest.mark.parametrize("size", [64, 128])
@pytest.mark.parametrize("shape", SHAPES)
def test_every_phase_has_the_bits_of_training(shape: tuple[int, int, int], size: int) -> None:
    case = Case.make(*shape, size, LONG, "cuda")
    out, lse = trained(case, LONG)
    assert torch.isfinite(out).all() and torch.isfinite(lse).all()
    starts = [sum(LONG[:s]) for s in range(len(LONG))]
    generator = torch.Generator().manual_seed(size)
    chunks = [(LONG, LONG), ([1] * 6, LONG), ([0, 64, 1, 63, 0, 65], [4200, 65, 1, 637, 64, 128])]
    for _ in range(6):
        contexts = [int(torch.randint(1, n + 1, (1,), generator=generator)) for n in LONG]
        chunks.append(([int(torch.randint(0, n + 1, (1,), generator=generator)) for n in contexts], contexts))
        chunks.append(([1] * 6, contexts))
    for new, contexts in chunks:
        at = torch.cat([s + torch.arange(c - n, c) for s, c, n in zip(starts, contexts, new, strict=True)]).cuda()
        seen, seen_lse = run(case, case.queries(LONG, new, contexts), new, contexts)
        assert same(seen, out[at]) and same(seen_lse, lse[:, at]), (new, contexts)
    # Many positions of one sequence, each decoded by itself.
    positions = torch.tensor([0, 1, 62, 63, 64, 65, 127, 128, 700, 4031, 4032, 4095, 4096, 4199])
    q = case.rows(positions)
    own = case.table[:1].expand(len(positions), -1)
    seen, _ = run(case, q, [1] * len(positions), (positions + 1).tolist(), own)
    assert same(seen, out[positions.cuda()])


def test_contexts_up_to_5000() -> None:
    """Whole prefill against decode of every 37th position, in one batch with padding sequences between."""
    lengths = [5000]
    case = Case.make(8, 2, 128, 64, lengths, "cuda")
    out, _ = run(case, case.q, lengths, lengths)
    positions = torch.arange(0, 5000, 37)
    q = case.rows(positions)
    contexts = [n for p in positions.tolist() for n in (p + 1, 0)]
    new = [1, 0] * len(positions)
    seen, _ = run(case, q, new, contexts, case.table.expand(len(new), -1))
    assert same(seen, out[positions.cuda()])


def test_order_and_company_change_no_bit_and_runs_repeat() -> None:
    case = Case.make(28, 4, 128, 64, LONG, "cuda")
    out, lse = run(case, case.q, LONG, LONG)
    parts, tokens = out.split(LONG), torch.arange(sum(LONG)).split(LONG)
    for order in ([0, 1, 2, 3, 4, 5], [3, 1, 5, 0, 4, 2], [3], [4, 4, 1]):
        lengths = [LONG[i] for i in order]
        seen, _ = run(case, case.rows(torch.cat([tokens[i] for i in order])), lengths, lengths, case.table[order])
        assert all(same(a, parts[i]) for i, a in zip(order, seen.split(lengths), strict=True)), order
    assert all(same(a, b) for a, b in zip(run(case, case.q, LONG, LONG), (out, lse), strict=True))


@pytest.mark.parametrize("stages", [2, 3, 4, 6, 7])
def test_stages_change_no_bit(stages: int) -> None:
    case = Case.make(32, 8, 128, 64, LONG, "cuda")
    out, _ = run(case, case.q, LONG, LONG)
    tiles = bf16_kernel.make_tiles(LONG, LONG, 32, 8, None, case.table.int().cuda(), 64, "cuda")
    seen, _ = kernel.forward(case.q, *case.operands, tiles, False, kernel.Launch(stages, 168))
    assert isinstance(seen, Tensor) and same(seen, out)


@pytest.mark.parametrize("shape", [(32, 8, 128), (28, 4, 128), (16, 2, 128), (9, 1, 128)])  # 9 and more: all 64 rows
def test_launches_of_decode_change_no_bit_and_codes_are_those_of_the_result(shape: tuple[int, int, int]) -> None:
    """`decode_codes` has the bytes of the quantised result, whatever the launch; so has training."""
    case = Case.make(*shape, 64, LONG, "cuda")
    trained_out, _ = run(case, case.q, LONG, LONG)
    starts = [sum(LONG[:s]) for s in range(len(LONG))]
    for contexts in (LONG, [4097, 64, 1, 699, 63, 127], [1, 1, 1, 1, 1, 1]):
        at = torch.tensor([s + c - 1 for s, c in zip(starts, contexts, strict=True)]).cuda()
        q = case.queries(LONG, [1] * 6, contexts)
        tiles = bf16_kernel.make_tiles([1] * 6, contexts, *shape[:2], None, case.table.int().cuda(), 64, "cuda")
        right = quantize_rows(trained_out[at].flatten(1))
        for launch in (None, *(kernel.Launch(stages, registers) for stages in (4, 5, 7) for registers in (128, 168, 255))):
            out, lse = kernel.forward(q, *case.operands, tiles, True, launch)
            assert isinstance(out, Tensor) and lse is not None and same(out, trained_out[at]), (contexts, launch)
            codes, _ = kernel.forward(q, *case.operands, tiles, False, launch, codes=True)
            assert same(codes, right), (contexts, launch)
        assert same(kernel.decode_codes(q, *case.operands, tiles), right)


def test_codes_of_sequences_without_a_token_are_left_alone() -> None:
    """And a zero head of values gives the scale of zeros, as the quantiser does."""
    lengths = [300, 200, 64]
    case = Case.make(32, 8, 128, 64, lengths, "cuda")
    out, _ = run(case, case.q, lengths, lengths)
    tiles = bf16_kernel.make_tiles([1, 0, 1], [300, 0, 64], 32, 8, None, case.table.int().cuda(), 64, "cuda")
    q = case.queries(lengths, [1, 0, 1], [300, 0, 64])
    assert same(kernel.decode_codes(q, *case.operands, tiles), quantize_rows(out[[299, 563]].flatten(1)))
    case.cache.values.view(torch.uint8).zero_()
    seen = kernel.decode_codes(q, *case.operands, tiles)
    assert same(seen, quantize_rows(torch.zeros(2, 32 * 128, dtype=torch.bfloat16, device="cuda")))


def test_the_operators_hand_on_the_codes_of_the_bf16_result() -> None:
    lengths = [300, 200, 64]
    case = Case.make(32, 8, 128, 64, lengths, "cuda")
    context = PagedContext.of(case.cache, [1] * 3, lengths, case.table)
    ops, q = HopperOps(torch.device("cuda")), case.queries(lengths, [1] * 3, lengths)
    seen, out, lse = ops.attention(q, *case.operands, context.layout, Spec(fp8=True))
    plain, _, _ = ops.attention(q, *case.operands, context.layout, Spec(fp8=False))
    assert out is lse is seen.value is None and seen.rows is not None and plain.value is not None
    assert same(seen.rows, quantize_rows(plain.value))


def plain(case: Case, start: int, length: int, sequence: int) -> Tensor:
    """float64 attention of one sequence's dequantised queries, keys and values, without rounding probabilities."""
    size, (keys, values) = case.cache.block_size, case.operands
    position = torch.arange(length)
    block, at = case.table[sequence, position // size].cuda(), (position % size).cuda()
    wide = [decode(keys.codes)[block, :, at], decode(values.codes)[block, :, :, at]]
    k, v = (x * y[block, :, at].unsqueeze(-1) for x, y in zip(wide, (keys.scales, values.scales), strict=True))
    q = decode(case.q.codes[start : start + length]) * case.q.scales[start : start + length].unsqueeze(-1)
    k, v = (x.repeat_interleave(q.shape[1] // k.shape[1], 1) for x in (k, v))
    scores = torch.einsum("qhd,khd->hqk", q, k) / math.sqrt(q.shape[2])
    hidden = torch.ones(scores.shape[1:], dtype=torch.bool, device="cuda").triu(1)
    return torch.einsum("hqk,khd->qhd", scores.masked_fill(hidden, -torch.inf).softmax(-1), v)


@pytest.mark.parametrize("shape", SHAPES)
def test_values(shape: tuple[int, int, int]) -> None:
    """E4M3 rounds a probability by 2^-4 at most, 3% in the mean square of uniform mantissas, and errors of keys average out.

    The CPU's definition rounds the same numbers, up to those on a boundary.
    """
    lengths = [300, 1, 64, 129]
    case = Case.make(*shape, 64, lengths, "cuda")
    out, _ = run(case, case.q, lengths, lengths)
    assert far(out.cpu(), on_cpu(case, case.q, lengths, lengths)) < 5e-3
    start = 0
    for sequence, length in enumerate(lengths):
        assert far(out[start : start + length], plain(case, start, length, sequence)) < 0.04
        start += length


def test_a_wrong_key_or_scale_or_value_is_seen() -> None:
    """The comparisons above would not miss one key's codes or scale."""
    lengths = [700]
    for name in ("keys", "values", "key_scales", "value_scales"):
        case = Case.make(4, 4, 64, 64, lengths, "cuda")
        out, _ = run(case, case.q, lengths, lengths)
        tensor = getattr(case.cache, name)
        block, at = int(case.table[0, 5]), 17  # position 337
        place = (0, block, 1, slice(None), at) if name == "values" else (0, block, 1, at)
        tensor[place] = tensor[place].float().mul(2 if "scales" in name else -2).clamp(-448, 448).to(tensor.dtype)
        seen, _ = run(case, case.q, lengths, lengths)
        assert same(seen[:337], out[:337]) and same(seen[:, [0, 2, 3]], out[:, [0, 2, 3]]), name
        assert (seen[337:, 1] != out[337:, 1]).any(1).double().mean() > 0.5, name


def test_what_lies_behind_the_last_key_does_not_matter() -> None:
    """Later tokens of the same blocks, as large as they may be, and NaN."""
    lengths = [700]
    case = Case.make(28, 4, 128, 64, lengths, "cuda")
    contexts = [1, 13, 64, 65, 127, 300]
    right = []
    for context in contexts:
        q = case.queries(lengths, [context], [context])
        right.append(run(case, q, [context], [context])[0])
    for context, wanted in zip(reversed(contexts), reversed(right), strict=True):
        later = torch.arange(context, 700)
        block, at = case.table[0, later // 64].cuda(), (later % 64).cuda()
        for tensor, place in (
            (case.cache.keys[0].view(torch.uint8), (block, slice(None), at)),
            (case.cache.values[0].view(torch.uint8), (block, slice(None), slice(None), at)),
        ):
            tensor[place] = 0x7F
        for scales in (case.cache.key_scales, case.cache.value_scales):
            assert scales is not None
            scales[0, block, :, at] = 1e30 if context % 2 else torch.nan
        q = case.queries(lengths, [context], [context])
        assert same(run(case, q, [context], [context])[0], wanted), context
        last = case.queries(lengths, [1], [context])
        assert same(run(case, last, [1], [context])[0], wanted[-1:]), context


def test_a_nan_is_visible() -> None:
    lengths = [200, 100]
    for name in ("keys", "values"):
        case = Case.make(4, 4, 64, 64, lengths, "cuda")
        out, _ = run(case, case.q, lengths, lengths)
        block, at = int(case.table[0, 1]), 6  # position 70
        codes = getattr(case.cache, name).view(torch.uint8)
        codes[(0, block, slice(None), slice(None), at) if name == "values" else (0, block, slice(None), at)] = 0x7F
        seen, _ = run(case, case.q, lengths, lengths)
        assert seen[70:200].isnan().all() and same(seen[:64], out[:64]) and same(seen[200:], out[200:]), name


CASES = [
    ((32, 8, 128), False, True),
    ((28, 4, 128), True, False),
    ((9, 3, 64), False, False),
    ((4, 1, 32), True, True),
]


@pytest.mark.parametrize(("shape", "has_bias", "has_norm"), CASES)
@pytest.mark.parametrize("size", [64, 192])
def test_split_heads_quantises_what_bf16_attention_would_read(
    shape: tuple[int, int, int], has_bias: bool, has_norm: bool, size: int
) -> None:
    """The bytes of the one quantiser, in their places, and nothing else written."""
    tokens = 133
    angles = torch.arange(500.0).unsqueeze(1) * 1e4 ** -(torch.arange(0, shape[2], 2) / shape[2])
    heads = Heads(*shape, 1e-6, angles.cos().cuda(), angles.sin().cuda())
    positions = torch.randint(0, 500, (tokens,), generator=torch.Generator().manual_seed(1)).cuda()
    norms = (vector(heads.dim, 3), vector(heads.dim, 4)) if has_norm else (None, None)
    fused = noise(tokens, heads.width)
    fused[7, heads.dim] = torch.nan
    fused[9, -1] = torch.inf
    given = (fused, HeadWeights(vector(heads.width, 2) if has_bias else None, *norms), heads, positions)
    keys, values = (torch.zeros(tokens, heads.kv_heads, heads.dim, dtype=torch.bfloat16, device="cuda") for _ in "kv")
    q = split_heads(*given, Target(keys, values, None))
    slots = torch.randperm(5 * size, generator=torch.Generator().manual_seed(2))[:tokens].cuda()
    caches = [KVCache.allocate(1, 5, size, heads.kv_heads, heads.dim, "cuda", "fp8") for _ in range(2)]
    for tensor in (t for cache in caches for t in cache.tensors):
        tensor.view(torch.uint8).fill_(0x55)
    codes, plain_values = split_heads_fp8(*given, caches[0].target(0, slots), True)
    wanted = [quantize_heads(x) for x in (q, keys, values)]
    caches[1].target(0, slots).store(wanted[1], wanted[2])
    seen_tensors = codes.codes, codes.scales, *caches[0].tensors
    for seen, right in zip(seen_tensors, (wanted[0].codes, wanted[0].scales, *caches[1].tensors), strict=True):
        a, b = (x.nan_to_num(nan=-1.0) if x.dtype == torch.float32 else x.view(torch.uint8) for x in (seen, right))
        both_nan = (a & 127 == 127) & (b & 127 == 127) if a.dtype == torch.uint8 else a == b
        assert ((a == b) | both_nan).all()
    for seen, right in zip(plain_values, wanted, strict=True):
        right_values = dequantize_heads(right)
        assert torch.equal(seen.isnan(), right_values.isnan()) and same(seen.nan_to_num(), right_values.nan_to_num())
    again, nothing = split_heads_fp8(*given, caches[1].target(0, slots), False)
    assert nothing == () and same(again.codes, codes.codes)


@pytest.mark.parametrize("shape", [(9, 3, 64), (32, 8, 128), (28, 4, 128)])
def test_gradients_are_those_of_the_dequantised_operands(shape: tuple[int, int, int]) -> None:
    """Straight through the quantiser: float64 autograd of attention over codes times scales, rounded to BF16."""
    heads, kv_heads, dim = shape
    lengths = [300, 1, 64, 129]
    case = Case.make(*shape, 64, lengths, "cuda")
    out, lse = trained(case, lengths)
    keys, values = case.operands
    position = torch.cat([torch.arange(n) for n in lengths])
    sequence = torch.repeat_interleave(torch.arange(len(lengths)), torch.tensor(lengths))
    block, at = case.table[sequence, position // 64].cuda(), (position % 64).cuda()
    found = (decode(keys.codes)[block, :, at], keys.scales), (decode(values.codes)[block, :, :, at], values.scales)
    k, v = ((x.float() * scales[block, :, at].unsqueeze(-1)).bfloat16() for x, scales in found)
    q = dequantize_heads(case.q)
    dout = torch.randn(q.shape, generator=torch.Generator().manual_seed(1)).bfloat16().cuda()
    context = PackedContext.of(lengths, "cuda", kv_fp8=True)
    assert isinstance(context.layout, Sequences)
    seen = HopperOps(torch.device("cuda")).attention_grad(dout, q, k, v, out, lse, context.layout)
    wide = [x.double().requires_grad_() for x in (q, k, v)]
    outs = []
    for a, b, c in zip(*(x.split(lengths) for x in wide), strict=True):
        b, c = (x.repeat_interleave(heads // kv_heads, 1) for x in (b, c))
        scores = torch.einsum("qhd,khd->hqk", a, b) / math.sqrt(dim)
        hidden = torch.ones(scores.shape[1:], dtype=torch.bool, device="cuda").triu(1)
        outs.append(torch.einsum("hqk,khd->qhd", scores.masked_fill(hidden, -torch.inf).softmax(-1), c))
    for x, right in zip(seen, torch.autograd.grad(torch.cat(outs), wide, dout.double()), strict=True):
        # The softmax's correction uses the forward's own output, whose probabilities are rounded to E4M3.
        assert far(x, right) < 0.08


@pytest.mark.parametrize(("family", "flow", "dim"), [("qwen3", "fp8", 128), ("qwen2", "bf16", 64), ("mistral", "fp8", 32)])
def test_engine_and_trainer_agree_and_gradients_flow(family: str, flow: Any, dim: int) -> None:
    sizes = {"hidden_size": 256, "intermediate_size": 512, "num_heads": 8, "num_kv_heads": 2, "head_dim": dim}
    model = tiny_model(family, flow, device="cuda", kv_fp8=True, **sizes)
    for result in check_model(model, 1200):
        assert (result.differing, result.first) == (0, None), result
    for leaf in model.leaves.values():
        leaf.grad = torch.zeros(leaf.shape, dtype=model.ops.gradient_dtype, device="cuda")
    tokens = torch.arange(300) % 61
    hidden = model.forward(tokens, model.packed([200, 100]))
    model.chosen_logprobs(hidden, tokens, 1.0)[0].sum().backward()
    for leaf in model.leaves.values():
        assert leaf.grad is not None and torch.isfinite(leaf.grad).all() and leaf.grad.any(), leaf.name


def test_a_captured_decode_reads_its_lengths_anew() -> None:
    lengths = [300, 200, 64]
    case = Case.make(28, 4, 128, 64, lengths, "cuda")
    out, _ = run(case, case.q, lengths, lengths)
    tiles = bf16_kernel.make_tiles([1] * 3, lengths, 28, 4, None, case.table.int().cuda(), 64, "cuda")
    q = case.queries(lengths, [1] * 3, lengths)
    kernel.attention(q, *case.operands, tiles, False)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        seen, _ = kernel.attention(q, *case.operands, tiles, False)
    contexts = [1, 129, 63]
    new = case.queries(lengths, [1] * 3, contexts)
    q.codes.copy_(new.codes), q.scales.copy_(new.scales), tiles.context.copy_(torch.tensor(contexts))
    graph.replay()
    assert same(seen, out[[0, 300 + 128, 500 + 62]])
