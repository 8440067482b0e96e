"""The rule that refuses attention whose kernels do not fit; tests/cuda/test_cubins.py computes its table."""

import pytest
import torch

from hotlap.errors import DeviceError
from hotlap.kernels.cuda.flex_limits import LARGEST_HEAD_DIM, check_flex_fits


@pytest.mark.parametrize("capability", LARGEST_HEAD_DIM)
def test_the_records_attention_is_never_refused(capability):
    check_flex_fits(capability, torch.bfloat16, 128)


def test_what_does_not_fit_is_refused_with_what_to_choose():
    with pytest.raises(DeviceError) as caught:
        check_flex_fits((8, 9), torch.float32, 128)
    assert "at most 64 for flex attention in float32 on a GPU of compute capability 8.9" in str(caught.value)
    assert "--precision bfloat16" in caught.value.do
    assert "--attention.backend blocked" in caught.value.do


def test_no_precision_is_recommended_in_which_it_does_not_fit_either():
    with pytest.raises(DeviceError) as caught:
        check_flex_fits((8, 9), torch.bfloat16, 256)
    assert "--precision" not in caught.value.do


def test_a_gpu_that_is_not_known_is_let_through():
    check_flex_fits((13, 0), torch.float32, 512)
