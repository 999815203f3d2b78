"""MSVR: the scores at the weights before the last optimiser step, whatever a Trainer does."""

import math
from functools import partial

import lightning as L
import pytest
import torch
from lightning.pytorch.callbacks import Callback
from lightning.pytorch.strategies import FSDPStrategy, ModelParallelStrategy
from torch import nn

from scent_lightning.duals import MSVR, SOX, DenseScores, DualDivergenceError, DualVariable
from scent_lightning.duals.previous import PreviousWeightsMixin
from scent_lightning.errors import InputError
from scent_lightning.functional import log_mean_exp, msvr_step
from scent_lightning.optim import RowSparseSGD
from scent_lightning.tasks import DRORegressionTask, ExtremeClassificationTask
from tests.helpers import SoftmaxData, SoftmaxTask, in_two_processes, quiet_trainer
from tests.settings import SETTINGS, classification, moved_by


class Following(SoftmaxTask):
    """Several rows may have one anchor: those of the same number by ``anchors``."""

    def __init__(self, num_anchors, dual, anchors):
        super().__init__(num_anchors, dual, lr=0.05)
        self.anchors = anchors

    def scores(self, batch):
        features, labels, _ = batch
        logits = self.linear(features)
        return logits - logits.gather(1, labels.unsqueeze(1))

    def training_step(self, batch, batch_idx):
        previous = self.at_previous_weights(lambda: self.scores(batch))
        return self.entropic_risk("nu", self.scores(batch), batch[2] % self.anchors, previous_scores=previous)


class Oracle(Callback):
    """ν worked out from copies of the weights, each batch for itself."""

    def __init__(self, gamma, beta):
        self.gamma, self.beta = gamma, beta
        self.nu, self.moved, self.step, self.now, self.before = {}, set(), 0, None, None

    def on_train_batch_start(self, trainer, task, batch, batch_idx):
        if trainer.global_step > self.step or self.now is None:
            self.step, self.before, self.moved = trainer.global_step, self.now, set()
        self.now = {name: value.detach().clone() for name, value in task.named_parameters()}
        index = batch[2] % task.anchors

        def log_means(weights):
            logits = batch[0].double() @ weights["linear.weight"].double().T + weights["linear.bias"].double()
            scores = logits - logits.gather(1, batch[1].unsqueeze(1))
            return {i: log_mean_exp(scores[index == i].reshape(1, -1)) for i in index.tolist()}

        now = log_means(self.now)
        before = now if self.before is None else log_means(self.before)
        for i, new in now.items():
            if i not in self.nu:
                self.nu[i] = new
            else:
                old = new if i in self.moved else before[i]
                self.nu[i] = msvr_step(self.nu[i].float(), new, old, self.gamma, self.beta, 0.1)
            self.moved.add(i)


@pytest.mark.parametrize("accumulate", [1, 2, 3])
@pytest.mark.parametrize("anchors", [24, 4, 1])
def test_nu_is_that_of_the_formula(anchors, accumulate):
    """With an anchor in one row, in several of a batch and of an optimiser step, and with one anchor for all."""
    L.seed_everything(0, verbose=False)
    data, oracle = SoftmaxData(batch_size=5), Oracle(0.3, 0.7)
    task = Following(anchors, MSVR(0.3, 0.7), anchors)
    quiet_trainer(max_epochs=4, limit_val_batches=0, accumulate_grad_batches=accumulate, callbacks=[oracle]).fit(
        task, data
    )
    assert oracle.before is not None
    expected = torch.cat([oracle.nu[i] for i in range(anchors)])
    torch.testing.assert_close(task.duals["nu"].nu.double(), expected, rtol=1e-5, atol=1e-5)


class Copies(Callback):
    """Copies of the weights before each optimiser step, held against those that the task has kept."""

    def __init__(self):
        self.before, self.compared = None, 0

    def on_before_optimizer_step(self, trainer, task, optimizer):
        self.before = {name: value.detach().clone() for name, value in task.named_parameters()}

    def on_train_batch_start(self, trainer, task, batch, batch_idx):
        if self.before is None:
            return
        now = {name: value.detach().clone() for name, value in task.named_parameters()}
        with task._previous_weights.installed():
            for name, value in task.named_parameters():
                if value.requires_grad:
                    assert torch.equal(value, self.before[name]), name
        for name, value in task.named_parameters():
            assert torch.equal(value, now[name]), name
        self.compared += 1


