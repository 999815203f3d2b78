"""The proximal step for the weights: against its formula, and the same however a run is cut into parts."""

import copy
import math
import pickle
import weakref
from pathlib import Path

import lightning as L
import pandas as pd
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from lightning.pytorch.callbacks import ModelCheckpoint
from lightning.pytorch.loggers import CSVLogger
from lightning.pytorch.plugins import MixedPrecision
from lightning.pytorch.strategies import FSDPStrategy, ModelParallelStrategy
from torch.nn import functional as F
from torch.nn.functional import softplus

from scent_lightning.callbacks import DualVariableMonitor
from scent_lightning.duals import ASGD, BSGD, SCENT, SOX, DenseScores, DualVariableMixin, SoftplusASGD, UMax
from scent_lightning.duals.weight_step import ExponentialPart, check_training, proximal_gradients
from scent_lightning.errors import InputError
from scent_lightning.functional import proximal_scale
from scent_lightning.optim import RowSparseSGD
from scent_lightning.progress import run_progress
from tests.helpers import SoftmaxData, SoftmaxTask, ddp_trainer, quiet_trainer, under_trainers
from tests.settings import SETTINGS, contrastive

UPDATES = [SCENT(-2.0), BSGD(), SOX(0.3), ASGD(0.1), UMax(0.1, 1.0), SoftplusASGD(0.1, 0.5)]

# Arguments that are objects and not in the hyperparameters.
UNSAVED = {"classification": {"backbone": torch.nn.Linear(6, 6)}}


def expected_scale(gradients, rates, exponential):
    squares = sum(rate * (g.double() ** 2).sum().item() for g, rate in zip(gradients, rates, strict=True))
    return proximal_scale(torch.tensor(squares / exponential, dtype=torch.float64)).item()


class Two(DualVariableMixin, L.LightningModule):
    """Two duals of one network, their risks with factors of their own, and a penalty; ``parts`` keeps its cE."""

    weight_step = "proximal"

    def __init__(self, update, factors=(0.7, 3.0), penalty=0.1):
        super().__init__()
        torch.manual_seed(0)
        self.linear = torch.nn.Linear(4, 5)
        self.factors, self.penalty = factors, penalty
        self.add_dual("first", 9, update)
        self.add_dual("second", 9, update)

    def loss(self, inputs, index, mask):
        scores = 3 * self.linear(inputs)
        self.parts = []
        loss = self.penalty * self.linear.weight.square().sum()
        for name, factor, values in zip(self.duals, self.factors, (scores, -2 * scores), strict=True):
            risk = self.entropic_risk(name, values, index, mask)
            loss = loss + factor * risk
            exponents = values.detach().double() - self.duals[name].nu[index].double().unsqueeze(1)
            rho = getattr(self.duals[name].update, "rho", None)
            each = exponents.exp() if rho is None else softplus(exponents + math.log(rho)) / rho
            # Rows have as many samples each, or none: an anchor's mean is that of its rows.
            rows = (each * mask).sum(1)[mask.any(1)] / 3
            repeats = torch.bincount(index[mask.any(1)])[index[mask.any(1)]]
            self.parts.append(factor * ((rows / repeats).sum() / len(index[mask.any(1)].unique())).item())
        return loss


@pytest.mark.parametrize("update", UPDATES, ids=lambda update: type(update).__name__)
@pytest.mark.parametrize("repeats", [False, True])
def test_the_scale_is_that_of_the_formula(update, repeats):
    """Several duals with their factors, repeated anchors, a row without samples, groups with their own rates."""
    module = Two(update).double()
    optimizer = torch.optim.SGD(
        [{"params": [module.linear.weight], "lr": 2.0}, {"params": [module.linear.bias], "lr": 0.3}]
    )
    generator = torch.Generator().manual_seed(1)
    for _ in range(4):
        index = torch.tensor([1, 4, 1, 6, 4]) if repeats else torch.randperm(9, generator=generator)[:5]
        mask = torch.rand(5, 5, generator=generator).argsort(1) < 3
        mask[3] = False
        loss = module.loss(4 * torch.randn(5, 4, generator=generator, dtype=torch.float64), index, mask)
        optimizer.zero_grad()
        loss.backward()
        gradients = [p.grad.clone() for p in module.linear.parameters()]
        module.shape_gradients(optimizer)
        scale = expected_scale(gradients, [2.0, 0.3], sum(module.parts))
        assert module.last_weight_step.scale == pytest.approx(scale, rel=1e-6)
        assert math.exp(-module.last_weight_step.decrease) == pytest.approx(scale, rel=2e-5)
        for parameter, gradient in zip(module.linear.parameters(), gradients, strict=True):
            assert torch.allclose(parameter.grad, scale * gradient, rtol=1e-4)
        optimizer.step()


