"""What a machine without a GPU can say about `hopper/norm.py` and `hopper/heads.py`.

Indexing and masks, in Triton's interpreter: its casts to BF16 and E4M3 are wrong (torch's are put in their place) and so are
other last bits, so values are compared with tolerance here, and to the bit on a GPU (tests/gpu). It has to be chosen before
triton is imported, hence a child process, which is this file run as a program. And the layouts, by compiling for sm_90:
variants of a kernel whose sum must not change may not spread a row over threads in different ways.
"""

from __future__ import annotations

import importlib.util
import re

import pytest
import torch
from torch import Tensor

from jetrl.kernels import norm as reference
from jetrl.kernels.quant import Quantized, TokenGroups, token_groups
from tests.interpreter import run_python
from tests.test_hopper_quant import mend_the_quantiser

pytestmark = pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="triton is not installed")

EPS = 1e-6
LENGTHS = (130, 3, 128)  # of sequences: groups of 128, 2, 3 and 128 tokens
SIZES = (128, 2, 3, 128)


def noise(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).bfloat16()


def groups() -> TokenGroups:
    return token_groups(list(LENGTHS))


def close(seen: Tensor, wanted: Tensor, share: float = 2.0**-6) -> None:
    """Within a share of each element and a small one of the largest."""
    error = (seen.double() - wanted.double()).abs()
    assert (error <= share * wanted.double().abs() + 2.0**-10 * wanted.abs().max().double()).all(), error.max()


def rows_close(seen: Quantized, wanted: Tensor) -> None:
    cols = wanted.shape[1]
    value = seen.codes.float() * seen.scales.repeat_interleave(128, 1)[:, :cols]
    close(value, wanted, 0.13)


def tokens_close(seen: Quantized, wanted: Tensor) -> None:
    value = (seen.codes.float() * seen.scales.repeat_interleave(128, 1)).t()
    for group, (start, size) in enumerate(zip(groups().starts.tolist(), SIZES, strict=True)):
        close(value[128 * group : 128 * group + size], wanted[start : start + size], 0.13)
        assert (value[128 * group + size : 128 * (group + 1)] == 0).all()


def check_add_rms_norm() -> None:
    from jetrl.kernels.hopper import norm

    for rows, width in ((3, 576), (2, 129), (1, 40)):
        x, delta, weight = noise(rows, width), noise(rows, width, seed=1), noise(width, seed=2)
        total, y, inverse = norm.add_rms_norm(x, delta, weight, EPS, False)
        close(total, x + delta)
        close(y, reference.rms_norm(total, weight, EPS))
        close(inverse, total.double().square().mean(1).add(EPS).rsqrt(), 1e-6)
        rows_close(norm.add_rms_norm(x, delta, weight, EPS, True)[1], y)
        alone, y, _ = norm.add_rms_norm(x, None, weight, EPS, False)
        assert alone is x
        close(y, reference.rms_norm(x, weight, EPS))


def check_rms_norm_tokens() -> None:
    from jetrl.kernels.hopper import norm

    x, weight = noise(sum(LENGTHS), 136), noise(136, seed=2)
    _, y, inverse = norm.add_rms_norm(x, None, weight, EPS, False)
    tokens_close(norm.rms_norm_tokens(x, inverse, weight, groups()), y)


def check_rms_norm_grad() -> None:
    from jetrl.kernels.hopper import norm

    norm._MAX_CHUNKS = 4
    for rows, width in ((7, 576), (2, 129), (1, 40)):
        dy, x, weight = noise(rows, width), noise(rows, width, seed=1), noise(width, seed=2)
        residual = noise(rows, width, seed=3)
        inverse = x.float().square().mean(1).add(EPS).rsqrt()
        wanted, dweight = reference.rms_norm_grad(dy, x, weight, EPS)
        dx, seen = norm.rms_norm_grad(dy, x, inverse, weight, None)
        close(dx, wanted)
        close(seen, dweight)
        close(norm.rms_norm_grad(dy, x, inverse, weight, residual)[0], wanted.float() + residual)


def check_silu_mul() -> None:
    from jetrl.kernels.hopper import norm

    for rows, width in ((3, 1100), (2, 40)):
        gate_up, dy = noise(rows, 2 * width), noise(rows, width, seed=1)
        y = reference.silu_mul(gate_up)
        close(norm.silu_mul(gate_up, False)[0], y)
        rows_close(norm.silu_mul(gate_up, True)[0], y)
        close(norm.silu_mul_grad(dy, gate_up), reference.silu_mul_grad(dy, gate_up))


