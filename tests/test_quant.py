"""The quantiser against a slow reference that follows design contract 3.1 word by word, in NumPy, group by group.

The reference shares no code with the package: E4M3 is built from its definition, and rounding is a search among all codes.
Wrong variants of the recipe, as other systems have them, must give other bytes on the same data: so the data has teeth.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from torch import Tensor

from jetrl.kernels import quant
from jetrl.kernels.quant import Quantized

F32 = np.float32
Codes = NDArray[np.uint8]


def e4m3(code: int) -> float:
    """Value of an E4M3 code from the definition: sign, 4 bits of exponent (bias 7), 3 of mantissa, no infinity."""
    sign, exponent, mantissa = (-1.0) ** (code >> 7), (code >> 3) & 15, code & 7
    if code & 127 == 127:
        return float("nan")
    return sign * (mantissa * 2.0**-9 if exponent == 0 else (1.0 + mantissa / 8.0) * 2.0 ** (exponent - 7))


MAGNITUDES = np.array([e4m3(code) for code in range(127)])
MIDDLES = (MAGNITUDES[1:] + MAGNITUDES[:-1]) / 2.0


def nearest_even(x: NDArray[np.float32]) -> Codes:
    """E4M3 codes of clamped values: the nearest one, of two equally near ones the even one."""
    wide = np.abs(x.astype(np.float64))
    code = np.searchsorted(MIDDLES, wide, side="left")
    tie = np.isin(wide, MIDDLES)
    code = np.where(tie & (code % 2 == 1), code + 1, code)
    code = np.where(np.isnan(wide), 127, code)
    return (code + 128 * np.signbit(x)).astype(np.uint8)


def encode_group(x: NDArray[np.float32], floor: float = 1e-12) -> tuple[Codes, np.float32]:
    """The contract for one group: amax, scale and codes, all in FP32 with IEEE division."""
    amax = np.maximum(np.max(np.abs(x)), F32(floor)).astype(F32)
    scale = F32(amax / F32(448.0))
    with np.errstate(invalid="ignore"):
        return nearest_even(np.clip((x / scale).astype(F32), F32(-448.0), F32(448.0))), scale


Encoder = Callable[[NDArray[np.float32]], tuple[Codes, np.float32]]


def reference(x: Tensor, rows: list[slice], columns: int, encode: Encoder = encode_group) -> tuple[Codes, NDArray[np.float32]]:
    """Codes and scales of the groups `rows` by `columns` of x."""
    values = x.float().numpy()
    width = values.shape[1]
    codes = np.zeros(values.shape, np.uint8)
    scales = np.zeros((len(rows), -(-width // columns)), F32)
    for i, part in enumerate(rows):
        for j in range(scales.shape[1]):
            group = part, slice(j * columns, min((j + 1) * columns, width))
            codes[group], scales[i, j] = encode(values[group])
    return codes, scales


def cuts(lengths: list[int], step: int) -> list[slice]:
    """Slices of at most `step` rows; each part, lengths in rows, starts anew."""
    starts = np.cumsum([0, *lengths])
    return [
        slice(int(first) + i, int(first) + min(i + step, length))
        for first, length in zip(starts, lengths, strict=False)
        for i in range(0, length, step)
    ]


def reference_rows(x: Tensor, encode: Encoder = encode_group) -> tuple[Codes, NDArray[np.float32]]:
    """1x128."""
    return reference(x, cuts([x.shape[0]], 1), 128, encode)


def reference_weight(x: Tensor, parts: list[int], encode: Encoder = encode_group) -> tuple[Codes, NDArray[np.float32]]:
    """128x128, row blocks of each part anew."""
    return reference(x, cuts(parts, 128), 128, encode)


def reference_tokens(x: Tensor, lengths: list[int], encode: Encoder = encode_group) -> tuple[Codes, NDArray[np.float32]]:
    """128x1, groups of each sequence anew."""
    return reference(x, cuts(lengths, 128), 1, encode)


def reference_values(codes: Codes, scales: NDArray[np.float32], rows: list[slice], columns: int) -> Tensor:
    """float64 values of codes under the scales of their groups."""
    table = np.array([e4m3(code) for code in range(256)])
    values = table[codes]
    for i, part in enumerate(rows):
        for j in range(scales.shape[1]):
            values[part, j * columns : (j + 1) * columns] *= np.float64(scales[i, j])
    return torch.from_numpy(values)


def same(seen: Quantized, wanted: tuple[Codes, NDArray[np.float32]]) -> bool:
    """Equal bytes of codes and of scales; NaN codes and NaN scales may have any payload."""
    codes, scales = seen.codes.view(torch.uint8).numpy(), seen.scales.numpy()
    nan = (codes & 127 == 127) & (wanted[0] & 127 == 127)
    equal_codes = codes.shape == wanted[0].shape and bool(np.all((codes == wanted[0]) | nan))
    return equal_codes and seen.scales.dtype == torch.float32 and np.array_equal(scales, wanted[1], equal_nan=True)


def data(rows: int, cols: int, seed: int = 0, std: float = 1.0) -> Tensor:
    """FP32 noise with outliers, a zero stretch and, where there is room, a block of zeros and one lonely number in it."""
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(rows, cols, generator=generator) * std
    x[:: max(1, rows // 3), :: max(1, cols // 5)] *= 1000.0
    x[rows // 2, : cols // 2] = 0.0
    if rows >= 128 and cols >= 128:
        x[:128, :128] = 0.0
        x[3, 5] = std
    return x


SHAPES = [(1, 1), (1, 128), (128, 1), (1, 129), (129, 1), (3, 300), (130, 257), (192, 576), (7, 64)]


def test_decode_is_the_definition_for_all_codes() -> None:
    codes = torch.arange(256, dtype=torch.uint8).view(torch.float8_e4m3fn)
    wanted = torch.tensor([e4m3(code) for code in range(256)], dtype=torch.float64)
    for shape in ((256,), (2, 128), (16, 16)):
        seen = quant.decode(codes.view(shape))
        assert seen.dtype == torch.float64 and seen.shape == shape
        assert np.array_equal(seen.numpy().reshape(-1), wanted.numpy(), equal_nan=True)
        assert torch.equal(seen.signbit().reshape(-1)[:255], wanted.signbit()[:255])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(("rows", "cols"), SHAPES)
def test_bytes_of_every_grouping(rows: int, cols: int, dtype: torch.dtype) -> None:
    x = data(rows, cols).to(dtype)
    assert same(quant.quantize_rows(x), reference_rows(x))
    assert same(quant.quantize_weight(x), reference_weight(x, [rows]))
    assert same(quant.quantize_tokens(x, quant.token_groups([rows])), reference_tokens(x, [rows]))


@pytest.mark.parametrize("std", [0.01, 0.005, 1e-6, 1e-13, 1e-20, 1e30])
def test_bytes_at_every_magnitude(std: float) -> None:
    x = data(131, 260, std=std)
    x[torch.isinf(x)] = 0.0  # outliers at 1e30 times 1000 stay finite; this is a guard, not a case
    assert same(quant.quantize_rows(x), reference_rows(x))
    assert same(quant.quantize_weight(x), reference_weight(x, [131]))
    assert same(quant.quantize_tokens(x, quant.token_groups([131])), reference_tokens(x, [131]))


def test_dequantized_values_are_codes_times_scales_exactly() -> None:
    x, lengths, parts = data(201, 300), [70, 131], [101, 100]
    groups, blocks = quant.token_groups(lengths), tuple(parts)
    rows, tokens, weight = quant.quantize_rows(x), quant.quantize_tokens(x, groups), quant.quantize_weight(x, blocks)
    by_row = reference_values(*reference_rows(x), cuts([201], 1), 128)
    by_token = reference_values(*reference_tokens(x, lengths), cuts(lengths, 128), 1)
    by_block = reference_values(*reference_weight(x, parts), cuts(parts, 128), 128)
    assert torch.equal(quant.dequantize_rows(rows), by_row)
    assert torch.equal(quant.dequantize_tokens(tokens, groups), by_token)
    assert torch.equal(quant.dequantize_weight(weight, blocks), by_block)
    part = slice(60, 150)
    assert torch.equal(quant.dequantize_rows(rows, part), quant.dequantize_rows(rows)[part])
    assert torch.equal(quant.dequantize_tokens(tokens, groups, part), quant.dequantize_tokens(tokens, groups)[part])


def test_zero_blocks_have_zero_codes_and_a_finite_scale() -> None:
    x = torch.zeros(256, 256)
    x[200, 7] = 1.0
    groups = quant.token_groups([256])
    for seen, values in (
        ((q := quant.quantize_rows(x)), quant.dequantize_rows(q)),
        ((q := quant.quantize_weight(x)), quant.dequantize_weight(q)),
        ((q := quant.quantize_tokens(x, groups)), quant.dequantize_tokens(q, groups)),
    ):
        assert torch.isfinite(seen.scales).all() and (seen.scales > 0).all()
        assert int((seen.codes.view(torch.uint8) != 0).sum()) == 1
        assert torch.allclose(values, x.double(), rtol=1e-7, atol=0.0)
        assert seen.scales.min() == torch.tensor(1e-12) / torch.tensor(448.0)


def test_what_exceeds_the_range_is_clamped_and_nan_is_kept() -> None:
    x = torch.tensor([[480.0, 465.0, 464.0, 1e30, -480.0, -1e30, 448.0, float("nan")]])
    codes = quant._encode(x, torch.ones(1, 1))
    assert quant.decode(codes)[0, :7].tolist() == [448.0, 448.0, 448.0, 448.0, -448.0, -448.0, 448.0]
    assert quant.decode(codes)[0, 7].isnan()
    for amax in (480.0, 449.0, 3.3e38, 1.0000001):  # the largest of a group is always the code 448
        assert int(quant.quantize_rows(torch.tensor([[amax, -amax, 0.0]])).codes.view(torch.uint8)[0, 0]) == 0x7E


@pytest.mark.parametrize("bad", [float("nan"), float("inf"), float("-inf")])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_nan_and_infinity_stay_visible_in_their_group_alone(bad: float, dtype: torch.dtype) -> None:
    x = data(200, 300, seed=4).to(dtype)
    clean = x.clone()
    x[150, 290] = bad
    groups = quant.token_groups([120, 80])
    cases = [
        (quant.dequantize_rows(quant.quantize_rows(y)), quant.dequantize_weight(quant.quantize_weight(y)),
         quant.dequantize_tokens(quant.quantize_tokens(y, groups), groups))
        for y in (x, clean)
    ]  # fmt: skip
    where = [(slice(150, 151), slice(256, 300)), (slice(128, 200), slice(256, 300)), (slice(120, 200), slice(290, 291))]
    for seen, wanted, group in zip(*cases, where, strict=True):
        assert seen[150, 290].isnan()
        poisoned = torch.zeros(200, 300, dtype=torch.bool)
        poisoned[group] = True
        assert torch.equal(seen.isnan(), poisoned)
        assert torch.equal(seen[~poisoned], wanted[~poisoned])
    assert same(quant.quantize_rows(x), reference_rows(x))


def test_ties_go_to_the_even_code_and_subnormals_are_kept() -> None:
    x = torch.zeros(2, 128)
    x[0, 0], x[0, 1 : 1 + len(MIDDLES)] = 448.0, torch.from_numpy(MIDDLES).float()  # amax 448, so the scale is exactly 1
    x[1, 0], x[1, 1:128] = -448.0, -torch.from_numpy(MAGNITUDES).float()
    seen = quant.quantize_rows(x)
    assert seen.scales.tolist() == [[1.0], [1.0]]
    codes = seen.codes.view(torch.uint8)
    assert codes[0, 1 : 1 + len(MIDDLES)].tolist() == [code + code % 2 for code in range(len(MIDDLES))]
    assert codes[1, 1:].tolist() == [128 + code for code in range(127)]
    below = torch.tensor([[448.0, 2.0**-9, 1.5 * 2.0**-9, 2.0**-10, 2.0**-10 * (1 + 2**-20), 2.0**-11, 2.0**-140]])
    assert quant.quantize_rows(below).codes.view(torch.uint8)[0].tolist() == [0x7E, 1, 2, 0, 1, 0, 0]


def times_inverse(x: NDArray[np.float32]) -> tuple[Codes, np.float32]:
    """Multiplies by 1 / scale."""
    scale = encode_group(x)[1]
    return nearest_even(np.clip(x * (F32(1.0) / scale), F32(-448.0), F32(448.0))), scale


def times_448_over_amax(x: NDArray[np.float32]) -> tuple[Codes, np.float32]:
    """Multiplies by 448 / amax."""
    amax = np.maximum(np.max(np.abs(x)), F32(1e-12))
    return nearest_even(np.clip(x * (F32(448.0) / amax), F32(-448.0), F32(448.0))), encode_group(x)[1]


def scale_by_inverse_448(x: NDArray[np.float32]) -> tuple[Codes, np.float32]:
    """amax * (1 / 448), which is what a division by a Python number becomes on some devices."""
    scale = np.max(np.abs(x)) * (F32(1.0) / F32(448.0))
    return nearest_even(np.clip(x / scale, F32(-448.0), F32(448.0))), scale


def scale_floor(x: NDArray[np.float32]) -> tuple[Codes, np.float32]:
    """Floors the scale at 1e-4."""
    scale = np.maximum(encode_group(x)[1], F32(1e-4))
    return nearest_even(np.clip(x / scale, F32(-448.0), F32(448.0))), scale


def half_away(x: NDArray[np.float32]) -> tuple[Codes, np.float32]:
    """Rounds ties away from zero: on a group where they occur."""
    codes, scale = encode_group(x)
    up = np.isin(np.abs((x / scale).astype(np.float64)), MIDDLES)
    code = np.searchsorted(MIDDLES, np.abs((x / scale).astype(np.float64)), side="right")
    return np.where(up, code + 128 * np.signbit(x), codes).astype(np.uint8), scale


def power_of_two_scale(x: NDArray[np.float32]) -> tuple[Codes, np.float32]:
    """UE8M0 scales: rounded up to a power of two."""
    scale = F32(2.0 ** np.ceil(np.log2(encode_group(x)[1])))
    return nearest_even(x / scale), scale


@pytest.mark.parametrize(
    "wrong", [times_inverse, times_448_over_amax, scale_by_inverse_448, scale_floor, half_away, power_of_two_scale]
)
def test_other_recipes_give_other_bytes_on_these_data(wrong: Encoder) -> None:
    x = torch.randn(128, 512, generator=torch.Generator().manual_seed(3)).bfloat16() * 0.01
    seen = quant.quantize_rows(x)
    assert same(seen, reference_rows(x))
    assert not same(seen, reference_rows(x, wrong))
    if wrong is times_inverse:
        share = float(np.mean(reference_rows(x, wrong)[0] != seen.codes.view(torch.uint8).numpy()))
        assert 1e-4 < share < 3e-3  # the 0.05 to 0.1% of the design


def test_fused_parts_have_the_bytes_of_each_part_alone() -> None:
    parts = (150, 70, 1, 128)
    w = data(sum(parts), 200, seed=5)
    fused, alone = quant.quantize_weight(w, parts), [quant.quantize_weight(x) for x in w.split(parts)]
    assert same(fused, reference_weight(w, list(parts)))
    assert torch.equal(fused.codes.view(torch.uint8), torch.cat([q.codes.view(torch.uint8) for q in alone]))
    assert torch.equal(fused.scales, torch.cat([q.scales for q in alone]))
    assert fused.scales.shape == (2 + 1 + 1 + 1, 2)
    assert quant.row_blocks(parts).tolist() == [0] * 128 + [1] * 22 + [2] * 70 + [3] + [4] * 128
    assert not torch.equal(fused.codes.view(torch.uint8), quant.quantize_weight(w).codes.view(torch.uint8))


def test_token_groups_restart_at_each_sequence() -> None:
    lengths = [1, 127, 128, 129, 300, 5]
    groups = quant.token_groups(lengths)
    wanted = cuts(lengths, 128)
    assert groups.group_of_token.tolist() == [i for i, part in enumerate(wanted) for _ in range(part.stop - part.start)]
    assert groups.count == len(wanted)
    x = data(sum(lengths), 33, seed=6).bfloat16()
    packed = quant.quantize_tokens(x, groups)
    assert same(packed, reference_tokens(x, lengths))
    alone = [quant.quantize_tokens(part, quant.token_groups([len(part)])) for part in x.split(lengths)]
    assert torch.equal(packed.codes.view(torch.uint8), torch.cat([q.codes.view(torch.uint8) for q in alone]))
    assert torch.equal(packed.scales, torch.cat([q.scales for q in alone]))


def test_a_row_has_the_bytes_it_has_alone() -> None:
    x = data(130, 300, seed=7).bfloat16()
    whole = quant.quantize_rows(x)
    for rows in (slice(0, 1), slice(77, 78), slice(3, 100), slice(129, 130)):
        part = quant.quantize_rows(x[rows])
        assert torch.equal(part.codes.view(torch.uint8), whole.codes.view(torch.uint8)[rows])
        assert torch.equal(part.scales, whole.scales[rows])


@pytest.mark.gpu
def test_a_gpu_makes_the_same_bytes() -> None:
    generator = torch.Generator().manual_seed(0)
    lengths = [1, 130, 300, 69]
    x = torch.randn(sum(lengths), 576, generator=generator) * torch.logspace(-9, 3, 576)
    x[3:7] = 0.0
    x[11, 5] = 3e5
    groups = quant.token_groups(lengths)
    for dtype in (torch.float32, torch.bfloat16):
        here, there = x.to(dtype), x.to(dtype).cuda()
        pairs = [
            (quant.quantize_rows(here), quant.quantize_rows(there)),
            (quant.quantize_tokens(here, groups), quant.quantize_tokens(there, groups)),
            (quant.quantize_weight(here, (200, 300)), quant.quantize_weight(there, (200, 300))),
        ]
        for cpu, gpu in pairs:
            assert torch.equal(cpu.scales.view(torch.int32), gpu.scales.cpu().view(torch.int32))
            assert torch.equal(cpu.codes.view(torch.uint8), gpu.codes.cpu().view(torch.uint8))