def test_only_what_the_loss_takes_counts():
    """A risk that is only looked at, one of evaluation, and one of a batch whose step is over."""
    module = Two(SCENT(0.0), factors=(1.0, 0.0), penalty=0.0)
    optimizer = torch.optim.SGD(module.parameters(), lr=1.0)
    inputs, index, mask = torch.randn(3, 4), torch.arange(3), torch.rand(3, 5).argsort(1) < 3
    for _ in range(2):
        optimizer.zero_grad()
        loss = module.loss(inputs, index, mask)
        module.entropic_risk("second", module.linear(inputs), index)
        with torch.no_grad():
            module.entropic_risk("first", module.linear(inputs), index)
        loss.backward()
        gradients = [p.grad.clone() for p in module.parameters()]
        module.shape_gradients(optimizer)
        assert module.last_weight_step.scale == pytest.approx(
            expected_scale(gradients, [1.0, 1.0], module.parts[0]), rel=1e-5
        )


@settings(deadline=None)
@given(st.floats(-30, 30), st.floats(-80, 80), st.sampled_from([torch.float32, torch.float64]), st.integers(1, 3))
def test_gradients_of_any_size(log10_norm, log_part, dtype, parts):
    generator = torch.Generator().manual_seed(parts)
    parameters = [torch.nn.Parameter(torch.zeros(3, dtype=dtype)) for _ in range(parts)]
    gradients = [torch.randn(3, generator=generator, dtype=torch.float64) for _ in range(parts)]
    for parameter, gradient in zip(parameters, gradients, strict=True):
        parameter.grad = (gradient * 10**log10_norm).to(dtype)
    optimizer = torch.optim.SGD(parameters, lr=0.5)
    before = [p.grad.double().clone() for p in parameters]
    step = proximal_gradients(optimizer, math.exp(log_part))
    log_a = math.log(0.5) + torch.cat(before).div(10**log10_norm).norm().log().item() * 2
    log_a += 2 * log10_norm * math.log(10) - log_part
    log_a = torch.tensor(log_a, dtype=torch.float64)
    assert step.scale == pytest.approx(proximal_scale(log_a, from_log=True).item(), rel=1e-4)
    for parameter, gradient in zip(parameters, before, strict=True):
        assert torch.allclose(parameter.grad.double(), gradient * step.scale, rtol=1e-4, atol=1e-44)


def test_half_precision_does_not_overflow():
    parameter = torch.nn.Parameter(torch.zeros(1000, dtype=torch.float16))
    parameter.grad = torch.full((1000,), 1e4, dtype=torch.float16)
    step = proximal_gradients(torch.optim.SGD([parameter], lr=1.0), 1.0)
    assert step.decrease == pytest.approx(math.log(1e11 / 22.2), abs=0.1)
    assert (parameter.grad > 0).all()


@pytest.mark.parametrize("coalesced", [False, True])
def test_rows_of_a_sparse_gradient_are_summed_first(coalesced):
    weight = torch.nn.Parameter(torch.ones(6, 2))
    other = torch.nn.Parameter(torch.ones(2))
    rows = torch.tensor([[1, 4, 1, 5] if not coalesced else [1, 4, 5]])
    values = torch.arange(2.0 * rows.shape[1]).reshape(-1, 2)
    weight.grad = torch.sparse_coo_tensor(rows, values, (6, 2), check_invariants=False)
    other.grad = torch.tensor([1.0, -2.0])
    dense = weight.grad.to_dense()
    step = proximal_gradients(RowSparseSGD([weight, other], lr=0.1), 2.0)
    assert step.scale == pytest.approx(expected_scale([dense, torch.tensor([1.0, -2.0])], [0.1] * 2, 2.0), rel=1e-6)
    assert torch.allclose(weight.grad.to_dense(), dense * step.scale)
    assert torch.allclose(other.grad, torch.tensor([1.0, -2.0]) * step.scale)


