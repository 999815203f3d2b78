"""The learning rate of the tasks: what it is where none is given, and how it goes."""

import lightning as L
import pytest
import scipy.optimize
import torch

from scent_lightning.duals import BSGD, SCENT
from scent_lightning.errors import InputError
from scent_lightning.tasks import BaseTask, DRORegressionTask, ExtremeClassificationTask, PartialAUCTask
from tests.helpers import SoftmaxData, quiet_trainer


class Task(BaseTask):
    """Softmax regression of five classes."""

    def __init__(self, num_anchors=96, **arguments):
        super().__init__(**arguments)
        self.linear = torch.nn.Linear(4, 5)
        self.add_dual("nu", num_anchors, BSGD())
        self.rates = []

    def training_step(self, batch, batch_idx):
        inputs, labels, index = batch
        self.rates.append(self.trainer.optimizers[0].param_groups[0]["lr"])
        logits = self.linear(inputs)
        return self.entropic_risk("nu", logits - logits.gather(1, labels[:, None]), index)


def rates(epochs=5, resume=None, save=None, accumulate=1, max_steps=-1, **arguments):
    data = SoftmaxData()
    task = Task(data.num_anchors, **arguments)
    trainer = quiet_trainer(
        max_epochs=epochs, max_steps=max_steps, limit_val_batches=0, accumulate_grad_batches=accumulate
    )
    trainer.fit(task, data, ckpt_path=resume, weights_only=True)
    if save is not None:
        trainer.save_checkpoint(save)
    return task.rates


def along(schedule, steps, warmup=0.0, lr=0.3, since=0):
    found = []
    for step in range(since, steps):
        progress, decades = step / steps, 4 if schedule == "geometric" else 3
        fall = {"geometric": 10 ** (-4 * progress) * min(20 * (1 - progress), 1.0), "constant": 1.0}[schedule]
        found.append(lr * fall * (10 ** (decades * (progress / warmup - 1)) if progress < warmup else 1.0))
    return pytest.approx(found)


@pytest.mark.parametrize("schedule", ["geometric", "constant"])
@pytest.mark.parametrize(
    ("epochs", "warmup_epochs", "share"),
    [(5, 0.0, 0.0), (10, 1.0, 0.1), (20, 2.5, 0.125), (5, 1.0, 0.2), (4, 3.0, 0.2), (1, 1.0, 0.2)],
)
def test_it_rises_and_falls_by_the_same_factor_each_step(schedule, epochs, warmup_epochs, share):
    found = rates(epochs, lr=0.3, lr_schedule=schedule, warmup_epochs=warmup_epochs)
    assert found == along(schedule, len(found), share)