OPTIMIZERS = {
    "RowSparseSGD": None,
    "momentum": partial(torch.optim.SGD, lr=0.1, momentum=0.5),
    "SGD": partial(torch.optim.SGD, lr=0.1),
    "SparseAdam": partial(torch.optim.SparseAdam, lr=0.1),
    "Adagrad": partial(torch.optim.Adagrad, lr=0.1),
}


@pytest.mark.parametrize("name", [*SETTINGS, *OPTIMIZERS])
def test_the_weights_that_are_kept(name, tmp_path):
    L.seed_everything(0, verbose=False)
    setting = SETTINGS.get(name, classification)
    task, data = moved_by(MSVR(0.5, 0.5), setting)(tmp_path, 16)
    if name in OPTIMIZERS:
        arguments = {"optimizer": OPTIMIZERS[name], "lr": 0.1, "momentum": 0.5}
        task = ExtremeClassificationTask(6, 12, data.num_anchors, MSVR(0.5, 0.5), **arguments)
    copies = Copies()
    quiet_trainer(max_epochs=2, limit_val_batches=0, callbacks=[copies]).fit(task, datamodule=data)
    assert copies.compared >= 5
    kept = task._previous_weights.state(task)["weights"]
    if name in OPTIMIZERS:
        assert isinstance(kept["head.weight"], dict) == (name != "momentum")


def network():
    return nn.Sequential(nn.Linear(10, 8), nn.BatchNorm1d(8), nn.Tanh(), nn.Dropout(0.3), nn.Linear(8, 1))


@pytest.mark.parametrize("precision", ["32-true", "bf16-mixed", "64-true"])
def test_the_second_pass_leaves_no_trace(precision, tmp_path):
    """Without a correction it is SOX, bit for bit: dropout's draws, batch norm's statistics, autocast's copies."""
    ends = []
    for update in (SOX(0.4), MSVR(0.4, 0.0), MSVR(0.4, 0.5)):
        L.seed_everything(0, verbose=False)
        _, data = SETTINGS["regression"](tmp_path, 16)
        task = DRORegressionTask(10, update, tau=2.0, lr=1e-2, network=network())
        quiet_trainer(max_epochs=2, limit_val_batches=0, precision=precision).fit(task, datamodule=data)
        ends.append({name: value.clone() for name, value in task.state_dict().items()})
    sox, without, corrected = ends
    assert all(torch.equal(sox[name], without[name]) for name in sox)
    assert not torch.equal(sox["duals.nu.nu"], corrected["duals.nu.nu"])


def test_the_same_draws_in_both_passes():
    """With weights that do not move, dropout's draws are all that could differ."""
    data = SoftmaxData()

    class Dropped(Following):
        def scores(self, batch):
            return nn.functional.dropout(super().scores(batch), 0.5)

        def training_step(self, batch, batch_idx):
            self.found = self.at_previous_weights(lambda: self.scores(batch)), self.scores(batch)
            return self.entropic_risk("nu", self.found[1], batch[2], previous_scores=self.found[0])

    task = Dropped(24, MSVR(0.5, 0.5), 24)
    for batch in data.train_dataloader():
        task.training_step(batch, 0)
        assert torch.equal(*task.found)
        assert not task.found[0].requires_grad


def test_an_update_that_needs_none_keeps_none(tmp_path):
    task, data = SETTINGS["classification"](tmp_path, 16)
    quiet_trainer(max_steps=2, limit_val_batches=0).fit(task, datamodule=data)
    assert task._previous_weights.state(task) is None
    assert task.at_previous_weights(lambda: pytest.fail("called")) is None
    task, _ = moved_by(MSVR(0.5, 0.5), classification)(tmp_path, 16)
    task.eval()
    assert task.at_previous_weights(lambda: pytest.fail("called")) is None


