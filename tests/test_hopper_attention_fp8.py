"""FP8 attention on Hopper without a GPU: addressing, masks and meaning in Triton's interpreter, and the compiler's code.

Bits are proved in tests/gpu. The interpreter runs in a child process, which is this file run as a program; its casts are
torch's (see tests/test_hopper_norm.py). The reference is the CPU's own FP8 attention, of the same codes.
"""

from __future__ import annotations

import importlib.util
import re
import subprocess
from collections import Counter
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from jetrl.kernels import attention as reference
from jetrl.kernels.quant import E4M3, Quantized, decode, dequantize_heads, quantize_heads, quantize_rows
from jetrl.model.context import KVCache, PagedContext
from tests.interpreter import run_python

pytestmark = pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="triton is not installed")

LENGTHS = [150, 1, 64, 70, 5]


@dataclass
class Case:
    """Codes of the queries of all sequences, and of their keys and values in a cache whose other slots hold NaN."""

    q: Quantized  # [T, heads, dim]
    cache: KVCache
    table: Tensor  # int64 [S, most blocks]

    @staticmethod
    def make(heads: int, kv_heads: int, dim: int, size: int, lengths: list[int], device: str = "cpu") -> Case:
        generator = torch.Generator().manual_seed(heads * dim)
        tokens, needed = sum(lengths), [-(-n // size) for n in lengths]
        q, k, v = (torch.randn(tokens, n, dim, generator=generator) for n in (heads, kv_heads, kv_heads))
        k[4::7] *= 3.0
        v[5::11] *= 40.0  # scales of a tile far apart
        v[6::13] = 0.0
        cache = KVCache.allocate(1, sum(needed) + 2, size, kv_heads, dim, kind="fp8")
        for tensor in cache.tensors:
            tensor.copy_(torch.full(tensor.shape, torch.nan))
        blocks = torch.randperm(sum(needed) + 2, generator=generator)
        table = blocks[-1].repeat(len(lengths), max(needed, default=1))
        for row, part in enumerate(blocks[: sum(needed)].split(needed)):
            table[row, : len(part)] = part
        position = torch.cat([torch.arange(n) for n in lengths])
        sequence = torch.repeat_interleave(torch.arange(len(lengths)), torch.tensor(lengths))
        slots = table[sequence, position // size] * size + position % size
        cache.target(0, slots).store(*(quantize_heads(x.bfloat16()) for x in (k, v)))
        cache.keys, cache.values, cache.key_scales, cache.value_scales = (x.to(device) for x in cache.tensors)
        codes = quantize_heads(q.bfloat16())
        return Case(Quantized(codes.codes.to(device), codes.scales.to(device)), cache, table)

    @property
    def operands(self) -> tuple[Quantized, Quantized]:
        return self.cache.target(0, self.table).codes

    def queries(self, lengths: list[int], new: list[int], contexts: list[int]) -> Quantized:
        """The last `new` of `contexts` tokens of each sequence."""
        starts = [sum(lengths[:s]) for s in range(len(lengths))]
        return self.rows(torch.cat([s + torch.arange(c - n, c) for s, c, n in zip(starts, contexts, new, strict=True)]))

    def rows(self, at: Tensor) -> Quantized:
        """Queries of tokens `at`."""
        at = at.to(self.q.codes.device)
        return Quantized(self.q.codes.view(torch.uint8)[at].view(E4M3), self.q.scales[at])


def on_cpu(case: Case, q: Quantized, new: list[int], contexts: list[int]) -> Tensor:
    cache = KVCache(
        *(x.cpu() for x in case.cache.tensors[:2]), case.cache.block_size, *(x.cpu() for x in case.cache.tensors[2:])
    )
    active = [i for i, n in enumerate(new) if n]
    context = PagedContext.of(cache, [new[i] for i in active], [contexts[i] for i in active], case.table[active])
    assert isinstance(context.layout, reference.Layout)
    keys, values = Case(q, cache, case.table).operands
    return reference.attention_fp8(Quantized(q.codes.cpu(), q.scales.cpu()), keys, values, context.layout)


def far(seen: Tensor, wanted: Tensor) -> float:
    """Norm of the difference, as a share of the norm. NaN fails every comparison."""
    return ((seen.double() - wanted.double()).norm() / wanted.double().norm()).item()


# --- In the interpreter


def mend() -> None:
    import triton
    import triton.language as tl

    from jetrl.kernels.hopper import attention_fp8, quant
    from tests.test_hopper_norm import mend_the_interpreter

    mend_the_interpreter()
    globals()["tl"] = tl  # a kernel finds its names here

    @triton.jit
    def keep(codes, wanted):
        return tl.where(wanted, codes.to(tl.uint8, bitcast=True), 0).to(codes.dtype, bitcast=True)

    @triton.jit
    def multiply_add(a, b, c):
        return tl.fma(a, b, c)

    attention_fp8._to_e4m3, attention_fp8._keep = quant._to_e4m3, keep
    attention_fp8._multiply_add = multiply_add


def run_attention() -> None:
    from jetrl.kernels.hopper import attention as tiles_of
    from jetrl.kernels.hopper import attention_fp8 as kernel

    steps = [
        (LENGTHS, LENGTHS),
        ([100, 1, 3, 64, 0], [140, 1, 64, 70, 5]),
        ([1] * 5, LENGTHS),
        ([1, 1, 1, 1, 0], [64, 1, 63, 65, 0]),
    ]
    for heads, kv_heads, dim, size in ((4, 4, 32, 64), (6, 2, 64, 128), (7, 1, 32, 64)):
        case = Case.make(heads, kv_heads, dim, size, LENGTHS)
        for new, contexts in steps:
            q = case.queries(LENGTHS, new, contexts)
            tiles = tiles_of.make_tiles(new, contexts, heads, kv_heads, None, case.table.int(), size, "cpu")
            out, lse = kernel.attention(q, *case.operands, tiles, True)
            wanted = on_cpu(case, q, new, contexts)
            assert far(out, wanted) < 5e-3, (heads, dim, new, far(out, wanted))
            assert lse is not None and torch.isfinite(lse).all()
    # A group of a whole head's columns, which the kernel quantises itself; and more query heads than a half tile has rows.
    for heads, kv_heads in ((3, 1), (9, 1)):
        case = Case.make(heads, kv_heads, 128, 64, LENGTHS)
        q, where = case.queries(LENGTHS, [1, 0, 1, 1, 1], [130, 0, 64, 70, 5]), (None, case.table.int(), 64, "cpu")
        tiles = tiles_of.make_tiles([1, 0, 1, 1, 1], [130, 0, 64, 70, 5], heads, kv_heads, *where)
        out, _ = kernel.attention(q, *case.operands, tiles, False)
        assert far(out, on_cpu(case, q, [1, 0, 1, 1, 1], [130, 0, 64, 70, 5])) < 5e-3
        codes, right = kernel.decode_codes(q, *case.operands, tiles), quantize_rows(out.flatten(1))
        # Fused multiply-adds round twice here: a code may be the neighbour.
        assert far(codes.codes.float(), right.codes.float()) < 5e-3
        torch.testing.assert_close(codes.scales, right.scales, rtol=1e-6, atol=0)
    case = Case.make(7, 1, 32, 64, LENGTHS)
    whole = on_cpu(case, case.q, LENGTHS, LENGTHS)
    tiles = tiles_of.make_tiles(LENGTHS, LENGTHS, 7, 1, None, case.table.int(), 64, "cpu")
    out, lse = kernel.attention(case.q, *case.operands, tiles, True)
    assert far(out, whole) < 5e-3
    first = sum(LENGTHS[:3])  # the fourth sequence, whose scores are formed anew
    slots = case.table[3, torch.arange(70) // 64] * 64 + torch.arange(70) % 64
    keys = case.operands[0]
    k = (decode(keys.codes)[slots // 64, 0, slots % 64] * keys.scales[slots // 64, 0, slots % 64].unsqueeze(1))  # fmt: skip
    scores = dequantize_heads(case.q)[first : first + 70].double() @ k.T / 32**0.5
    hidden = torch.ones(70, 70, dtype=torch.bool).triu(1).unsqueeze(1)
    wanted = scores.masked_fill(hidden, -torch.inf).logsumexp(-1)
    torch.testing.assert_close(lse[:, first : first + 70].t().double(), wanted, rtol=2e-2, atol=2e-2)


def run_heads() -> None:
    from jetrl.kernels.hopper.heads import split_heads, split_heads_fp8
    from jetrl.kernels.ops import Heads, HeadWeights, Target

    generator = torch.Generator().manual_seed(0)
    for shape, has_bias, has_norm, size in (((9, 3, 64), True, True, 64), ((4, 1, 32), False, False, 128)):
        heads, kv_heads, dim = shape
        width = (heads + 2 * kv_heads) * dim
        fused = torch.randn(5, width, generator=generator).bfloat16()
        fused[2] = 0.0
        bias = torch.randn(width, generator=generator).bfloat16() if has_bias else None
        norms = [torch.rand(dim, generator=generator).bfloat16() + 0.5 if has_norm else None for _ in "qk"]
        angles = torch.rand(40, dim // 2, generator=generator) * 6
        turned = Heads(*shape, 1e-6, angles.cos(), angles.sin())
        given = (fused, HeadWeights(bias, *norms), turned, torch.tensor([7, 0, 39, 3, 7]))
        keys, values = (torch.zeros(5, kv_heads, dim).bfloat16() for _ in "kv")
        q = split_heads(*given, Target(keys, values, None))
        slots = torch.tensor([3, 2 * size + 8, 0, size - 1, size])
        cache = KVCache.allocate(1, 3, size, kv_heads, dim, kind="fp8")
        target = cache.target(0, slots)
        codes, plain = split_heads_fp8(*given, target, True)
        right = KVCache.allocate(1, 3, size, kv_heads, dim, kind="fp8")
        right.target(0, slots).store(quantize_heads(keys), quantize_heads(values))
        wanted = quantize_heads(q)
        for seen, x in zip(
            (codes.codes, codes.scales, *cache.tensors), (wanted.codes, wanted.scales, *right.tensors), strict=True
        ):
            if x.dtype == E4M3:  # fused multiply-adds round twice here: a code may be the neighbour
                assert far(seen.float(), x.float()) < 5e-3 and (seen.float() != x.float()).double().mean() < 1e-2
                assert torch.equal(seen.float() == 0, x.float() == 0)
            else:
                torch.testing.assert_close(seen, x, rtol=1e-6, atol=0)
        for seen, x in zip(plain, (codes, quantize_heads(keys), quantize_heads(values)), strict=True):
            assert far(seen, dequantize_heads(x)) < 5e-3
        assert split_heads_fp8(*given, target, False)[1] == ()


@pytest.mark.slow
def test_in_the_interpreter() -> None:
    run_python(__file__)


# --- Compiled for Hopper

TYPES = {"q_ptr": "*fp8e4nv", "k_ptr": "*fp8e4nv", "v_ptr": "*fp8e4nv", "out_ptr": "*bf16", "c": "fp32"}
TYPES |= dict.fromkeys(("q_scale_ptr", "k_scale_ptr", "v_scale_ptr", "lse_ptr", "scales_ptr"), "*fp32")
TYPES |= dict.fromkeys(("tokens", "table_stride", "scale_stride"), "i32")


def machine_code(
    kv_heads: int, group: int, dim: int, block_size: int, want_lse: bool, programs: int | None, codes: bool, folder: Path
) -> tuple[str, str]:
    """PTX, and what ptxas made of it. programs: of decode; None: tiles of several tokens."""
    import triton
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    from jetrl.kernels.hopper import attention_fp8 as kernel

    fixed: dict[str, Any] = {"KV_HEADS": kv_heads, "GROUP": group, "DIM": dim, "BLOCK_SIZE": block_size, "ROWS": 64}
    launch = kernel.PREFILL if programs is None else kernel.decode_launch(programs)
    fixed |= {"KEYS": kernel.KEYS, "WANT_LSE": want_lse, "CODES": codes, "ONE_TOKEN": programs is not None}
    fixed |= ({} if want_lse else {"lse_ptr": None}) | ({} if codes else {"scales_ptr": None})
    names = kernel._forward_kernel.arg_names
    types = {**TYPES, "out_ptr": "*fp8e4nv" if codes else "*bf16"}
    signature = {n: "constexpr" if n in fixed else types.get(n, "*i32") for n in names}
    aligned = {(i,): [["tt.divisibility", 16]] for i, n in enumerate(names) if signature[n][0] == "*"}
    source = ASTSource(kernel._forward_kernel, signature, {(names.index(n),): v for n, v in fixed.items()}, aligned)
    options = {"num_warps": 4, "num_stages": launch.stages, "maxnreg": launch.registers, "enable_fp_fusion": False}
    ptx = triton.compile(source, target=GPUTarget("cuda", 90, 32), options=options).asm["ptx"]
    tools = Path(triton.__file__).parent / "backends/nvidia/bin"
    (folder / "kernel.ptx").write_text(ptx)
    command = [tools / "ptxas", "-v", "--gpu-name=sm_90a", folder / "kernel.ptx", "-o", folder / "kernel.cubin"]
    report = subprocess.run(command, capture_output=True, text=True, check=True).stderr
    assert "serializ" not in report, report
    command = [tools / "nvdisasm", "-c", folder / "kernel.cubin"]
    return ptx, subprocess.run(command, capture_output=True, text=True, check=True).stdout


def loops(code: str) -> list[Counter[str]]:
    """How often each instruction stands in each loop, in their order; loops of less than 100 instructions left out."""
    labels: dict[str, int] = {}
    found: list[tuple[str, str]] = []
    counts = []
    for line in code.splitlines():
        if label := re.match(r"(\.L_x_\d+):", line.strip()):
            labels[label[1]] = len(found)
        if instruction := re.search(r"/\*[0-9a-f]{4,5}\*/\s+(?:@!?U?P\w+ )?\s*([A-Z][A-Z0-9_.]*)(.*)", line):
            found.append((instruction[1], instruction[2]))
            target = re.search(r"\.L_x_\d+", instruction[2])
            if instruction[1].startswith("BRA") and target and target[0] in labels:
                inside = [name for name, _ in found[labels[target[0]] :]]
                counts.append(Counter(name.split(".")[0] for name in inside))
    return [c for c in counts if c.total() > 100]


@pytest.mark.parametrize(
    ("shape", "block_size", "want_lse"),
    [
        ((8, 4, 128), 64, False),
        ((8, 4, 128), 64, True),
        ((4, 7, 128), 128, False),
        ((3, 3, 64), 64, False),
        ((2, 1, 32), 64, True),
    ],
)
def test_nothing_moves_between_the_products(
    shape: tuple[int, int, int], block_size: int, want_lse: bool, tmp_path: Path
) -> None:
    """FP8 `wgmma` in both loops; in the first no way through shared memory and no shuffle but those of a row's sums."""
    ptx, code = machine_code(*shape, block_size, want_lse, None, False, tmp_path)
    assert "mma.sync" not in ptx
    products = set(re.findall(r"wgmma\.mma_async\S*", ptx))
    assert products and all(name.endswith(".f32.e4m3.e4m3") for name in products), products
    main, edge = loops(code)
    for loop in (main, edge):
        assert loop["QGMMA"] == shape[2] // 32 + 2, loop
        assert loop["MUFU"] >= 34 and not loop["LDL"] and not loop["STL"], loop
    assert not main["STS"] and main["BAR"] <= 2, main
    # Two rows a thread, two steps each: the maximum, the sum, and v_max; halves of codes are put together in 8 words.
    assert main["SHFL"] <= 12 and main["PRMT"] <= 12, main
    assert main.total() <= (570 if shape[2] == 128 else 500), main.total()


@pytest.mark.parametrize(
    ("shape", "codes"), [((8, 4, 128), False), ((8, 4, 128), True), ((4, 7, 128), True), ((3, 3, 64), False)]
)
@pytest.mark.parametrize("programs", [64, 512, 2048])
def test_decode_forms_the_rows_that_matter(shape: tuple[int, int, int], codes: bool, programs: int, tmp_path: Path) -> None:
    """Half of each product's rows: half the exponentials, shuffles and codes; the last tile is loaded before the first."""
    ptx, code = machine_code(*shape, 64, False, programs, codes, tmp_path)
    assert "mma.sync" not in ptx
    products = set(re.findall(r"wgmma\.mma_async\S*", ptx))
    assert products and all(name.endswith(".f32.e4m3.e4m3") for name in products), products
    (main,) = loops(code)
    assert main["QGMMA"] == shape[2] // 32 + 2, main
    assert 18 <= main["MUFU"] <= 19 and main["SHFL"] <= 6 and not main["LDL"] and not main["STL"], main
    ahead = code[: code.index("QGMMA")]
    assert ahead.count("LDG.E.128") >= shape[2] // 16 and code.count("QGMMA") == 2 * main["QGMMA"], ahead.count("LDG.E.128")
    assert not main["STS"] and main["BAR"] <= 2 and main["LDGSTS"] == shape[2] // 16 + 3 and not main["LDG"], main
    assert main.total() <= (380 if shape[2] == 128 else 330), main.total()


@pytest.mark.parametrize("dim", [32, 64, 128])
def test_split_heads_sums_a_head_in_one_order(dim: int) -> None:
    """Training writes BF16 besides, into other blocks than the engine: the norm's and the quantiser's layouts are the same."""
    import triton
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    from jetrl.kernels.hopper import heads
    from jetrl.kernels.ops import Heads

    names, seen = heads._split_heads.arg_names, set()
    types = {n: "*bf16" if n.endswith("_ptr") else "i32" for n in names} | {"eps": "fp32", "rows_ptr": "*i64"}
    types |= {n: "*fp8e4nv" for n in names if "codes" in n} | {n: "*fp32" for n in names if "scales" in n}
    types |= {"positions_ptr": "*i64", "cos_ptr": "*fp32", "sin_ptr": "*fp32"}
    sizes, _, warps = heads._tile(Heads(8, 4, dim, 1e-6, torch.empty(0), torch.empty(0)))
    for block_size, keep in ((64, True), (64, False), (128, False)):
        fixed = {**sizes, "HAS_BIAS": False, "HAS_NORM": True, "HAS_ROWS": True, "BLOCK_SIZE": block_size, "KEEP": keep}
        signature = {n: "constexpr" if n in fixed else types[n] for n in names}
        aligned = {(i,): [["tt.divisibility", 16]] for i, n in enumerate(names) if signature[n][0] in "*i"}
        source = ASTSource(heads._split_heads, signature, {(names.index(n),): v for n, v in fixed.items()}, aligned)
        options = {"num_warps": warps, "enable_fp_fusion": False}
        text = triton.compile(source, target=GPUTarget("cuda", 90, 32), options=options).asm["ttgir"]
        layouts = dict(re.findall(r"^(#\w+) = (.*)$", text, re.M))
        found = re.findall(r"\}\) : \(tensor<\d+x\d+xf32, (#\w+)>\)", text)
        assert len(found) == 4  # two sums of squares, two amax
        seen |= {layouts[name] for name in found}
    assert len(seen) == 1, seen


if __name__ == "__main__":
    mend()
    run_attention()
    run_heads()