def test_what_is_left_alone():
    parameter = torch.nn.Parameter(torch.zeros(2))
    optimizer = torch.optim.SGD([parameter], lr=0.1)
    assert proximal_gradients(optimizer, 1.0) is None
    for gradient, exponential in (
        ([1.0, math.nan], 1.0),
        ([1.0, -math.inf], 1.0),
        ([1.0, 2.0], 0.0),
        ([1.0, 2.0], -1.0),
        ([1.0, 2.0], math.nan),
        ([1.0, 2.0], math.inf),
    ):
        parameter.grad = torch.tensor(gradient)
        assert proximal_gradients(optimizer, exponential) is None
        assert torch.equal(parameter.grad, torch.tensor(gradient)) or gradient[1] != gradient[1]
    parameter.grad = torch.zeros(2)
    assert proximal_gradients(optimizer, 1.0) == (0.0, 1.0)
    optimizer.param_groups[0]["lr"] = 0.0  # as at the end of a schedule
    parameter.grad = torch.ones(2)
    assert proximal_gradients(optimizer, 1.0) == (0.0, 1.0)


@pytest.mark.parametrize("rate", [-0.1, math.nan, None, "fast", True])
def test_a_rate_that_cannot_be_is_told(rate):
    parameter = torch.nn.Parameter(torch.zeros(2))
    parameter.grad = torch.ones(2)
    optimizer = torch.optim.SGD([parameter], lr=0.1)
    optimizer.param_groups[0]["lr"] = rate
    with pytest.raises(InputError, match=rf"weight_step 'proximal' needs .*learning rate.*SGD has {rate!r}"):
        proximal_gradients(optimizer, 1.0)
    del optimizer.param_groups[0]["lr"]
    with pytest.raises(InputError, match="SGD has None under 'lr'"):
        proximal_gradients(optimizer, 1.0)


# -------------------------------------------------------------------- under a Trainer


class Task(SoftmaxTask):
    """Keeps the scale of each step, and may have another optimiser or precision's factor."""

    weight_step = "proximal"

    def __init__(self, lr=30.0, update=None, optimizer=None):
        torch.manual_seed(3)
        super().__init__(24, update or SCENT(-1.0), lr)
        self.optimizer = optimizer
        self.scales = []

    def training_step(self, batch, batch_idx):
        return 2.0 * super().training_step(batch, batch_idx)

    def optimizer_step(self, *arguments, **keywords):
        super().optimizer_step(*arguments, **keywords)
        self.scales.append(None if self.last_weight_step is None else self.last_weight_step.scale)

    def configure_optimizers(self):
        return super().configure_optimizers() if self.optimizer is None else self.optimizer(self.parameters())


def fit(task=None, data=None, ckpt_path=None, **arguments):
    task = task or Task()
    trainer = quiet_trainer(**{"max_epochs": 2, **arguments})
    trainer.fit(task, datamodule=data or SoftmaxData(), ckpt_path=ckpt_path)
    return task


def test_a_fit_is_the_plain_loop():
    task, other = fit(), Task()
    data, optimizer = SoftmaxData(), torch.optim.SGD(other.parameters(), lr=30.0, momentum=0.9)
    loader = data.train_dataloader()
    scales = []
    for epoch in range(2):
        loader.sampler.set_epoch(epoch)
        for batch in loader:
            optimizer.zero_grad()
            other.training_step(batch, 0).backward()
            other.shape_gradients(optimizer)
            scales.append(other.last_weight_step.scale)
            optimizer.step()
    assert task.scales == scales
    assert min(scales) < 0.9
    assert torch.equal(task.linear.weight, other.linear.weight)


