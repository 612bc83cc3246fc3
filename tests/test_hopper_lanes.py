"""`hopper/lanes.py` without a GPU: its bytes in Triton's interpreter, which is right about integers and FP64, and for sm_90.

The interpreter is chosen when triton is imported, so the checks run in a pytest of their own.
"""

from __future__ import annotations

import importlib.util
import re
from pathlib import Path

import pytest

from tests.interpreter import run_checks
from tests.test_lanes import require_the_numbers_of_the_seeds, require_the_reference

pytestmark = pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="triton is not installed")


def test_in_the_interpreter() -> None:
    run_checks(__file__)


def check_every_byte_is_the_references() -> None:
    mend_the_interpreter()
    from jetrl.kernels.hopper import lanes

    require_the_reference(lanes.begin, lanes.end)
    require_the_numbers_of_the_seeds(lanes.begin)


def mend_the_interpreter() -> None:
    """Loop bounds that numpy 2.4 takes."""
    from triton.runtime import interpreter

    patch_tensor = interpreter._patch_lang_tensor

    def patch(tensor, scope):
        patch_tensor(tensor, scope)
        scope.set_attr(tensor, "__index__", lambda self: int(self.handle.data.item()))

    interpreter._patch_lang_tensor = patch


POINTERS = {
    "step_ptr": "*i32", "table_ptr": "*i32", "lane_ptr": "*i32", "out_ptr": "*i32", "uniforms_ptr": "*fp64",
    "logprobs_ptr": "*fp32", "query_start_ptr": "*i32", "query_length_ptr": "*i32", "context_ptr": "*i32",
}  # fmt: skip


@pytest.mark.parametrize("block_size", [16, 64, 100])
def test_compiled_for_hopper_nothing_spills_and_numbers_are_mixed_without_their_sign(block_size: int, tmp_path: Path) -> None:
    from jetrl.kernels.hopper import lanes
    from tests.test_hopper_compile import compile_for_hopper, spilled_bytes

    for kernel, fixed in (
        (lanes._begin_kernel, {"BLOCK_SIZE": block_size, "ROWS": lanes.ROWS}),
        (lanes._end_kernel, {"ROWS": lanes.ROWS}),
    ):
        types = {name: POINTERS.get(name, "*i64" if name.endswith("_ptr") else "i32") for name in kernel.arg_names}
        ptx = compile_for_hopper(kernel, types, fixed, num_warps=2)
        assert spilled_bytes(ptx, tmp_path) == 0
        shifts = re.findall(r"shr\.([us])64\s+\S+\s+\S+\s+(11|27|30|31);", ptx)
        assert all(kind == "u" for kind, _ in shifts)
        assert (len(shifts) >= 6) == (kernel is lanes._begin_kernel)


def test_steps_of_any_size_share_one_kernel() -> None:
    """A count of rows that is 1 or divisible by 16 compiles nothing anew, which a capture must not."""
    from jetrl.kernels.hopper import lanes

    for kernel, counts in (
        (lanes._begin_kernel, {"rows", "step_stride", "table_stride", "spare_slot"}),
        (lanes._end_kernel, {"rows", "ends"}),
    ):
        assert {p.name for p in kernel.params if p.do_not_specialize} == counts
