"""Margins on the own class: values, gradients by finite differences, and what they leave alone."""

import math

import pytest
import torch
from torch.nn import functional as F

from scent_lightning.duals import BSGD, DenseScores, DualVariable
from scent_lightning.errors import InputError
from scent_lightning.modules import ClassSampledLinear
from scent_lightning.modules.margins import with_margin

K, D = 12, 5
MARGINS = [(0.35, "cosine"), (0.5, "angular"), (1.2, "angular")]


@pytest.mark.parametrize("degrees", [0, 1, 30, 90, 140, 170, 180])
@pytest.mark.parametrize("margin", [0.0, 0.3, 0.5, 1.4])
def test_angular_margin_is_that_of_the_angle(degrees, margin):
    theta = math.radians(degrees)
    value, _ = with_margin(torch.tensor([64 * math.cos(theta)], dtype=torch.float64), margin, "angular", 64.0)
    turned = math.cos(theta + margin) if theta < math.pi - margin else math.cos(theta) - margin * math.sin(margin)
    assert value.item() == pytest.approx(64 * turned, abs=0.1 * margin)  # the sine is not below 0.001


def test_own_logit_falls_with_the_angle():
    cosine = torch.linspace(1, -1, 2001, dtype=torch.float64)
    for margin, kind in MARGINS:
        value, slope = with_margin(cosine, margin, kind, 1.0)
        assert (value.diff() < 0).all()
        assert (value <= cosine).all()
        assert torch.as_tensor(slope).gt(0).all()


def head_of(negatives, margin, margin_type, **arguments):
    head = ClassSampledLinear(
        D, K, negatives, num_negatives=6, normalize=True, scale=8.0, margin=margin, margin_type=margin_type, **arguments
    ).double()
    torch.nn.init.normal_(head.weight, generator=torch.Generator().manual_seed(0))
    return head


@pytest.mark.parametrize("negatives", ["in_batch", "uniform", "all"])
@pytest.mark.parametrize(("margin", "margin_type"), MARGINS)
@pytest.mark.parametrize("fast", [True, False])
def test_gradient_by_finite_differences(negatives, margin, margin_type, fast):
    head = head_of(negatives, margin, margin_type, include_target=True, correction="frequency")
    labels = torch.tensor([0, 7, 7, 3])
    features = torch.randn(4, D, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    features[3] = -head.weight[3].detach()  # beyond π − m
    with torch.no_grad():
        head.weight[3, 0] += 0.1

    def risk(features, weight):
        head.weight = torch.nn.Parameter(weight.detach().clone())
        generator = torch.Generator().manual_seed(3)
        samples = head.samples(features, labels, generator=generator)
        if not fast:
            samples = samples.dense()
        # At ν = ℓ, where the objective has the gradient of ℓ; but ν is in float32.
        loss = DualVariable(4, BSGD()).evaluate(samples, torch.arange(4))
        return loss, head.weight, samples.sides()[0].log_mean.mean().item()

    features.requires_grad_()
    value, weight, _ = risk(features, head.weight)
    found = torch.autograd.grad(value, (features, weight))
    start, step = head.weight.detach().clone(), 1e-6
    for which, gradient in enumerate(found):
        gradient = gradient.to_dense()
        for place in [(0, 0), (3, 2), (2, 4)]:
            ends = []
            for sign in (1, -1):
                inputs = [features.detach().clone(), start.clone()]
                inputs[which][place] += sign * step
                ends.append(risk(*inputs)[2])
            assert gradient[place].item() == pytest.approx((ends[0] - ends[1]) / (2 * step), rel=1e-5, abs=1e-6)


@pytest.mark.parametrize("negatives", ["in_batch", "all"])
@pytest.mark.parametrize(("margin", "margin_type"), MARGINS)
def test_scores_are_those_of_the_formula_and_evaluation_has_no_margin(negatives, margin, margin_type):
    head = head_of(negatives, margin, margin_type)
    labels = torch.tensor([0, 7, 2])
    features = torch.randn(3, D, dtype=torch.float64)
    logits = 8 * F.normalize(features, dim=1) @ F.normalize(head.weight, dim=1).T
    torch.testing.assert_close(head.logits(features), logits)
    own = logits.gather(1, labels.unsqueeze(1))
    classes = labels.unique() if negatives == "in_batch" else torch.arange(K)
    scores, mask = head(features, labels)
    torch.testing.assert_close(scores, logits[:, classes] - with_margin(own, margin, margin_type, 8.0)[0])
    found = head.samples(features, labels).sides()[0].log_mean
    torch.testing.assert_close(found, DenseScores(scores, mask).sides()[0].log_mean)


def test_under_autocast():
    head = head_of("uniform", 0.5, "angular").float()
    features = torch.randn(3, D, requires_grad=True)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        scores, _ = head(features, torch.tensor([0, 7, 2]))
    assert scores.dtype == torch.bfloat16
    scores.float().sum().backward()
    assert head.weight.grad.dtype == features.grad.dtype == torch.float32


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"margin": 0.1}, "margin needs normalize=True, which makes the logits cosines, got 0.1 without"),
        ({"margin": -0.1, "normalize": True}, "margin must be a finite number of at least 0, got -0.1"),
        ({"margin": math.nan, "normalize": True}, "margin must be a finite number of at least 0, got nan"),
        (
            {"margin": 1.6, "margin_type": "angular", "normalize": True},
            "margin must be an angle below π/2 with margin_type 'angular', got 1.6",
        ),
        ({"margin_type": "euclidean"}, "margin_type must be one of cosine, angular, got 'euclidean'"),
    ],
)
def test_bad_margins(arguments, message):
    with pytest.raises(InputError, match=f"^{message}$"):
        ClassSampledLinear(D, K, **arguments)