def test_a_warm_up_counts_optimizer_steps():
    batches = len(rates(1))
    found = rates(-1, max_steps=20 * batches, lr=0.3, lr_schedule="geometric", warmup_epochs=2.0)
    assert found == along("geometric", 20 * batches, 0.1)
    found = rates(-1, max_steps=5 * batches, accumulate=2, lr=0.3, lr_schedule="geometric", warmup_epochs=1.0)
    assert list(dict.fromkeys(found)) == along("geometric", 5 * batches, -(-batches // 2) / (5 * batches))


def test_it_is_where_the_longer_run_is(tmp_path):
    settings = {"lr": 0.3, "lr_schedule": "geometric", "warmup_epochs": 1.0}
    short = rates(2, save=tmp_path / "a.ckpt", **settings)
    longer = rates(10, resume=tmp_path / "a.ckpt", **settings)
    assert longer == along("geometric", 5 * len(short), 0.1, since=len(short))


def test_a_warm_up_needs_the_length_of_the_run():
    with pytest.raises(InputError, match="warmup_epochs needs to know how long the run is"):
        rates(-1, lr_schedule="constant", warmup_epochs=1.0)


TASKS = {
    "regression": (lambda **given: DRORegressionTask(3, SCENT(), **given), (0.01, "geometric", 1.0), 1e-5),
    "partial AUC": (lambda **given: PartialAUCTask(4, SCENT(), 3, **given), (1e-3, "cosine", 0.0), 1e-3),
    "classification": (
        lambda **given: ExtremeClassificationTask(3, 7, 4, SCENT(), **given),
        (7.0, "cosine", 0.0),
        1.0,
    ),
    "own": (lambda **given: Task(**given), (0.1, "cosine", 0.0), 0.1),
}


@pytest.mark.parametrize("name", TASKS)
def test_where_none_is_given(name):
    make, proximal, gradient = TASKS[name]

    def of(**given):
        task = make(**given)
        return task.lr, task.lr_schedule, task.warmup_epochs

    if name == "partial AUC":  # is found, unless something is said of it
        assert of() == of(weight_step="proximal") == of(lr="auto")
        assert make().finds_lr
        assert make().hparams["lr"] == "auto"
        assert not any(
            make(**given).finds_lr for given in ({"lr": 0.7}, {"lr_schedule": "step"}, {"loss": "cross_entropy"})
        )
        assert of(loss="cross_entropy") == of(lr_schedule="cosine") == proximal
    else:
        assert of() == of(weight_step="proximal") == proximal
    assert of(weight_step="gradient") == (gradient, "cosine", 0.0)
    assert of(optimizer=torch.optim.SGD)[1:] == ("cosine", 0.0)
    assert of(lr=0.7) == (0.7, *proximal[1:])
    assert of(lr_schedule="step", warmup_epochs=2) == (proximal[0], "step", 2)
    assert of(weight_step="gradient", warmup_epochs=0.5) == (gradient, "cosine", 0.5)


@pytest.mark.parametrize("name", TASKS)
@pytest.mark.parametrize(
    ("given", "said"),
    [
        ({"lr": 0.0}, "lr must be a finite number above 0, got 0.0"),
        ({"lr": float("inf")}, "lr must be a finite number above 0, got inf"),
        ({"lr_schedule": "linear"}, "lr_schedule must be one of cosine, geometric, constant, step, got 'linear'"),
        ({"warmup_epochs": -1.0}, "warmup_epochs must be a finite number of at least 0, got -1.0"),
        ({"warmup_epochs": True}, "warmup_epochs must be a finite number of at least 0, got True"),
    ],
)
def test_bad_arguments(name, given, said):
    with pytest.raises(InputError) as caught:
        TASKS[name][0](**given)
    assert str(caught.value) == said


def test_regression_with_nothing_set_survives_a_far_outlier():
    """Gradient steps diverge at rates that proximal ones bear."""
    generator = torch.Generator().manual_seed(0)
    features = torch.randn(400, 3, generator=generator)
    target = features.sum(dim=1) + 0.1 * torch.randn(400, generator=generator)
    target[7] += 6.0

    class Rows(L.LightningDataModule):
        num_features = 3

        def train_dataloader(self):
            rows = torch.utils.data.TensorDataset(features, target, torch.arange(400))
            return torch.utils.data.DataLoader(rows, batch_size=20, shuffle=True)

    def objective(**given):
        L.seed_everything(0, verbose=False)
        task = DRORegressionTask(3, SCENT(), tau=1.0, initial="zeros", **given)
        quiet_trainer(max_epochs=40, limit_val_batches=0).fit(task, Rows())
        return risk(torch.cat([parameter.detach().flatten() for parameter in task.parameters()]).double())

    rows = torch.cat([features, torch.ones(400, 1)], dim=1).double()

    def risk(weights):
        return torch.logsumexp((rows @ weights - target.double()).square(), dim=0).item()

    least = scipy.optimize.minimize(
        lambda weights: risk(torch.tensor(weights).double()), torch.zeros(4), method="Powell"
    ).fun
    start = risk(torch.zeros(4, dtype=torch.float64))
    assert objective() - least < 0.02 * (start - least)
    assert objective(lr=0.1) < start
    assert not objective(lr=0.1, weight_step="gradient") < start
