"""The pure functions against mpmath, the facts of the mathematics, and finite differences."""

import math

import mpmath as mp
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from scent_lightning import functional as F

mp.mp.dps = 80
WIDE = st.floats(-1e4, 1e4, width=32)
LOG_ALPHA = st.floats(-700, 700)


def vector(*values: float) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.float32)


def close(found: float, exact: mp.mpf, tolerance: float) -> bool:
    return abs(mp.mpf(found) - exact) <= tolerance * max(mp.mpf(1), abs(exact))


@given(nu=WIDE, log_mean=WIDE, log_alpha=LOG_ALPHA)
@settings(max_examples=500, deadline=None)
def test_proximal_step_is_exact(nu, log_mean, log_alpha):
    found = F.proximal_mirror_descent_step(vector(nu), vector(log_mean), log_alpha).float().item()
    a, n, m = mp.mpf(log_alpha), mp.mpf(nu), mp.mpf(log_mean)
    exact = n + mp.log(1 + mp.exp(a + m)) - mp.log(1 + mp.exp(a + n))
    assert close(found, exact, 1e-6)
    low, high = sorted((nu, log_mean))
    assert low - 1e-9 * abs(low) - 1e-12 <= found <= high + 1e-9 * abs(high) + 1e-12


@given(nu=st.floats(-8, 8, width=32), log_mean=st.floats(-8, 8, width=32), log_alpha=st.floats(-8, 8))
@settings(max_examples=100, deadline=None)
def test_proximal_step_minimises_the_proximal_objective(nu, log_mean, log_alpha):
    """The derivative of exp(ℓ − v) + v + D(v, ν)/α at the result is 0, and the objective is strictly convex."""
    v = mp.mpf(F.proximal_mirror_descent_step(vector(nu), vector(log_mean), log_alpha).item())
    n, m, a = mp.mpf(nu), mp.mpf(log_mean), mp.mpf(log_alpha)
    derivative = -mp.exp(m - v) + 1 + (mp.exp(-n) - mp.exp(-v)) / mp.exp(a)
    curvature = mp.exp(m - v) + mp.exp(-v) / mp.exp(a)
    assert abs(derivative) <= 1e-9 * curvature


@given(nu=WIDE, log_mean=WIDE)
@settings(deadline=None)
def test_proximal_step_limits(nu, log_mean):
    n, m = vector(nu), vector(log_mean)
    assert F.proximal_mirror_descent_step(n, m, math.inf).item() == m.item()
    assert F.proximal_mirror_descent_step(n, m, -math.inf).item() == n.item()
    assert F.proximal_mirror_descent_step(n, m, 1e5).item() == pytest.approx(m.item(), rel=1e-9, abs=1e-9)
    assert F.proximal_mirror_descent_step(n, m, -1e5).item() == pytest.approx(n.item(), rel=1e-9, abs=1e-9)


def proximal_point(nu, log_mean, alpha):
    """ν − α + W(α e^(ℓ + α − ν)) in 80 digits: W is e^u with u + e^u = log of its argument."""
    n, a = mp.mpf(nu), mp.mpf(alpha)
    log_x = mp.log(a) + a + mp.mpf(log_mean) - n
    u = mp.log(log_x - mp.log(log_x)) if log_x > 2 else log_x - mp.log1p(mp.exp(log_x)) / 2
    for _ in range(60):
        u -= (mp.exp(u) + u - log_x) / (mp.exp(u) + 1)
    return n - a + mp.exp(u)


@given(nu=WIDE, difference=st.floats(-60, 60) | st.floats(-1e4, 1e4), log_alpha=st.floats(-14, 9))
@settings(max_examples=300, deadline=None)
def test_proximal_point_step_is_exact(nu, difference, log_alpha):
    alpha, log_mean = math.exp(log_alpha), nu + difference
    n, m = (torch.tensor([value], dtype=torch.float64) for value in (nu, log_mean))
    found = F.proximal_point_step(n, m, alpha).item()
    exact = proximal_point(nu, log_mean, alpha)
    assert close(found, exact, 1e-11)
    assert min(nu, log_mean) - 1e-11 * abs(nu) - 1e-12 <= found <= max(nu, log_mean) + 1e-11 * abs(log_mean) + 1e-12