def test_accumulation_is_one_large_batch():
    """With BSGD ν of a row does not depend on what else is in the batch."""
    update = BSGD()
    parts = fit(Task(update=update), SoftmaxData(batch_size=4), accumulate_grad_batches=2)
    whole = fit(Task(update=update), SoftmaxData(batch_size=8))
    assert parts.scales == pytest.approx(whole.scales, rel=1e-4)
    assert torch.allclose(parts.linear.weight, whole.linear.weight, rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("factor", [2.0**10, 2.0**-6])
def test_a_gradient_scaler_changes_nothing(factor):
    class Exact(MixedPrecision):
        """Scales and unscales as mixed precision does, and leaves the forward pass as it is."""

        def autocast_context_manager(self):
            return torch.autocast("cpu", enabled=False)

    scaler = torch.amp.GradScaler("cpu", init_scale=factor)
    scaled = fit(plugins=[Exact("16-mixed", "cpu", scaler)])
    assert scaled.scales == pytest.approx(fit().scales, rel=1e-6)


def test_resumed_within_an_accumulated_step_is_the_same_run(tmp_path):
    data = {"data": SoftmaxData(batch_size=4), "accumulate_grad_batches": 4, "max_epochs": 3}
    writer = ModelCheckpoint(tmp_path, "{epoch}-{step}", save_top_k=-1, every_n_train_steps=1)

    class Writing(Task):
        def on_train_batch_end(self, outputs, batch, batch_idx):
            self.trainer.save_checkpoint(tmp_path / f"{self.current_epoch}-{batch_idx}.ckpt")

    whole = fit(Writing(), **data, enable_checkpointing=True, callbacks=[writer])
    for place in ("0-1", "1-2", "1-3", "2-4"):
        resumed = fit(ckpt_path=tmp_path / f"{place}.ckpt", **data)
        assert torch.equal(resumed.linear.weight, whole.linear.weight), place
        assert resumed.scales == whole.scales[-len(resumed.scales) :]


def of_processes(world, batch_size):
    def work(rank):
        task = Task(lr=3.0)
        ddp_trainer(world, max_epochs=2).fit(task, datamodule=SoftmaxData(batch_size=batch_size))
        return task.scales, task.linear.weight.detach()

    return work


def two(rank):
    return of_processes(2, 4)(rank)


def four(rank):
    return of_processes(4, 2)(rank)


@pytest.mark.parametrize(("work", "world"), [(two, 2), (four, 4)])
def test_processes_are_one_batch(work, world):
    whole = fit(Task(lr=3.0), SoftmaxData(batch_size=8))
    results = under_trainers(work, world)
    for scales, weight in results:
        assert scales == results[0][0], "all processes take the same step"
        assert scales == pytest.approx(whole.scales, rel=1e-5)
        assert torch.allclose(weight, whole.linear.weight, rtol=1e-5, atol=1e-5)


def test_clipping_comes_after():
    task = fit(gradient_clip_val=1e-3)
    free = fit(max_steps=1)
    assert task.scales[0] == free.scales[0]


@pytest.mark.parametrize("kind", [torch.optim.AdamW, torch.optim.Adagrad, torch.optim.RMSprop])
def test_other_optimisers_are_left_alone(kind):
    def optimizer(parameters):
        return kind(parameters, lr=0.01)

    task = fit(Task(optimizer=optimizer))
    assert set(task.scales) == {None}
    plain = Task(optimizer=optimizer)
    plain.weight_step = "gradient"
    assert torch.equal(task.linear.weight, fit(plain).linear.weight)


@pytest.mark.parametrize("word", ["prox", "", None, 1])
def test_another_word_is_told(word):
    task = Task()
    task.weight_step = word
    with pytest.raises(InputError, match="weight_step must be one of proximal, gradient, got"):
        fit(task)
    with pytest.raises(InputError, match="weight_step must be one of proximal, gradient, got"):
        task.entropic_risk("nu", torch.zeros(1, 4), torch.zeros(1, dtype=torch.int64))


def test_a_rate_of_0_is_told_as_training_starts():
    for rate in (0.0, torch.tensor(0.0)):
        with pytest.raises(InputError, match="needs learning rates above 0, and SGD has 0"):
            fit(Task(optimizer=lambda parameters, rate=rate: torch.optim.SGD(parameters, lr=rate)))


def test_a_warm_up_from_0_is_no_error():
    class Warm(Task):
        def configure_optimizers(self):
            optimizer = super().configure_optimizers()
            schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: step / 6)
            return {"optimizer": optimizer, "lr_scheduler": {"scheduler": schedule, "interval": "step"}}

    scales = fit(Warm()).scales
    assert scales[0] == 1.0 > scales[1]


@pytest.mark.parametrize("lr", [1.0, 1e3, 1e6])
def test_no_learning_rate_diverges(lr):
    task = fit(Task(lr=lr, update=SCENT(-4.0)), max_epochs=30)
    assert torch.isfinite(task.linear.weight).all()