def check_silu_mul_squares() -> None:
    from jetrl.kernels.hopper import norm

    gate_up, dy = noise(sum(LENGTHS), 2 * 136), noise(sum(LENGTHS), 128, seed=1)
    y = reference.silu_mul(gate_up)
    rows, tokens = norm.silu_mul(gate_up, True, groups())
    rows_close(rows, y)
    tokens_close(tokens, y)
    gate_up = noise(sum(LENGTHS), 2 * 128)
    wanted = reference.silu_mul_grad(dy, gate_up)
    rows, tokens = norm.silu_mul_grad(dy, gate_up, groups())
    rows_close(rows, wanted)
    tokens_close(tokens, wanted)


def plain_split(
    fused: Tensor, bias: Tensor | None, norms: tuple[Tensor, Tensor] | None, turn: Tensor, shape: object
) -> list[Tensor]:
    """q, k, v, differentiable, in the dtype of `fused`. turn: cos and sin of each token, [2, T, dim / 2]."""
    fused = fused if bias is None else fused + bias
    q, k, v = fused.view(len(fused), -1, shape.dim).split((shape.heads, shape.kv_heads, shape.kv_heads), 1)
    if norms is not None:
        q, k = ((x * (x.square().mean(-1, keepdim=True) + EPS).rsqrt() * w) for x, w in zip((q, k), norms, strict=True))
    cos, sin = turn.unsqueeze(2)
    q, k = (torch.cat((a * cos - b * sin, b * cos + a * sin), -1) for a, b in (x.chunk(2, -1) for x in (q, k)))
    return [q, k, v]


