"""The learning rate that is found: its rule, what it does not depend on, and that a run with it is as any other."""

import math

import lightning as L
import pandas as pd
import pytest
import scipy.optimize
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from lightning.pytorch.callbacks import LearningRateMonitor
from lightning.pytorch.loggers import CSVLogger

from scent_lightning.duals import SCENT, AutoLR
from scent_lightning.duals.auto_rate import AutoRate
from scent_lightning.errors import InputError
from scent_lightning.functional import lambert_w_of_log
from scent_lightning.tasks import DRORegressionTask, ExtremeClassificationTask, PartialAUCTask, RankingTask
from tests.helpers import (
    SoftmaxData,
    SoftmaxTask,
    assert_resumed_is_the_same,
    ddp_trainer,
    quiet_trainer,
    under_trainers,
)

STEPS = 1000


def simulated(log_scale=0.0, limit=0.2, fall="geometric", a=1.0):
    """The rates of a run whose a is the rate times e^log_scale times ``a``, which may be a function of the step."""
    rate, rates = AutoRate(limit, fall), []
    for step in range(STEPS):
        rates.append(rate.at(step / STEPS))
        log_a = math.log(rates[-1]) + log_scale + math.log(a(step) if callable(a) else a)
        rate.observe(lambert_w_of_log(log_a), (step + 1) / STEPS)
    return rate, rates


def test_it_rises_by_a_power_of_ten_in_a_window_until_steps_are_limited():
    rate, rates = simulated()
    assert rates[0] == 1e-30
    assert rates[1] == pytest.approx(1e-4)
    top = rates.index(max(rates))
    assert rates[top] == pytest.approx(math.exp(rate.top))
    for step in range(1, top):
        assert rates[step + 1] / rates[step] == pytest.approx(10 ** (1 / 40), rel=1e-3)
    # W(a) of the top is above the mean over the window before, and not by more than the rate has risen in it.
    assert rate.mean > 0.2
    assert 0.2 < lambert_w_of_log(math.log(rates[top])) < 2.0


@pytest.mark.parametrize("fall", ["geometric", "cosine"])
def test_it_falls_over_the_rest_of_the_run(fall):
    rate, rates = simulated(fall=fall)
    top = math.exp(rate.top)
    assert rate.at(1.0) == pytest.approx(0.0, abs=1e-12 * top)
    middle = (1 + rate.since) / 2
    assert rate.at(middle) == pytest.approx(top * (1e-2 if fall == "geometric" else 0.5))
    if fall == "geometric":
        assert rate.at(0.05 * rate.since + 0.95) == pytest.approx(top * 10**-3.8)
        assert rate.at(0.025 * rate.since + 0.975) == pytest.approx(top * 10**-3.9 / 2)
    after = rates[rates.index(max(rates)) :]
    assert after == sorted(after, reverse=True)


@settings(deadline=None, max_examples=30)
@given(st.floats(-80, 80), st.sampled_from([0.005, 0.2, 3.0]))
def test_the_unit_of_the_rate_does_not_matter(log_scale, limit):
    """Features, scores or gradients of another scale: the rates are in inverse proportion, and nothing else."""
    (one, rates), (other, scaled) = simulated(0.0, limit), simulated(log_scale, limit)
    assert other.since == one.since
    assert [value * math.exp(log_scale) for value in scaled[1:]] == pytest.approx(rates[1:], rel=1e-6)


def test_a_larger_limit_finds_a_larger_rate():
    tops = [simulated(limit=limit)[0].top for limit in (0.005, 0.2, 3.0)]
    assert tops == sorted(tops)
    assert tops[0] < tops[1] - 1


def test_rare_rows_are_what_limits_steps():
    """A row that comes once in five steps, and then makes a a thousand times larger, keeps the rate down."""
    common, rare = simulated()[0], simulated(a=lambda step: 1e3 if step % 5 == 3 else 1.0)[0]
    assert rare.top < common.top - 2


def test_it_rises_no_longer_than_three_tenths_of_the_run():
    rate, rates = simulated(a=lambda step: 1.0 if step < 10 else 1e-20)
    assert rate.since == pytest.approx(0.3, abs=2 / STEPS)
    assert rates.index(max(rates)) == pytest.approx(0.3 * STEPS, abs=2)


