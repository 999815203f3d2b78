"""``independent_sample``: ν is moved by one random part of a batch, and the gradient is that of the other."""

from functools import partial

import lightning as L
import pytest
import torch

from scent_lightning.duals import MSVR, SCENT, SOX
from scent_lightning.errors import InputError
from scent_lightning.tasks import DRORegressionTask, ExtremeClassificationTask, PartialAUCTask
from scent_lightning.tasks.batches import random_half
from tests.helpers import ddp_trainer, quiet_trainer, under_trainers
from tests.kill_and_resume import differences
from tests.settings import classification, moved_by, ranking, regression
from tests.test_accumulation import fit


def _independent(folder, batch_size, setting, **arguments):
    task, data = setting(folder, batch_size, **arguments)
    task.independent_sample = True
    return task, data


SETTINGS = {
    "regression": partial(_independent, setting=regression),
    "in_batch": partial(_independent, setting=classification),
    "uniform": partial(_independent, setting=partial(classification, negatives="uniform")),
    "ranking": partial(_independent, setting=ranking),
}


def spied(task):
    """What each step gives to ``entropic_risk``."""
    seen, risk = [], task.entropic_risk

    def entropic_risk(name, scores, index, mask=None, dual_scores=None, previous_scores=None, **more):
        seen.append((scores, mask, dual_scores, previous_scores))
        return risk(name, scores, index, mask, dual_scores, previous_scores, **more)

    task.entropic_risk = entropic_risk
    return seen


def test_halves_of_the_rows_of_regression():
    task = DRORegressionTask(3, SCENT(0.0), initial="zeros", independent_sample=True)
    seen = spied(task)
    target = torch.arange(7.0)
    for _ in range(40):
        task.training_step((torch.randn(7, 3), target, torch.arange(7)), 0)
    chosen = torch.zeros(7)
    for scores, _, moving, _ in seen:
        assert scores.shape == (1, 4)
        assert moving.shape == (1, 3)
        assert sorted([*scores[0].tolist(), *moving[0].tolist()]) == target.square().tolist()
        chosen[moving[0].sqrt().long()] += 1
    assert (chosen > 5).all()  # of 17 on average
    assert (chosen < 30).all()


def test_halves_of_the_negatives_of_partial_auc():
    task = PartialAUCTask(9, SOX(0.5), num_features=2, independent_sample=True)
    seen = spied(task)
    labels = torch.tensor([1, 0, 0, 1, 0, 0, 0, 1, 0])
    features = torch.randn(9, 2)
    task.training_step((features, labels, torch.arange(9)), 0)
    ((losses, _, moving, _),) = seen
    assert losses.shape == moving.shape == (3, 3)
    plain = PartialAUCTask(9, SOX(0.5), num_features=2)
    plain.load_state_dict({**task.state_dict(), "duals.nu.visited": torch.zeros(9, dtype=torch.bool)})
    whole = spied(plain)
    plain.training_step((features, labels, torch.arange(9)), 0)
    together = torch.cat([losses, moving], dim=1).sort(dim=1).values
    torch.testing.assert_close(together, whole[0][0].sort(dim=1).values)


@pytest.mark.parametrize("negatives", ["in_batch", "uniform"])
def test_other_negatives_of_extreme_classification(negatives):
    more = {"negatives": negatives, "num_negatives": 6, "include_target": False}
    task = ExtremeClassificationTask(4, 30, 20, SOX(0.5), independent_sample=True, **more)
    torch.nn.init.normal_(task.head.weight)
    seen = spied(task)
    features, labels = torch.randn(8, 4), torch.tensor([3, 1, 4, 1, 5, 9, 2, 6])
    task.training_step((features, labels, torch.arange(8)), 0).backward()
    ((scores, mask, moving, _),) = seen
    assert not moving.values.requires_grad
    if negatives == "uniform":
        assert scores.shape == moving.values.shape == (8, 6)
        assert not torch.equal(scores, moving.values)
        return
    # Seven classes, four in the loss and three that move ν, but for each row's own.
    assert (mask.sum(dim=1) + moving.mask.sum(dim=1) == 6).all()
    assert not (mask & moving.mask).any()
    assert mask.any(dim=0).sum() == 4
    rows = task.head.weight.grad.coalesce().indices()[0]
    assert set(rows.tolist()) <= set(labels.tolist())


def test_what_cannot_be_split():
    with pytest.raises(InputError, match="independent_sample needs negatives that are sampled, got True with"):
        ExtremeClassificationTask(4, 9, 20, SOX(0.5), negatives="all", independent_sample=True)
    one_row = DRORegressionTask(3, SCENT(0.0), initial="zeros", independent_sample=True)
    seen = spied(one_row)
    one_row.training_step((torch.randn(1, 3), torch.ones(1), torch.tensor([5])), 0)
    one_negative = PartialAUCTask(9, SOX(0.5), num_features=2, independent_sample=True)
    seen += spied(one_negative)
    one_negative.training_step((torch.randn(3, 2), torch.tensor([1, 0, 1]), torch.arange(3)), 0)
    one_class = ExtremeClassificationTask(4, 9, 20, SOX(0.5), independent_sample=True)
    with pytest.warns(UserWarning, match="a batch holds one class only"):
        loss = one_class.training_step((torch.randn(2, 4), torch.tensor([3, 3]), torch.arange(2)), 0)
    assert loss == 0
    assert seen[0][2] is None


def test_a_random_half():
    for size in (0, 1, 2, 5, 8):
        assert random_half(size, None).sum() == size // 2
    one, other = (random_half(50, torch.Generator().manual_seed(3)) for _ in range(2))
    assert torch.equal(one, other)


@pytest.mark.parametrize("name", SETTINGS)
def test_a_run_that_is_resumed(name, tmp_path):
    """The split is that of the step; with an update that compares with the weights before, too."""
    for folder in ("data", "run"):
        (tmp_path / folder).mkdir()
    setting = moved_by(MSVR(0.5, 0.5), SETTINGS[name])
    whole = fit(setting, tmp_path / "data", tmp_path / "run", accumulate=1)
    assert not differences(whole, fit(setting, tmp_path / "data", resumed=str(tmp_path / "run/0_2.ckpt"), accumulate=1))


def _fit(rank, folder, world):
    found = {}
    make = quiet_trainer if world == 1 else partial(ddp_trainer, world=world)
    for name, setting in SETTINGS.items():
        (folder / name).mkdir(exist_ok=True)
        L.seed_everything(3, verbose=False)
        task, data = setting(folder / name, 16 // world)
        make(max_steps=20, limit_val_batches=0).fit(task, datamodule=data)
        found[name] = {key: value.double().numpy() for key, value in task.state_dict().items()}
    return found


@pytest.mark.slow
def test_one_process_or_two(tmp_path):
    """A row is in the same half whichever process has it."""
    alone = _fit(0, tmp_path, 1)
    for found in under_trainers(partial(_fit, folder=tmp_path, world=2), 2):
        for name, state in found.items():
            for key, expected in alone[name].items():
                torch.testing.assert_close(
                    torch.from_numpy(state[key]), torch.from_numpy(expected), rtol=1e-5, atol=1e-5, msg=f"{name} {key}"
                )