def test_a_plain_loop():
    """The same as under the Trainer, with ``keep_weights`` before each step."""
    data = SoftmaxData()
    L.seed_everything(0, verbose=False)
    task = Following(24, MSVR(0.5, 0.8), 24)
    start = {name: value.clone() for name, value in task.state_dict().items()}
    batches = list(data.val_dataloader())

    class InOrder(SoftmaxData):
        train_dataloader = SoftmaxData.val_dataloader

    quiet_trainer(max_epochs=2, limit_val_batches=0).fit(task, InOrder())
    again = Following(24, MSVR(0.5, 0.8), 24)
    again.load_state_dict(start)
    optimizer = again.configure_optimizers()
    for batch in [*batches, *batches]:
        optimizer.zero_grad()
        again.training_step(batch, 0).backward()
        again.keep_weights(optimizer)
        optimizer.step()
    torch.testing.assert_close(task.duals["nu"].nu, again.duals["nu"].nu, rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("kind", [FSDPStrategy, ModelParallelStrategy])
def test_shared_parameters_are_told(kind):
    for update in (MSVR(0.5, 0.5), SOX(0.5)):
        task, trainer = Following(24, update, 24), quiet_trainer()
        trainer._accelerator_connector.strategy = kind()
        task.trainer = trainer
        if update.needs_previous_scores:
            with pytest.raises(InputError, match=f"the weights before, and {kind.__name__} shares the weights among"):
                PreviousWeightsMixin.on_train_start(task)
        else:
            PreviousWeightsMixin.on_train_start(task)


def test_compiled_it_is_the_same_run(tmp_path):
    ends = []
    for compile_it in (False, True):
        L.seed_everything(0, verbose=False)
        task, data = moved_by(MSVR(0.5, 0.5), SETTINGS["ranking"])(tmp_path, 16)
        module = torch.compile(task, backend="eager") if compile_it else task
        with torch._dynamo.config.patch(fail_on_recompile_limit_hit=True):
            quiet_trainer(max_epochs=2, limit_val_batches=0).fit(module, datamodule=data)
        ends.append(task.duals["nu"].nu)
    torch.testing.assert_close(*ends, rtol=1e-5, atol=1e-5)


# -------------------------------------------------------------------- the table


def scores_of(rows=4, seed=0):
    generator = torch.Generator().manual_seed(seed)
    return [torch.randn(rows, 5, generator=generator, dtype=torch.float64) for _ in range(3)]


def test_repeats_and_masks():
    """An anchor with several rows has one correction, by all its samples that count."""
    first, scores, previous = scores_of()
    index = torch.tensor([2, 0, 2, 3])
    mask = torch.rand(4, 5, generator=torch.Generator().manual_seed(1)) < 0.6
    mask[3] = False
    table = DualVariable(5, MSVR(0.3, 1.5))
    table.entropic_risk(first, index, previous_scores=previous)
    start = table.nu.clone()
    scores[~mask], previous[~mask] = math.nan, math.inf
    table.entropic_risk(scores, index, mask, previous_scores=previous)
    for anchor in (0, 2):
        rows = index == anchor
        now, before = (log_mean_exp(values[rows][mask[rows]].unsqueeze(0)) for values in (scores, previous))
        expected = msvr_step(start[[anchor]], now, before, 0.3, 1.5, 0.1)
        torch.testing.assert_close(table.nu[[anchor]].double(), expected, rtol=1e-6, atol=1e-6)
    assert table.nu[3] == start[3]


def test_the_first_visit_has_no_correction():
    _, scores, previous = scores_of()
    table = DualVariable(4, MSVR(0.5, 100.0))
    table.entropic_risk(scores, torch.arange(4), previous_scores=previous)
    torch.testing.assert_close(table.nu.double(), log_mean_exp(scores), rtol=1e-6, atol=1e-6)


def test_previous_scores_that_do_not_fit():
    first, scores, previous = scores_of()
    table, index = DualVariable(4, MSVR(0.5, 0.5)), torch.arange(4)
    table.entropic_risk(first, index, previous_scores=first)
    before = table.nu.clone()
    worse = previous.clone()
    for value in (math.nan, math.inf):
        worse[2, 1] = value
        with pytest.raises(
            DualDivergenceError, match=r"the scores are not finite .* for 1 anchor\(s\), first at index 2"
        ):
            table.entropic_risk(scores, index, previous_scores=worse)
    for error, message, given in (
        (InputError, r"dual variable 'nu' with MSVR\(gamma=0.5, beta=0.5\) needs previous_scores, the scores of", None),
        (InputError, r"must have a row for each of the 4 rows of the scores, got 3", previous[:3]),
        (InputError, r"of the shape of the scores \(4, 5\), got \(4, 4\)", previous[:, :4]),
        (ValueError, "previous_scores of dual variable 'nu' must be floating", previous.long()),
        (ValueError, "previous_scores of dual variable 'nu' must be floating", [0.0]),
        (InputError, "needs previous_scores", None),
    ):
        with pytest.raises(error, match=message):
            table.entropic_risk(scores, index, previous_scores=given)
    assert torch.equal(table.nu, before)
    # Without a sample of any weight before, all of it is new.
    worse[2] = -math.inf
    table.entropic_risk(scores, index, previous_scores=worse)
    assert table.nu.isfinite().all()


def test_updates_that_need_none_ignore_them():
    _, scores, previous = scores_of()
    one, other = DualVariable(4, SOX(0.5)), DualVariable(4, SOX(0.5))
    for table, given in ((one, previous[:2] * math.nan), (other, None)):
        for _ in range(2):
            table.entropic_risk(scores, torch.arange(4), previous_scores=given)
    assert torch.equal(one.nu, other.nu)


def test_they_go_with_the_scores_that_move_nu():
    first, scores, previous = scores_of()
    table, plain = DualVariable(4, MSVR(0.5, 0.5)), DualVariable(4, MSVR(0.5, 0.5))
    for each in (table, plain):
        each.entropic_risk(first, torch.arange(4), previous_scores=first)
    mask = torch.arange(5) < 3
    moving = DenseScores(scores, mask.expand(4, 5).clone())
    table.entropic_risk(first[:, :2], torch.arange(4), dual_scores=moving, previous_scores=previous)
    plain.entropic_risk(scores[:, :3], torch.arange(4), previous_scores=previous[:, :3])
    assert torch.equal(table.nu, plain.nu)
    with pytest.raises(InputError, match=r"of the shape of the dual_scores \(4, 3\), got \(4, 5\)"):
        table.entropic_risk(first, torch.arange(4), dual_scores=scores[:, :3], previous_scores=previous)


def _ranks(rank):
    table = DualVariable(4, MSVR(0.4, 0.9))
    share = slice(0, 3) if rank == 0 else slice(3, 4)
    for seed in range(4):
        scores, previous, _ = scores_of(seed=seed)
        table.entropic_risk(scores[share], torch.tensor([0, 1, 2, 1])[share], previous_scores=previous[share])
    try:
        table.entropic_risk(scores[share], torch.tensor([0, 1, 2, 1])[share], previous_scores=previous[:3])
    except (InputError, RuntimeError) as error:
        return table.nu.tolist(), str(error)


def test_the_same_in_every_process(tmp_path):
    (first, _), (second, message) = in_two_processes(_ranks, tmp_path)
    assert first == second
    assert "must have a row for each of the 1 rows" in message
    alone = DualVariable(4, MSVR(0.4, 0.9))
    for seed in range(4):
        scores, previous, _ = scores_of(seed=seed)
        alone.entropic_risk(scores, torch.tensor([0, 1, 2, 1]), previous_scores=previous)
    torch.testing.assert_close(torch.tensor(first), alone.nu, rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("second", [RowSparseSGD, partial(torch.optim.SGD, momentum=0.5)])
def test_several_steps_before_the_next_batch(second):
    """Two optimisers, or a batch that moved no ν between two steps: the weights are those of the last that did."""
    task = ExtremeClassificationTask(4, 9, 20, MSVR(0.5, 0.5))
    torch.nn.init.normal_(task.head.weight)
    optimizers = [RowSparseSGD(task.parameters(), lr=0.5), second(task.parameters(), lr=0.5)]
    task.training_step((torch.randn(3, 4), torch.tensor([1, 2, 5]), torch.arange(3)), 0).backward()
    before = task.head.weight.detach().clone()
    for optimizer, labels in zip(optimizers, ([1, 2, 5], [2, 5, 7]), strict=True):
        if labels[-1] == 7:
            scores, _ = task.head(torch.randn(3, 4), torch.tensor(labels))
            scores.sum().backward()
        task.keep_weights(optimizer)
        optimizer.step()
        optimizer.zero_grad()
    assert not torch.equal(task.head.weight, before)
    with task._previous_weights.installed():
        assert torch.equal(task.head.weight, before)


def test_row_sparse_gradients_with_repeats():
    """A gradient that gathers over batches names a row several times."""
    task = ExtremeClassificationTask(4, 9, 20, MSVR(0.5, 0.5))
    optimizer = RowSparseSGD(task.parameters(), lr=0.5)
    batch = (torch.randn(6, 4), torch.tensor([1, 2, 2, 5, 8, 1]), torch.arange(6))
    for _ in range(2):
        for _ in range(2):
            task.training_step(batch, 0).backward()
        before = task.head.weight.detach().clone()
        task.keep_weights(optimizer)
        optimizer.step()
        optimizer.zero_grad()
    kept = task._previous_weights.state(task)
    assert kept["weights"]["head.weight"]["rows"].tolist() == [1, 2, 5, 8]
    assert kept["moved"] == {}
    with task._previous_weights.installed():
        assert torch.equal(task.head.weight, before)