def check_heads() -> None:
    from jetrl.kernels.hopper.heads import split_heads, split_heads_grad
    from jetrl.kernels.ops import Heads, HeadWeights, Target

    for shape, has_bias, has_norm in (
        ((9, 3, 64), False, True),
        ((15, 2, 10), True, False),
        ((2, 1, 16), True, True),
    ):
        tokens = 5
        angles = torch.rand(40, shape[2] // 2, generator=torch.Generator().manual_seed(4)) * 6
        heads = Heads(*shape, EPS, angles.cos(), angles.sin())
        fused = noise(tokens, heads.width + 16)[:, : heads.width]
        bias = noise(heads.width, seed=1) if has_bias else None
        norms = (noise(heads.dim, seed=2), noise(heads.dim, seed=3)) if has_norm else None
        positions, rows = torch.tensor([7, 0, 39, 3, 7], dtype=torch.int32), torch.tensor([3, 8, 0, 5, 1])
        keys, values = (torch.zeros(9, heads.kv_heads, heads.dim).bfloat16() for _ in range(2))
        given = (fused, HeadWeights(bias, *(norms or (None, None))), heads, positions)
        q = split_heads(*given, Target(keys, values, rows))

        wide = [x.double().requires_grad_() if x is not None else None for x in (fused, *(norms or (None, None)))]
        turn = torch.stack((heads.cos, heads.sin))[:, positions].double()
        wanted = plain_split(wide[0], bias, (wide[1], wide[2]) if has_norm else None, turn, heads)
        for seen, x in zip((q, keys[rows], values[rows]), wanted, strict=True):
            close(seen, x.detach(), 2.0**-5)
        assert keys[[2, 4, 6, 7]].abs().max() == values[[2, 4, 6, 7]].abs().max() == 0

        dy = [noise(tokens, x.shape[1] + 1, heads.dim, seed=5 + i)[:, 1:] for i, x in enumerate(wanted)]
        torch.autograd.backward(wanted, [x.double() for x in dy])
        dfused, *dnorms = split_heads_grad(*dy, *given)
        close(dfused, wide[0].grad, 2.0**-4)
        for seen, x in zip(dnorms, wide[1:], strict=True):
            assert (seen is None) == (x is None)
            if x is not None:
                close(seen, x.grad, 2.0**-4)


CHECKS = {name.removeprefix("check_"): f for name, f in list(globals().items()) if name.startswith("check_")}


def mend_the_interpreter() -> None:
    """Casts by torch, loop bounds that numpy 2.4 takes, and device functions without inline assembly or slow reductions."""
    global tl  # a kernel finds its names here
    import triton
    import triton.language as tl
    from triton.runtime import interpreter

    from jetrl.kernels.hopper import norm, quant

    types = {tl.bfloat16: torch.bfloat16, tl.float32: torch.float32, tl.float8e4nv: torch.float8_e4m3fn}
    storage = {tl.bfloat16: torch.uint16, tl.float32: torch.float32, tl.float8e4nv: torch.uint8, tl.float16: torch.uint16}
    types[tl.float16] = torch.float16  # in which the interpreter multiplies codes

    def convert(data, source, target, rounding):  # numpy arrays, with BF16 as uint16 and E4M3 as uint8
        value = torch.from_numpy(data.copy()).view(types[source]).float()
        value = value.clamp(-448, 448) if target == tl.float8e4nv else value
        return value.to(types[target]).view(storage[target]).numpy()

    patch_tensor = interpreter._patch_lang_tensor

    def patch(tensor, scope):
        patch_tensor(tensor, scope)
        scope.set_attr(tensor, "__index__", lambda self: int(self.handle.data.item()))

    interpreter._convert_float, interpreter._patch_lang_tensor = convert, patch

    @triton.jit
    def sigmoid(x):
        return 1.0 / (1.0 + tl.exp(-x))

    @triton.jit
    def amax(x, axis: tl.constexpr):
        return tl.max(tl.abs(x), axis)

    mend_the_quantiser(quant)
    norm.sigmoid, norm.to_words, norm.amax_words = sigmoid, quant.to_words, quant.amax_words
    norm.amax = quant.amax = amax


@pytest.mark.slow
def test_in_the_interpreter() -> None:
    """All checks in one child: importing torch takes longer than most of them."""
    assert run_python(__file__).split() == list(CHECKS)


LAYOUTS = """
import re, sys, triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource
from jetrl.kernels.hopper import norm

kernel = norm._add_rms_norm
for width in (576, 4096):
    groups, warps = norm._row_tile(width)
    for has_delta in (True, False):
        for quantize in (True, False):
            constants = {"WIDTH": width, "GROUPS": groups, "HAS_DELTA": has_delta, "QUANTIZE": quantize}
            types = {"y_ptr": "*fp8e4nv" if quantize else "*bf16", "scales_ptr": "*fp32", "inverse_ptr": "*fp32", "eps": "fp32"}
            types |= {"scale_stride": "i32"} | dict.fromkeys(constants, "constexpr")
            names = kernel.arg_names
            source = ASTSource(
                fn=kernel,
                signature={name: types.get(name, "*bf16") for name in names},
                constexprs={(names.index(name),): value for name, value in constants.items()},
                attrs={(i,): [["tt.divisibility", 16]] for i, name in enumerate(names) if name.endswith("_ptr")},
            )
            options = {"num_warps": warps, "enable_fp_fusion": False}
            text = triton.compile(source, target=GPUTarget("cuda", 90, 32), options=options).asm["ttgir"]
            layouts = dict(re.findall(r"^(#blocked\\d*) = (.*)$", text, re.M))
            print(width, layouts[re.search(r"\\}\\) : \\(tensor<\\d+x128xf32, (#\\w+)>\\)", text)[1]])
"""


def test_the_order_of_the_sum_is_the_same_in_every_variant() -> None:
    """Compiled for sm_90: one layout a width, whether there is a delta or not, quantised or not."""
    lines = run_python("-c", LAYOUTS, interpret=False).splitlines()
    assert len(lines) == 8 and len(set(lines)) == 2, lines
    assert all(re.search(r"sizePerThread = \[1, 8\]", line) for line in lines)


SQUARES = """
import re, triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource
from jetrl.kernels.hopper import norm

types = {"codes_ptr": "*fp8e4nv", "row_codes_ptr": "*fp8e4nv", "starts_ptr": "*i32", "sizes_ptr": "*i32"}
types |= dict.fromkeys(("row_scales_ptr", "token_scales_ptr", "scales_ptr", "inverse_ptr"), "*fp32")
for kernel in (norm._rms_norm_tokens, norm._silu_mul_square, norm._silu_mul_grad_square):
    names = kernel.arg_names
    source = ASTSource(
        fn=kernel,
        signature={name: types.get(name, "*bf16" if name.endswith("_ptr") else "i32") for name in names},
        attrs={(i,): [["tt.divisibility", 16]] for i in range(len(names))},
    )
    options = {"num_warps": norm._SQUARE_WARPS, "enable_fp_fusion": False}
    text = triton.compile(source, target=GPUTarget("cuda", 90, 32), options=options).asm["ttgir"]
    print(re.findall(r"convert_layout .* -> tensor<(\\d+x\\d+x[^,]*)", text))
"""


def test_a_square_passes_through_shared_memory_once() -> None:
    """Compiled for sm_90: its codes, to be transposed, and nothing else; which layouts meet is the compiler's choice."""
    moved = run_python("-c", SQUARES, interpret=False).splitlines()
    assert moved == [str(["128x128xf8E4M3FN"] * outputs) for outputs in (1, 1, 2)], moved


if __name__ == "__main__":
    mend_the_interpreter()
    for name, check in CHECKS.items():
        check()
        print(name)
