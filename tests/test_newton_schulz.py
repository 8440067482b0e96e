"""Newton-Schulz against the singular value decomposition and against its plain form."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from hotlap.optim import reference
from hotlap.optim.newton_schulz import orthogonalize, step_coefficients, working_dtype
from tests.kernels_here import needs_kernels, without_kernels

BANDS = {"quintic": (0.68, 1.21), "polar-express": (0.87, 1.13)}
SMALLEST_IN_BAND = 0.0015
KINDS = list(BANDS)


@pytest.fixture(autouse=True, params=["PyTorch", pytest.param("C", marks=needs_kernels)])
def way(request, monkeypatch):
    """Every test with the kernel in C, where that takes the case, and without."""
    if request.param == "PyTorch":
        without_kernels(monkeypatch)


def with_singular_values(values: torch.Tensor, rows: int, cols: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(rows * 1000 + cols)
    left = torch.linalg.qr(torch.randn(rows, len(values), dtype=torch.float64, generator=generator))[0]
    right = torch.linalg.qr(torch.randn(cols, len(values), dtype=torch.float64, generator=generator))[0]
    return (left * values) @ right.T


def spectrum(name: str, count: int) -> torch.Tensor:
    """Singular values of a `count` × 2·`count` matrix."""
    if name == "gaussian":
        generator = torch.Generator().manual_seed(0)
        noise = torch.randn(count, 2 * count, dtype=torch.float64, generator=generator)
        return torch.linalg.svdvals(noise)
    if name == "power-law":
        return torch.arange(1, count + 1, dtype=torch.float64) ** -1
    if name == "ill-conditioned":
        return torch.logspace(0, -8, count, dtype=torch.float64)
    return torch.cat([torch.ones(count // 4), torch.zeros(count - count // 4)]).double()


SPECTRA = ["gaussian", "power-law", "ill-conditioned", "rank-deficient"]


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("name", SPECTRA)
def test_singular_values_end_in_the_documented_band(name, kind):
    values = spectrum(name, 64)
    matrix = with_singular_values(values, 64, 128)
    result = orthogonalize(matrix, step_coefficients(kind, 5))
    after = torch.linalg.svdvals(result)
    share = values / values.norm()
    low, high = BANDS[kind]
    in_band = int((share >= SMALLEST_IN_BAND).sum())
    assert in_band >= 16
    assert after[:in_band].min() >= low
    assert after.max() <= high
    assert int((after > 1e-6).sum()) >= in_band


@pytest.mark.parametrize("name", ["gaussian", "power-law"])
def test_polar_express_comes_closer_to_one(name):
    matrix = with_singular_values(spectrum(name, 128), 128, 256)
    rms = {
        kind: (torch.linalg.svdvals(orthogonalize(matrix, step_coefficients(kind, 5))) - 1)
        .square()
        .mean()
        .sqrt()
        for kind in KINDS
    }
    assert rms["polar-express"] < 0.11 < rms["quintic"] < 0.25


@pytest.mark.parametrize("rows, cols", [(48, 48), (48, 160), (160, 48)])
def test_the_polar_factor_is_reached_when_steps_are_many(rows, cols):
    matrix = torch.randn(rows, cols, dtype=torch.float64, generator=torch.Generator().manual_seed(3))
    result = orthogonalize(matrix, step_coefficients("polar-express", 14))
    torch.testing.assert_close(result, reference.polar_factor(matrix), atol=1e-8, rtol=0)


@pytest.mark.parametrize("kind", KINDS)
def test_five_steps_agree_with_the_polar_factor_as_far_as_the_band_goes(kind):
    matrix = with_singular_values(spectrum("power-law", 64), 64, 96)
    difference = orthogonalize(matrix, step_coefficients(kind, 5)) - reference.polar_factor(matrix)
    low, high = BANDS[kind]
    assert torch.linalg.matrix_norm(difference, ord=2) <= max(1 - low, high - 1)


@pytest.mark.parametrize("form", ["plain", "gram"])
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("steps", [1, 2, 5, 9])
def test_both_forms_are_the_reference(steps, kind, form):
    coefficients = step_coefficients(kind, steps)
    matrix = torch.randn(24, 56, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    expected = reference.newton_schulz(matrix, coefficients)
    torch.testing.assert_close(orthogonalize(matrix, coefficients, form=form), expected, atol=1e-10, rtol=0)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("name", SPECTRA)
@pytest.mark.parametrize("rows, cols", [(96, 384), (384, 96), (96, 144)])
def test_the_gram_form_equals_the_plain_form_in_float32(rows, cols, name, kind):
    matrix = with_singular_values(spectrum(name, 96), rows, cols).float()
    coefficients = step_coefficients(kind, 5)
    plain = orthogonalize(matrix, coefficients, form="plain")
    gram = orthogonalize(matrix, coefficients, form="gram")
    assert not torch.equal(plain, gram), "two different computations"
    torch.testing.assert_close(gram, plain, atol=1e-5, rtol=0)


@settings(max_examples=40, deadline=None)
@given(
    count=st.integers(1, 5),
    rows=st.integers(1, 12),
    cols=st.integers(1, 12),
    exponent=st.integers(-37, 30),
    seed=st.integers(0, 100),
)
def test_a_stack_is_its_matrices_one_by_one_and_always_finite(count, rows, cols, exponent, seed):
    generator = torch.Generator().manual_seed(seed)
    stack = torch.randn(count, rows, cols, generator=generator) * 10.0**exponent
    coefficients = step_coefficients("quintic", 5)
    result = orthogonalize(stack, coefficients)
    assert result.shape == stack.shape
    assert bool(result.isfinite().all())
    apart = torch.stack([orthogonalize(matrix, coefficients) for matrix in stack])
    torch.testing.assert_close(result, apart, atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("rows, cols", [(128, 128), (128, 256), (256, 128)])
def test_a_stack_larger_than_the_cache_is_its_matrices_in_order(rows, cols):
    stack = torch.randn(19, rows, cols, generator=torch.Generator().manual_seed(4))
    coefficients = step_coefficients("quintic", 2)
    apart = torch.stack([orthogonalize(matrix, coefficients) for matrix in stack])
    torch.testing.assert_close(orthogonalize(stack, coefficients), apart, atol=1e-5, rtol=0)


@pytest.mark.parametrize("kind", KINDS)
def test_scale_does_not_matter_above_the_clamp_and_zero_stays_zero(kind):
    coefficients = step_coefficients(kind, 5)
    matrix = torch.randn(16, 40, generator=torch.Generator().manual_seed(2))
    expected = orthogonalize(matrix, coefficients)
    for factor in (1e30, 1e-6):
        torch.testing.assert_close(orthogonalize(matrix * factor, coefficients), expected, atol=1e-5, rtol=0)
    assert orthogonalize(matrix * 1e-30, coefficients).abs().max() < 1e-15
    assert torch.equal(orthogonalize(torch.zeros(3, 4), coefficients), torch.zeros(3, 4))


def test_the_norm_is_clamped_at_1e_minus_7():
    matrix = torch.full((2, 3), 1e-9, dtype=torch.float64)
    one_step = ((1.0, 0.0, 0.0),)
    torch.testing.assert_close(orthogonalize(matrix, one_step), matrix / 1e-7)


def test_nan_stays_visible_and_the_input_stays_as_it_was():
    matrix = torch.randn(4, 6)
    matrix[1, 2] = float("nan")
    before = matrix.clone()
    assert bool(orthogonalize(matrix, step_coefficients("quintic", 5)).isnan().any())
    torch.testing.assert_close(matrix, before, equal_nan=True)


def test_the_working_precision_follows_the_input_and_can_be_chosen():
    matrix = torch.randn(8, 24)
    assert working_dtype(torch.bfloat16, matrix.device) == torch.float32
    assert working_dtype(torch.float64, matrix.device) == torch.float64
    assert working_dtype(torch.float32, torch.device("cuda")) == torch.bfloat16
    coefficients = step_coefficients("quintic", 5)
    rough = orthogonalize(matrix, coefficients, dtype=torch.bfloat16)
    assert rough.dtype == torch.bfloat16
    torch.testing.assert_close(rough.float(), orthogonalize(matrix, coefficients), atol=0.05, rtol=0)