@given(nu=st.floats(-8, 8), log_mean=st.floats(-8, 8), log_alpha=st.floats(-8, 8))
@settings(deadline=None)
def test_proximal_point_step_minimises_its_objective(nu, log_mean, log_alpha):
    """The derivative of exp(ℓ − v) + v + (v − ν)²/(2α) at the result is 0, and the objective is strictly convex."""
    alpha = math.exp(log_alpha)
    n, m = (torch.tensor([value], dtype=torch.float64) for value in (nu, log_mean))
    v = mp.mpf(F.proximal_point_step(n, m, alpha).item())
    derivative = -mp.exp(mp.mpf(log_mean) - v) + 1 + (v - mp.mpf(nu)) / alpha
    curvature = mp.exp(mp.mpf(log_mean) - v) + 1 / mp.mpf(alpha)
    assert abs(derivative) <= 1e-12 * curvature * max(1, abs(v))


@given(nu=WIDE, log_mean=WIDE)
@settings(deadline=None)
def test_proximal_point_step_limits(nu, log_mean):
    n, m = vector(nu), vector(log_mean)
    assert F.proximal_point_step(n, m, 0.0).item() == n.item()
    assert F.proximal_point_step(n, m, 1e12).item() == pytest.approx(m.item(), rel=1e-7, abs=1e-6)
    assert F.proximal_point_step(n, n, 3.0).item() == pytest.approx(n.item(), rel=1e-12, abs=1e-12)


@given(nu=st.floats(-1e4, 1e4, width=32), log_mean=WIDE, log_alpha=st.floats(-60, 60), multiplier=st.floats(0, 2))
@settings(max_examples=300, deadline=None)
def test_a_multiplier_is_exact(nu, log_mean, log_alpha, multiplier):
    found = F.proximal_mirror_descent_step(vector(nu), vector(log_mean), log_alpha, multiplier).float().item()
    logit = mp.mpf(log_alpha) + mp.mpf(multiplier) * mp.mpf(nu)
    exact = mp.log(mp.exp(nu) / (1 + mp.exp(logit)) + mp.exp(log_mean) / (1 + mp.exp(-logit)))
    assert close(found, exact, 1e-6)


@given(nu=WIDE, log_mean=WIDE, log_alpha=st.floats(-12, 12))
@settings(deadline=None)
def test_a_multiplier_goes_from_sox_to_scent(nu, log_mean, log_alpha):
    n, m = vector(nu), vector(log_mean)
    sox = F.sox_step(n, m, 1 / (1 + math.exp(-log_alpha)))
    torch.testing.assert_close(F.proximal_mirror_descent_step(n, m, log_alpha, 0.0), sox, rtol=1e-6, atol=1e-6)
    each = F.proximal_mirror_descent_step(n, m, torch.tensor([log_alpha], dtype=torch.float64))
    torch.testing.assert_close(each, F.proximal_mirror_descent_step(n, m, log_alpha), rtol=1e-9, atol=1e-9)


@given(nu=WIDE, log_mean=WIDE, gamma=st.floats(0, 1))
@settings(max_examples=300, deadline=None)
def test_sox_step_is_exact(nu, log_mean, gamma):
    found = F.sox_step(vector(nu), vector(log_mean), gamma).float().item()
    g = mp.mpf(gamma)
    assert close(found, mp.log((1 - g) * mp.exp(mp.mpf(nu)) + g * mp.exp(mp.mpf(log_mean))), 1e-6)


