"""Loss and gradients of the whole graph that Inductor compiles for CUDA, on interpreted kernels."""

import json

import pytest

from tests.cuda.emulated import needs_emulation, run_on_cuda

pytestmark = [needs_emulation, pytest.mark.slow, pytest.mark.timeout(900)]


@pytest.mark.parametrize(
    "dtype, loss_tolerance, gradient_tolerance",
    [("float32", 1e-6, 2e-4), ("bfloat16", 5e-4, 0.05)],
)
def test_loss_and_gradients_are_those_of_plain_operators(tmp_path, dtype, loss_tolerance, gradient_tolerance):
    done = run_on_cuda("-m", "tests.cuda.model_graph", "softcap", dtype, cwd=tmp_path, interpreted=True)
    assert done.returncode == 0, done.stderr
    errors = json.loads(done.stdout)
    worst = max(errors.keys() - {"loss"}, key=errors.get)
    print(f"{dtype}: loss {errors['loss']:.1e}, {worst} {errors[worst]:.1e}")
    assert errors["loss"] < loss_tolerance
    assert errors[worst] < gradient_tolerance, worst
