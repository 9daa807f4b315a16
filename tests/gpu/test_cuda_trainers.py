"""Trainers on GPUs, killed and resumed: FSDP2 through Accelerate on all that there are, and
torchtitan's own Trainer on one. The same on a processor: tests/integrations."""

import pytest
import torch

from accelerated import check_fsdp2
from titans import check_trainer

pytestmark = pytest.mark.timeout(150)  # of each run three processes begin, with all their imports


@pytest.mark.parametrize("strategy", ["auto", "log"])
def test_fsdp2_through_accelerate(tmp_path, strategy):
    pytest.importorskip("accelerate")
    ranks = torch.cuda.device_count()
    check_fsdp2(tmp_path, ranks=ranks, device="cuda", strategy=strategy, method="spawn")


def test_torchtitan(tmp_path):
    pytest.importorskip("torchtitan")
    check_trainer(tmp_path, device="cuda", method="spawn")
