"""The kernel contract on a real GPU, on numbers that are different in every run."""

from __future__ import annotations

import pytest
import torch

from infer.kernels.elementwise.rms_norm import rms_norm
from tests.kernels.kernel_contract import KernelContract


@pytest.mark.gpu
@pytest.mark.filterwarnings("ignore:TRITON_DEFAULT_FP_FUSION")  # Triton 3.9 announces a new default once
class TestCompiledKernels(KernelContract):
    device = "cuda"

    @pytest.fixture(autouse=True)
    def seed(self) -> None:
        print(f"torch.manual_seed({torch.seed()})")  # pytest shows it when a test fails

    def test_the_result_of_a_row_does_not_depend_on_its_neighbours(self) -> None:
        x = torch.randn(257, 576, device=self.device, dtype=torch.bfloat16)
        weight = self.weight(576, torch.bfloat16)
        together = rms_norm(x, weight, eps=1e-5)
        alone = torch.cat([rms_norm(row, weight, eps=1e-5) for row in torch.split(x, 1)])
        assert torch.equal(together, alone)