class Own(DualVariableMixin, L.LightningModule):
    """A linear softmax whose scores have a column for the own class, which is 0 whatever the weights are."""

    weight_step = "proximal"

    def __init__(self, update, told, rows=40, classes=5):
        super().__init__()
        self.told = told
        generator = torch.Generator().manual_seed(0)
        self.features = torch.randn(rows, 3, generator=generator)
        self.labels = torch.randint(classes, (rows,), generator=generator)
        self.linear = torch.nn.Linear(3, classes, bias=False)
        torch.nn.init.zeros_(self.linear.weight)
        self.add_dual("nu", rows, update)
        self.found = []

    def train_dataloader(self):
        return torch.utils.data.DataLoader(range(len(self.features)), batch_size=8)

    def training_step(self, index, batch_idx):
        own = F.one_hot(self.labels[index], self.linear.out_features).bool()
        logits = self.linear(self.features[index])
        scores = logits - logits[own].unsqueeze(1)
        mask = torch.ones_like(own)
        mask[0, :2] = own[0, :2]  # a row of fewer samples
        loss = self.entropic_risk("nu", scores, index, mask, fixed=own if self.told else None)
        self.scored = scores.detach().double(), mask, own, index
        return 3.0 * loss

    def on_before_optimizer_step(self, optimizer):
        (gradient,) = [p.grad.clone() for p in self.parameters()]
        super().on_before_optimizer_step(optimizer)
        scores, mask, own, index = self.scored
        counts = mask & ~own if self.told else mask
        weights = (scores - self.duals["nu"].nu[index].double().unsqueeze(1)).exp() * counts
        part = 3.0 * (weights.sum(dim=1) / mask.sum(dim=1)).mean().item()
        rate = optimizer.param_groups[0]["lr"]
        if isinstance(self.duals["nu"].update, SCENT):
            assert self.last_weight_step.scale == pytest.approx(expected_scale([gradient], [rate], part), rel=1e-4)
        self.found.append(self.last_weight_step.scale)

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=5.0)


@pytest.mark.parametrize("update", [SCENT(0.0), SoftplusASGD(0.1, rho=1e-9)], ids=repr)
def test_samples_that_no_weight_moves_are_no_part_of_the_exponential(update):
    """The loss and ν of a step are the same, the step is shorter: in the first, from 0, by four classes of five."""
    found = {}
    for told in (False, True):
        found[told] = Own(copy.deepcopy(update), told)
        quiet_trainer(max_steps=1).fit(found[told])
    assert torch.equal(found[True].duals["nu"].nu, found[False].duals["nu"].nu)
    assert found[True].found[0] < found[False].found[0] < 1
    moved = Own(copy.deepcopy(update), True)
    quiet_trainer(max_epochs=4).fit(moved)
    assert len(moved.found) == 20


def test_with_tiny_rho_softplus_takes_the_exponentials_step():
    ends = [Own(update, True) for update in (ASGD(0.1), SoftplusASGD(0.1, rho=1e-9))]
    for module in ends:
        quiet_trainer(max_epochs=2).fit(module)
    assert ends[0].found == pytest.approx(ends[1].found, rel=1e-3)


@pytest.mark.parametrize(
    ("fixed", "message"),
    [
        (torch.ones(3, 4), "fixed of dual variable 'nu' must be bool and broadcast to the shape of the scores"),
        (torch.ones(2, 4, dtype=torch.bool), r"\(3, 4\), got torch.bool of shape \(2, 4\)"),
        (torch.ones(1, 3, 4, dtype=torch.bool), r"got torch.bool of shape \(1, 3, 4\)"),
        ([True], r"got \[True\]"),
    ],
)
def test_what_is_fixed_must_fit(fixed, message):
    module = Own(SCENT(0.0), True)
    with pytest.raises(ValueError, match=message):
        module.entropic_risk("nu", torch.zeros(3, 4), torch.arange(3), fixed=fixed)
    assert not module.duals["nu"].visited.any()
    with pytest.raises(InputError, match="fixed goes with a tensor of scores; DenseScores says itself which samples"):
        module.entropic_risk("nu", DenseScores(torch.zeros(3, 4)), torch.arange(3), fixed=torch.tensor(True))


@pytest.mark.parametrize("kind", ["regression", "classification", "ranking"])
def test_every_task_takes_it(tmp_path, kind):
    """The scale is that of the loss that is differentiated; the word is in the checkpoint."""
    task, data = SETTINGS[kind](tmp_path, 16)
    again = type(task)(**{**task.hparams, **UNSAVED.get(kind, {}), "weight_step": "proximal"})
    assert again.weight_step == "proximal" == again.hparams["weight_step"]
    seen = []

    class Look(L.Callback):
        def on_before_optimizer_step(self, trainer, module, optimizer):
            rate = optimizer.param_groups[0]["lr"]
            gradients = [p.grad.to_dense() for p in module.parameters() if p.grad is not None]
            step = module.duals["nu"].last_step
            parts = step.log_mean.exp()
            if kind == "classification":  # less the own class, which no weight moves
                rarity = module.head.frequencies.rarity(module._labels_here).double()
                powers = 1 + 3 * (1 - run_progress(trainer)) * rarity
                parts = parts - (module.head.num_classes - 1) ** -powers
            parts = (parts * (-step.nu.double()).exp())[step.log_mean > -math.inf]
            tau = getattr(module, "tau", 1.0) if kind != "classification" else 1.0
            seen.append(expected_scale(gradients, [rate] * len(gradients), tau * parts.mean().item()))

        def on_train_batch_end(self, trainer, module, *arguments):
            assert module.last_weight_step.scale == pytest.approx(seen[-1], rel=1e-5)

    quiet_trainer(max_steps=6, callbacks=[Look()]).fit(again, datamodule=data)
    assert len(seen) == 6
    with pytest.raises(InputError, match="weight_step must be one of proximal, gradient, got 'newton'"):
        type(task)(**{**task.hparams, **UNSAVED.get(kind, {}), "weight_step": "newton"})