@given(nu=st.floats(-300, 300, width=32), log_mean=st.floats(-300, 300, width=32), gamma=st.floats(1e-6, 1 - 1e-6))
@settings(deadline=None)
def test_sox_is_the_proximal_step_with_its_own_step_size(nu, log_mean, gamma):
    """SOX(γ) equals SCENT with α = γ/(1 − γ)·exp(−ν), ν before the step."""
    log_alpha = math.log(gamma) - math.log1p(-gamma) - vector(nu).item()
    n, m = vector(nu), vector(log_mean)
    assert F.sox_step(n, m, gamma).item() == pytest.approx(
        F.proximal_mirror_descent_step(n, m, log_alpha).item(), rel=1e-9, abs=1e-9
    )


def msvr(nu, log_mean, previous, gamma, beta, floor):
    """The average plus the correction, but no less than a share of the average."""
    n, m, p, g = (mp.mpf(value) for value in (nu, log_mean, previous, gamma))
    average = (1 - g) * mp.exp(n) + g * mp.exp(m)
    return mp.log(max(average - mp.mpf(beta) * mp.exp(m) * mp.expm1(p - m), mp.mpf(floor) * average))


@given(
    nu=WIDE,
    log_mean=WIDE,
    change=st.floats(-1e-6, 1e-6) | st.floats(-3, 3) | st.floats(-2e4, 2e4),
    gamma=st.floats(0, 1),
    beta=st.floats(0, 1) | st.floats(0, 1e6),
    floor=st.floats(1e-3, 1),
)
@settings(max_examples=500, deadline=None)
def test_msvr_step_is_exact(nu, log_mean, change, gamma, beta, floor):
    previous = log_mean + change
    n, m, p = (torch.tensor([value], dtype=torch.float64) for value in (nu, log_mean, previous))
    found = F.msvr_step(n, m, p, gamma, beta, floor).item()
    assert close(found, msvr(nu, log_mean, previous, gamma, beta, floor), 1e-8)


@given(nu=WIDE, log_mean=WIDE, previous=WIDE, gamma=st.floats(0.01, 1), beta=st.floats(0, 1e3))
@settings(deadline=None)
def test_msvr_step_limits(nu, log_mean, previous, gamma, beta):
    n, m, p = vector(nu), vector(log_mean), vector(previous)
    sox = F.sox_step(n, m, gamma)
    assert torch.equal(F.msvr_step(n, m, p, gamma, 0.0, 0.1), sox)
    torch.testing.assert_close(F.msvr_step(n, m, m, gamma, beta, 0.1), sox, rtol=1e-12, atol=1e-12)
    # Samples that had no weight before add all of theirs.
    gone = F.msvr_step(n, m, torch.full_like(m, -math.inf), gamma, beta, 0.1)
    torch.testing.assert_close(gone, torch.logaddexp(sox, m.double() + math.log(beta) if beta else sox - math.inf))
    found = F.msvr_step(n, m, p, gamma, beta, 0.1)
    assert (found >= sox + math.log(0.1) - 1e-9).all()
    assert (m.double() - found <= -math.log(0.1 * gamma) + 1e-9 * m.abs()).all()


@given(nu=st.floats(-1e4, 1e4, width=32), difference=st.floats(-1e4, 20), alpha=st.floats(1e-6, 1e2))
@settings(max_examples=300, deadline=None)
def test_gradient_steps_are_exact(nu, difference, alpha):
    n = vector(nu)
    m = vector(n.item() + difference)
    exact = mp.mpf(n.item()) - mp.mpf(alpha) * (1 - mp.exp(mp.mpf(m.item()) - mp.mpf(n.item())))
    assert close(F.asgd_step(n, m, alpha).float().item(), exact, 1e-5)
    for delta in (0.0, 1.0):
        limit = mp.mpf(m.item()) - mp.mpf(delta)
        if abs(exact - limit) > 1e-6 * (1 + abs(limit)):
            expected = mp.mpf(m.item()) if exact < limit else exact
            assert close(F.umax_step(n, m, alpha, delta).float().item(), expected, 1e-5)
        if abs(mp.mpf(n.item()) - limit) > 1e-6 * (1 + abs(limit)):
            expected = mp.mpf(m.item()) if mp.mpf(n.item()) < limit else exact
            assert close(F.umax_step(n, m, alpha, delta, "old").float().item(), expected, 1e-5)