def test_it_may_begin_within_a_run():
    """Where a run that had another rate goes on with it."""
    rate, rates = AutoRate(), []
    for step in range(STEPS // 2, STEPS):
        rates.append(rate.at(step / STEPS))
        rate.observe(lambert_w_of_log(math.log(rates[-1])), (step + 1) / STEPS)
    assert rate.mean > 0.2
    assert 0.5 < rate.since < 0.65
    assert rate.at(0.05 * rate.since + 0.95) == pytest.approx(10**-3.8 * math.exp(rate.top))
    assert rate.at(1.0) == 0.0


def test_steps_of_which_nothing_is_known_change_no_mean():
    rate = AutoRate()
    rate.observe(None, 0.001)
    assert rate.at(0.001) == 1e-30
    rate.observe(1e-30, 0.002)
    assert rate.at(0.002) == pytest.approx(1e-4)
    rate.observe(None, 0.042)
    assert rate.mean == 0
    assert rate.at(0.042) == pytest.approx(1e-3, rel=1e-2)


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ({"limit": 0.0}, "limit must be a finite number above 0, got 0.0"),
        ({"limit": math.inf}, "limit must be a finite number above 0, got inf"),
        ({"fall": "linear"}, "fall must be one of geometric, cosine, got 'linear'"),
    ],
)
def test_bad_numbers_of_the_rule(given, said):
    with pytest.raises(InputError) as caught:
        AutoRate(**given)
    assert str(caught.value) == said


# -------------------------------------------------------------------- under a Trainer


class Task(SoftmaxTask):
    """Finds its rate; ``ratios`` are the groups' own rates, of the weights and of the intercepts."""

    weight_step = "proximal"

    def __init__(self, kind="SGD", ratios=(1.0, 1.0), **arguments):
        torch.manual_seed(3)
        super().__init__(24, SCENT(-1.0))
        self.kind, self.ratios, self.arguments = kind, ratios, arguments
        self.rates = []

    def configure_optimizers(self):
        groups = [{"params": [p], "lr": r} for p, r in zip(self.parameters(), self.ratios, strict=True)]
        optimizer = getattr(torch.optim, self.kind)(groups)
        schedule = {"scheduler": AutoLR(optimizer, self, **self.arguments), "interval": "step"}
        return {"optimizer": optimizer, "lr_scheduler": schedule}

    def training_step(self, batch, batch_idx):
        self.rates.append(self.optimizers().param_groups[0]["lr"])
        return super().training_step(batch, batch_idx)


def fit(task, data=None, **arguments):
    quiet_trainer(**{"max_epochs": 40, "limit_val_batches": 0, **arguments}).fit(task, datamodule=data or SoftmaxData())
    return task


def test_a_module_of_ones_own():
    task = fit(Task())
    found = task.lr_schedulers().found
    assert found.top is not None
    assert task.rates[0] == 1e-30
    assert max(task.rates) == pytest.approx(math.exp(found.top))
    assert task.rates[-1] < 2e-4 * max(task.rates)
    assert math.isfinite(task.linear.weight.abs().max().item())


def test_groups_keep_their_ratio():
    task = fit(Task(ratios=(1.0, 0.1)))
    first, second = task.optimizers().param_groups
    assert second["lr"] == pytest.approx(0.1 * first["lr"])


def test_accumulated_batches_are_one_step():
    parts, whole = Task(), Task()
    fit(parts, SoftmaxData(batch_size=4), accumulate_grad_batches=2)
    fit(whole, SoftmaxData(batch_size=8))
    assert len(parts.rates) == 2 * len(whole.rates)
    assert parts.lr_schedulers().found.progress == whole.lr_schedulers().found.progress == 1.0
    assert parts.lr_schedulers().last_epoch == whole.lr_schedulers().last_epoch


@pytest.mark.parametrize("step", [1, 7, 60])
def test_resumed_it_is_the_same_run(tmp_path, step):
    """Before the rate is at its top, and after."""
    assert_resumed_is_the_same(lambda: (Task(), SoftmaxData()), tmp_path, step, 40)


def of_two(rank):
    task = Task()
    ddp_trainer(2, max_epochs=12).fit(task, datamodule=SoftmaxData(batch_size=4))
    return task.rates, task.linear.weight.detach()


def test_processes_find_the_same_rate():
    whole = fit(Task(), SoftmaxData(batch_size=8), max_epochs=12)
    results = under_trainers(of_two, 2)
    for rates, weight in results:
        assert rates == results[0][0]
        assert rates == pytest.approx(whole.rates, rel=1e-3)
        assert torch.allclose(weight, whole.linear.weight, rtol=1e-3, atol=1e-4)


def test_gradient_steps_tell_of_no_rate():
    task = Task()
    task.weight_step = "gradient"
    with pytest.raises(InputError, match=r"needs proximal steps.*got weight_step 'gradient' and SGD"):
        fit(task)
    with pytest.raises(InputError, match=r"needs proximal steps.*got weight_step 'proximal' and AdamW"):
        fit(Task(kind="AdamW"))


