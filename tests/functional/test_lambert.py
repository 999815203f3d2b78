"""Lambert's function against mpmath, and the proximal step against the problem that it solves."""

import math

import mpmath
import pytest
import torch
from hypothesis import example, given
from hypothesis import strategies as st

from scent_lightning.errors import InputError
from scent_lightning.functional import lambert_w, lambert_w_of_log, proximal_scale


def exact_of_log(log_x):
    """W of e^log_x in 40 digits: the root u of e^u + u = log x, then e^u."""
    with mpmath.workdps(40):
        log_x = mpmath.mpf(log_x)
        u = mpmath.log(log_x - mpmath.log(log_x)) if log_x > 2 else mpmath.log(mpmath.log1p(mpmath.e**log_x))
        for _ in range(50):
            u -= (mpmath.e**u + u - log_x) / (mpmath.e**u + 1)
        return mpmath.e**u


def error(value, exact):
    return float(abs(mpmath.mpf(value) - exact) / exact)


numbers = st.floats(-690, 709) | st.floats(-3, 3)
logs = numbers | st.floats(0, math.log(1e6)).map(math.exp)


@given(logs)
@example(1.0)
@example(0.0)
@example(1e6)
@example(-690.0)
def test_by_the_logarithm(log_x):
    exact = exact_of_log(log_x)
    assert error(lambert_w(torch.tensor([log_x], dtype=torch.float64), from_log=True).item(), exact) < 1e-12
    assert error(lambert_w_of_log(log_x), exact) < 1e-12


@given(numbers.map(math.exp))
@example(1e-300)
@example(math.e)
@example(1.7e308)
def test_by_the_number(x):
    with mpmath.workdps(40):
        exact = mpmath.lambertw(mpmath.mpf(x)).real
        scale = exact / mpmath.mpf(x)
    tensor = torch.tensor([x], dtype=torch.float64)
    assert error(lambert_w(tensor).item(), exact) < 1e-15
    assert error(proximal_scale(tensor).item(), scale) < 1e-12
    assert error(proximal_scale(tensor.log(), from_log=True).item(), scale) < 2e-12  # the logarithm's own rounding
    single = tensor.float()
    if 1e-37 < single.item() < 1e38:
        with mpmath.workdps(40):
            exact = mpmath.lambertw(mpmath.mpf(single.item())).real
        assert error(lambert_w(single).item(), exact) < 1e-6


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.float16])
def test_ends_of_the_range(dtype):
    kind = torch.float32 if dtype == torch.float16 else dtype
    found = lambert_w(torch.tensor([0.0, math.inf, -1.0, math.nan], dtype=dtype))
    assert found.dtype == kind
    assert found[:2].tolist() == [0.0, math.inf]
    assert found[2:].isnan().all()
    assert proximal_scale(torch.tensor([0.0, math.inf], dtype=dtype)).tolist() == [1.0, 0.0]
    by_log = lambert_w(torch.tensor([-math.inf, math.inf, math.nan], dtype=dtype), from_log=True)
    assert by_log[:2].tolist() == [0.0, math.inf]
    assert by_log[2].isnan()


@pytest.mark.parametrize("log_x", [1e18, 1e25, 1e300, -744.0, -800.0, -1e300])
def test_logarithms_far_out(log_x):
    expected = max(log_x, 0.0) or math.exp(log_x)
    assert lambert_w_of_log(log_x) == pytest.approx(expected, rel=1e-12)
    assert lambert_w(torch.tensor(log_x, dtype=torch.float64), from_log=True).item() == pytest.approx(
        expected, rel=1e-12
    )


def test_least_numbers_are_their_own():
    least = torch.tensor([5e-324, 1e-310, 2.3e-308], dtype=torch.float64)
    assert torch.equal(lambert_w(least), least)
    assert torch.equal(lambert_w(torch.tensor([1e-45, 1e-39])), torch.tensor([1e-45, 1e-39]))


def test_shapes_and_derivative():
    x = torch.linspace(0.1, 9, 12, dtype=torch.float64).reshape(3, 4).requires_grad_()
    w = lambert_w(x)
    (gradient,) = torch.autograd.grad(w.sum(), x)
    assert w.shape == x.shape
    assert torch.allclose(gradient, w / (x * (1 + w)), rtol=1e-6)


@pytest.mark.parametrize("value", [torch.tensor([1]), 0.5, [1.0], None])
def test_other_arguments_are_told(value):
    for function in (lambert_w, proximal_scale):
        with pytest.raises(InputError, match="must be a floating tensor, got"):
            function(value)


@given(
    st.floats(-30, 30),
    st.floats(-80, 80),
    st.floats(-12, 12),
    st.integers(1, 5),
    st.integers(0, 2**31),
)
def test_the_step_solves_its_subproblem(log10_norm, log_part, log10_rate, width, seed):
    """c E exp(⟨g, Δ⟩/(cE)) + |Δ|²/(2η) has its only stationary point, which is the minimum, at Δ = −η W(a)/a g."""
    g = torch.randn(width, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
    squared = mpmath.fsum(mpmath.mpf(v) ** 2 for v in (g * 10.0**log10_norm).tolist())
    rate, part = mpmath.mpf(10.0**log10_rate), mpmath.e ** mpmath.mpf(log_part)
    a = rate * squared / part
    scale = proximal_scale(torch.tensor(float(mpmath.log(a)), dtype=torch.float64), from_log=True).item()
    # Along g: the derivative by t of c E exp(−t|g|²/(cE)) + t²|g|²/(2η) at t = η·scale, divided by |g|².
    slope = mpmath.e ** (-mpmath.mpf(scale) * a) - mpmath.mpf(scale)
    assert abs(slope) <= 1e-11 * mpmath.mpf(scale) * (1 + a * mpmath.mpf(scale))