@given(
    nu=st.floats(-1e3, 1e3, width=32),
    differences=st.lists(st.floats(-1e3, 20), min_size=1, max_size=6),
    alpha=st.floats(1e-6, 1e2),
    rho=st.floats(1e-5, 1e-1),
)
@settings(max_examples=300, deadline=None)
def test_softplus_step_is_exact(nu, differences, alpha, rho):
    n = vector(nu)
    scores = torch.tensor([[n.item() + d for d in differences]])
    found = F.softplus_asgd_step(n, scores, alpha, rho).float().item()

    def weight(score: float) -> mp.mpf:
        return 1 / (1 + mp.exp(-(mp.mpf(score) - mp.mpf(n.item()) + mp.log(mp.mpf(rho))))) / mp.mpf(rho)

    mean = sum(weight(score) for score in scores[0].tolist()) / len(differences)
    # float32 scores minus ν carry up to 6e-8·1e3 into the exponent.
    assert close(found, mp.mpf(n.item()) - mp.mpf(alpha) * (1 - mean), 1e-5 * max(1.0, float(alpha * mean)))


@pytest.mark.parametrize("offset", [-1e4, -200.0, 0.0, 100.0, 1e4])
@pytest.mark.parametrize("masked", [False, True])
@pytest.mark.parametrize("shape", [(3, 7), (40, 200)])
def test_log_mean_exp(offset, masked, shape):
    generator = torch.Generator().manual_seed(0)
    scores = offset + 3 * torch.randn(shape, generator=generator)
    mask = torch.rand(shape, generator=generator) < 0.5 if masked else None
    found = F.log_mean_exp(scores, mask)
    for row in range(shape[0]):
        valid = scores[row] if mask is None else scores[row][mask[row]]
        exact = mp.log(sum(mp.exp(mp.mpf(x)) for x in valid.tolist()) / len(valid))
        assert abs(mp.mpf(found[row].item()) - exact) <= 1e-6 * max(1, abs(exact))


def test_log_mean_exp_of_rows_without_samples_and_hidden_garbage():
    scores = torch.tensor([[math.nan, 1.0], [math.inf, math.nan]])
    mask = torch.tensor([[False, True], [False, False]])
    assert F.log_mean_exp(scores, mask).tolist() == [1.0, -math.inf]
    assert F.log_mean_exp(torch.zeros(2, 0)).tolist() == [-math.inf, -math.inf]
    assert F.log_mean_exp(torch.zeros(0, 3)).shape == (0,)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision_is_raised_before_the_exponential(dtype):
    scores = torch.linspace(-9, 9, 40).reshape(4, 10).to(dtype)
    nu = torch.zeros(4)
    assert torch.equal(F.log_mean_exp(scores), F.log_mean_exp(scores.float()))
    objective = F.exponential_objective(nu, scores)
    assert objective.dtype == torch.float32
    assert torch.equal(objective, F.exponential_objective(nu, scores.float()))
    assert torch.equal(F.softplus_asgd_step(nu, scores, 0.1, 1e-3), F.softplus_asgd_step(nu, scores.float(), 0.1, 1e-3))


OBJECTIVES = {
    "exponential": F.exponential_objective,
    "softplus": lambda nu, scores, mask=None: F.softplus_objective(nu, scores, 1e-3, mask),
}


@pytest.mark.parametrize("name", OBJECTIVES)
@pytest.mark.parametrize("masked", [False, True])
def test_objective_gradients_by_finite_differences(name, masked):
    generator = torch.Generator().manual_seed(1)
    scores = torch.randn(4, 5, dtype=torch.float64, generator=generator).requires_grad_()
    nu = torch.randn(4, dtype=torch.float64, generator=generator)
    mask = torch.rand(4, 5, generator=generator) < 0.6 if masked else None
    assert torch.autograd.gradcheck(lambda s: OBJECTIVES[name](nu, s, mask), scores)