def test_clip_is_the_same_with_it(tmp_path):
    weights = []
    for word in ("gradient", "proximal"):
        torch.manual_seed(0)
        task, data = contrastive(tmp_path, 16)
        task.weight_step = word
        quiet_trainer(max_steps=3).fit(task, datamodule=data)
        weights.append(torch.cat([p.detach().flatten() for p in task.parameters()]))
    assert torch.equal(*weights)


def test_the_monitor_logs_it(tmp_path):
    task = Task()
    logger = CSVLogger(tmp_path)
    fit(task, logger=logger, log_every_n_steps=2, callbacks=[DualVariableMonitor()])
    logged = pd.read_csv(Path(logger.log_dir) / "metrics.csv").dropna(subset="weights/scale")
    assert logged["step"].tolist() == [1, 3, 5]
    assert logged["weights/scale"].tolist() == pytest.approx(task.scales[1::2])
    assert logged["weights/decrease"].tolist() == pytest.approx([-math.log(scale) for scale in task.scales[1::2]])


@pytest.mark.parametrize("kind", [FSDPStrategy, ModelParallelStrategy])
def test_shared_parameters_are_told(kind):
    trainer = quiet_trainer()
    trainer._accelerator_connector.strategy = kind()
    parameters = [torch.nn.Parameter(torch.zeros(2))]
    trainer.strategy.optimizers = [torch.optim.AdamW(parameters)]
    check_training(trainer)
    trainer.strategy.optimizers = [torch.optim.SGD(parameters, lr=0.1)]
    with pytest.raises(InputError, match=f"needs whole gradients in each process, and {kind.__name__} shares them"):
        check_training(trainer)


@pytest.mark.parametrize(("processes", "expected"), [(2, [3.0, 1.0]), (1, [2.0]), (3, [2.0] * 3)])
def test_a_sum_goes_on_with_any_number_of_processes(processes, expected):
    """The mean over the processes is what counts, and is the same."""
    saved = torch.tensor([3.0, 1.0], dtype=torch.float64)
    for rank in range(processes):
        part = ExponentialPart()
        part.restore(saved, rank, processes, scale=0.5)
        assert part.take() == expected[rank] * 0.5
        assert part.state() is None, "a step was taken"


def test_a_risk_that_is_dropped_is_forgotten():
    """Nothing holds the graph of a loss that nobody differentiates; and a module can be copied after a step."""
    module = Two(SCENT(0.0))
    batch = torch.randn(3, 4), torch.arange(3), torch.rand(3, 5).argsort(1) < 3
    scores = module.linear(batch[0])
    risk = module.entropic_risk("first", scores, batch[1])
    held = weakref.ref(scores)
    del scores, risk
    assert held() is None
    module.loss(*batch).backward()
    for other in (copy.deepcopy(module), pickle.loads(pickle.dumps(module))):
        assert other._exponential_part.take() == module._exponential_part.take() > 0.0


@pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU")
@pytest.mark.parametrize("precision", ["32-true", "16-mixed", "bf16-mixed", "64-true"])
@pytest.mark.parametrize("fused", [False, True])
def test_on_a_gpu_it_is_the_same(precision, fused):
    """Also where a fused optimiser divides by the gradient scaler's factor within its step."""
    scales = []
    for accelerator in ("cpu", "gpu"):
        task = Task(lr=3.0, optimizer=lambda parameters: torch.optim.SGD(parameters, lr=3.0, fused=fused))
        fit(task, accelerator=accelerator, precision=precision if accelerator == "gpu" else "64-true", max_epochs=1)
        scales.append(task.scales)
    assert scales[1] == pytest.approx(scales[0], rel=0.1 if "mixed" in precision else 1e-4)
