"""A shortcut never changes what a class of one's own means, and the guard is seen whichever way an update goes."""

import pytest
import torch

from scent_lightning.callbacks.dual_variable_monitor import batch_statistics
from scent_lightning.duals import SCENT, SOX, DualVariable, SoftplusASGD


class Halved(SCENT):
    """Overrides what the parent has a shortcut for."""

    def step_from_log_mean(self, nu, log_mean, progress=0.0):
        return (nu + log_mean) / 2


class Guarded(SCENT):
    def guard(self, nu, log_mean):
        return log_mean + 1.0


class ByScores(SOX):
    def step(self, nu, scores, mask=None, progress=0.0):
        return scores.amax(dim=1).float()


class Shifted(SCENT):
    """Brings a shortcut of its own."""

    def step_from_log_mean(self, nu, log_mean, progress=0.0):
        return nu + 1.0

    def step_of_one(self, nu, log_mean, progress=0.0):
        return nu + 1.0


class Slower(SCENT):
    """Changes what both ways call."""

    def _log_alpha_at(self, progress):
        return super()._log_alpha_at(progress) - 5.0


@pytest.mark.parametrize(
    "update", [Halved(8.0), Guarded(8.0), ByScores(0.5), Shifted(8.0), Slower(8.0), SCENT(8.0)], ids=repr
)
@pytest.mark.parametrize("num_anchors", [1, 4])
def test_a_shortcut_means_what_the_class_says(update, num_anchors):
    """A batch of one row, which has a shortcut, against the same row twice, which has none."""
    one, two = DualVariable(num_anchors, update), DualVariable(num_anchors, update)
    for scores in (torch.zeros(1, 3), torch.tensor([[1.0, 2.0, 3.0]])):
        one.entropic_risk(scores, torch.tensor([0]))
        two.entropic_risk(scores.repeat(2, 1), torch.tensor([0, 0]))
    torch.testing.assert_close(one.nu, two.nu)
    assert one.update.has_step_of_one == (type(update) in (Shifted, Slower, SCENT))


def test_auto_keeps_the_class():
    for rows in (1, 2):
        variable = DualVariable(4, Halved("auto"))
        variable.entropic_risk(torch.zeros(rows, 3), torch.arange(rows), progress=0.0)
        variable.entropic_risk(torch.ones(rows, 3), torch.arange(rows), progress=0.5)
        assert variable.nu[:rows].tolist() == [0.5] * rows
    assert type(variable.update_at(0.5)) is Halved
    assert variable.update.log_alpha == "auto"


def test_an_instance_may_override_too():
    update = SCENT(8.0)
    update.step_from_log_mean = lambda nu, log_mean, progress=0.0: (nu + log_mean) / 2
    variable = DualVariable(1, update)
    for value in (0.0, 1.0):
        variable.entropic_risk(torch.full((1, 3), value), torch.tensor([0]))
    assert variable.nu.item() == 0.5


@pytest.mark.parametrize("repeats", [1, 2])
def test_guarded_shows_for_an_update_by_scores(repeats):
    variable = DualVariable(4, SoftplusASGD(0.01, 1e-3, max_log_weight=0.5))
    index = torch.arange(2).repeat(repeats)
    variable.entropic_risk(torch.zeros(2 * repeats, 3), index)
    variable.entropic_risk(torch.full((2 * repeats, 3), 4.0), index)
    step = variable.last_step
    assert (step.nu > step.unguarded).all()
    assert variable.nu[:2].tolist() == [3.5, 3.5]
    assert batch_statistics(variable, step)["guarded"] == 1.0
    assert variable.update.max_log_weight == 0.5