@pytest.mark.parametrize("masked", [False, True])
def test_exponential_objective_value_and_weights(masked):
    generator = torch.Generator().manual_seed(2)
    scores = (4 * torch.randn(6, 9, generator=generator)).requires_grad_()
    nu = torch.randn(6, generator=generator)
    mask = torch.rand(6, 9, generator=generator) < 0.6 if masked else torch.ones(6, 9, dtype=torch.bool)
    objective = F.exponential_objective(nu, scores, mask if masked else None)
    exact = scores.detach().double() - nu.double().unsqueeze(1)
    weights = exact.exp() * mask / mask.sum(1, keepdim=True)
    torch.testing.assert_close(objective.double(), weights.sum(1) + nu.double() - 1, rtol=1e-6, atol=1e-6)
    objective.sum().backward()
    torch.testing.assert_close(scores.grad.double(), weights, rtol=1e-6, atol=1e-12)


@given(nu=st.floats(-50, 50, width=32), scores=st.lists(st.floats(-50, 50, width=32), min_size=1, max_size=8))
@settings(deadline=None)
def test_objective_bounds_the_log_mean_exp(nu, scores):
    rows = torch.tensor([scores], dtype=torch.float64)
    log_mean = F.log_mean_exp(rows)
    assert F.exponential_objective(vector(nu).double(), rows).item() >= log_mean.item() - 1e-9
    assert F.exponential_objective(log_mean, rows).item() == pytest.approx(log_mean.item(), abs=1e-9)


def test_objective_ignores_what_is_masked_and_rows_without_samples():
    scores = torch.tensor([[1.0, math.nan], [math.inf, -math.inf]], requires_grad=True)
    mask = torch.tensor([[True, False], [False, False]])
    for objective in OBJECTIVES.values():
        scores.grad = None
        value = objective(torch.tensor([1.0, 5.0]), scores, mask)
        value.sum().backward()
        assert value[0].item() == pytest.approx(1.0, abs=1e-3)
        assert value[1].item() == 0
        assert scores.grad[0, 1] == 0
        assert scores.grad[1].tolist() == [0, 0]
        assert torch.isfinite(scores.grad).all()


def test_objective_of_no_samples_stays_in_the_graph():
    for objective in OBJECTIVES.values():
        scores = torch.zeros(2, 0, requires_grad=True)
        value = objective(torch.ones(2), scores)
        assert value.tolist() == [0, 0]
        value.sum().backward()


@given(nu=WIDE, log_mean=WIDE, limit=st.floats(0, 50))
@settings(deadline=None)
def test_guard_bounds_the_weight(nu, log_mean, limit):
    guarded = F.guard(vector(nu), vector(log_mean), limit).item()
    assert guarded >= vector(nu).item()
    assert vector(log_mean).item() - guarded <= limit + 1e-9
    if vector(log_mean).item() - vector(nu).item() <= limit:
        assert guarded == vector(nu).item()


@pytest.mark.parametrize("largest", [-1e35, -3e38, 1e35])
def test_masked_scores_of_any_finite_size(largest):
    """What does not count must not stand above what does."""
    scores = torch.tensor([[largest, math.nan, math.inf], [largest, 0.0, 1.0]], requires_grad=True)
    mask = torch.tensor([[True, False, False], [False, False, False]])
    assert F.log_mean_exp(scores, mask).tolist() == [pytest.approx(largest), -math.inf]
    nu = torch.tensor([largest, 0.0])
    F.exponential_objective(nu, scores, mask).sum().backward()
    assert scores.grad.tolist() == [[1.0, 0.0, 0.0], [0.0, 0.0, 0.0]]