def test_a_run_without_an_end():
    with pytest.raises(InputError, match="a learning rate that is found needs to know how long the run is: set"):
        fit(Task(), max_epochs=-1)


def test_a_loss_without_dual_variables_is_told():
    class Plain(Task):
        def training_step(self, batch, batch_idx):
            inputs, labels, _ = batch
            return torch.nn.functional.cross_entropy(self.linear(inputs), labels)

    with pytest.raises(InputError, match="no learning rate was found: in 4 % of the run no loss with a gradient was"):
        fit(Plain())


# -------------------------------------------------------------------- the tasks


class Rows(L.LightningDataModule):
    """A linear model with noise and one far row; ``unit`` is that of the features."""

    num_features, num_anchors = 3, 400

    def __init__(self, unit=1.0):
        super().__init__()
        generator = torch.Generator().manual_seed(0)
        self.features = torch.randn(400, 3, generator=generator)
        self.target = self.features.sum(dim=1) + 0.1 * torch.randn(400, generator=generator)
        self.target[7] += 6.0
        self.unit = unit

    def train_dataloader(self):
        rows = torch.utils.data.TensorDataset(self.features * self.unit, self.target, torch.arange(400))
        return torch.utils.data.DataLoader(rows, batch_size=20, shuffle=True)

    def gap(self, weights):
        """What is left of the gap between zeros and the optimum."""

        def risk(weights):
            weights = torch.as_tensor(weights).double()
            return torch.logsumexp((self.features.double() @ weights - self.target.double()).square(), dim=0).item()

        start = [0.0] * 3
        least = scipy.optimize.minimize(risk, start, method="Powell").fun
        return (risk(self.unit * weights) - least) / (risk(start) - least)


@pytest.mark.parametrize("unit", [1e-3, 1e3])
def test_regression_in_any_unit(unit):
    """Without an intercept, which would have a unit of its own."""
    L.seed_everything(0, verbose=False)
    network = torch.nn.Linear(3, 1, bias=False)
    torch.nn.init.zeros_(network.weight)
    data, task = Rows(unit), DRORegressionTask(3, SCENT(), network=network, lr="auto")
    quiet_trainer(max_epochs=40, limit_val_batches=0).fit(task, data)
    assert data.gap(network.weight.detach().flatten()) < 0.05
    assert task.hparams["lr"] == "auto"


MAKE = {
    "regression": lambda **given: DRORegressionTask(3, SCENT(), **given),
    "partial AUC": lambda **given: PartialAUCTask(4, SCENT(), 3, **given),
    "classification": lambda **given: ExtremeClassificationTask(3, 7, 4, SCENT(), **given),
    "ranking": lambda **given: RankingTask(3, 4, SCENT(), **given),
}


@pytest.mark.parametrize("name", MAKE)
@pytest.mark.parametrize(
    ("more", "said"),
    [
        ({"lr": "automatic"}, "lr must be one of auto, got 'automatic'"),
        (
            {"weight_step": "gradient"},
            "lr 'auto' needs the proximal steps of SGD, which say how large a rate may be; got weight_step 'gradient'",
        ),
        (
            {"optimizer": torch.optim.AdamW},
            "lr 'auto' needs the proximal steps of SGD, which say how large a rate may be; got another optimizer",
        ),
        (
            {"lr_schedule": "cosine"},
            "lr 'auto' rises and falls by a rule of its own: leave lr_schedule out, got 'cosine'",
        ),
        ({"warmup_epochs": 1.0}, "lr 'auto' rises and falls by a rule of its own: leave warmup_epochs out, got 1.0"),
    ],
)
def test_what_does_not_go_together(name, more, said):
    with pytest.raises(InputError) as caught:
        MAKE[name](**{"lr": "auto", **more})
    assert str(caught.value) == said


def test_cross_entropy_has_no_dual_variables():
    with pytest.raises(
        InputError, match="lr 'auto' needs loss 'partial_auc', which has dual variables; got 'cross_ent"
    ):
        PartialAUCTask(4, SCENT(), 3, loss="cross_entropy", lr="auto")


def test_the_rate_is_in_the_log(tmp_path):
    task = DRORegressionTask(3, SCENT(), initial="zeros", lr="auto")
    logger = CSVLogger(tmp_path)
    trainer = quiet_trainer(
        max_epochs=10, limit_val_batches=0, logger=logger, log_every_n_steps=1, callbacks=[LearningRateMonitor()]
    )
    trainer.fit(task, Rows())
    found = trainer.lr_scheduler_configs[0].scheduler.found
    logged = pd.read_csv(f"{logger.log_dir}/metrics.csv")["lr-IncreasingMomentumSGD"].dropna()
    assert logged.max() == pytest.approx(math.exp(found.top))
