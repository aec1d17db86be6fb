"""The CUDA C++ kernel on a real GPU: the contract and the real sizes of Triton's, and both compilers."""

from __future__ import annotations

import shutil
from typing import Any

import pytest
import torch

from infer.kernels.attention_decode import DecodeWork, attend_decode_reference
from infer.kernels.cuda import build, paged_attention
from infer.kernels.cuda.paged_attention import attend_decode_cuda
from tests.gpu.test_attention_kernels import TestCompiledDecode as TritonDecode
from tests.gpu.test_attention_kernels import relative_error
from tests.unit.kernels.attention_contract import Heads, make_paged

pytestmark = [pytest.mark.gpu, pytest.mark.filterwarnings("ignore:TRITON_DEFAULT_FP_FUSION")]


class TestCudaDecode(TritonDecode):
    def attend(self, *inputs: torch.Tensor, work: DecodeWork, **options: Any) -> torch.Tensor:
        q, keys, values, tables, rows, lens = inputs
        return attend_decode_cuda(q, keys, values, tables, rows, lens, **options)

    @pytest.mark.parametrize("num_splits", [1, 2, 7, 64])
    def test_splits_change_nothing_but_the_last_bits(self, num_splits: int) -> None:
        heads, lens = Heads(32, 8, 128), [5000, 0, 31, 1, 700]
        paged = make_paged(lens, heads, block_size=16, dtype=torch.float16, device="cuda")
        rows = torch.arange(5, dtype=torch.int32, device="cuda")
        lens_S = torch.tensor(lens, dtype=torch.int32, device="cuda")
        q = torch.randn(5, 32, 128, device="cuda").half()
        actual = attend_decode_cuda(
            q, paged.keys, paged.values, paged.tables, rows, lens_S,
            block_size=16, scale=0.09, window=None, num_splits=num_splits,
        )  # fmt: skip
        exact = attend_decode_reference(
            q.float(), paged.keys.float(), paged.values.float(), paged.tables, rows, lens_S,
            block_size=16, scale=0.09, window=None,
        )  # fmt: skip
        assert relative_error(actual, exact) < 2e-3
        assert not actual[1].any()


@pytest.mark.parametrize("compiler", ["nvrtc", "nvcc"])
def test_either_compiler_makes_kernels_that_run(compiler: str) -> None:
    if compiler == "nvcc" and shutil.which("nvcc") is None:
        pytest.skip("needs nvcc")
    heads = Heads(4, 2, 64)
    defines = paged_attention.defines_of(
        torch.float32, num_heads=4, num_kv_heads=2, head_dim=64, block_size=16
    )
    compile_with = {"nvrtc": build.compile_with_nvrtc, "nvcc": build.compile_with_nvcc}[compiler]
    major, minor = torch.cuda.get_device_capability()
    cubin = compile_with(paged_attention.SOURCE, build.options(f"sm_{major}{minor}", dict(defines)))
    paged = make_paged([90], heads, block_size=16, dtype=torch.float32, device="cuda")
    row = torch.zeros(1, dtype=torch.int32, device="cuda")
    arguments = (torch.randn(1, 4, 64, device="cuda"), paged.keys, paged.values, paged.tables, row, row + 90)
    actual = attend_decode_cuda(
        *arguments, block_size=16, scale=0.1, window=None, kernels=build.LoadedKernels(cubin)
    )
    expected = attend_decode_reference(*arguments, block_size=16, scale=0.1, window=None)
    torch.testing.assert_close(actual, expected, rtol=1e-5, atol=1e-5)
