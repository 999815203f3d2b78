"""κ of a batch, and m/κ, against sums in float64, for every kind of samples."""

import lightning as L
import pytest
import torch
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
from torch.nn import functional as F

from scent_lightning.callbacks import DualVariableMonitor
from scent_lightning.duals import (
    BSGD,
    SCENT,
    ContrastiveSamples,
    DenseScores,
    DualVariable,
    Exponentials,
    ProximalPoint,
    Samples,
    SoftplusASGD,
)
from scent_lightning.duals.step import entropic_risk
from scent_lightning.functional.contrastive import products
from scent_lightning.modules import ClassSampledLinear
from tests.helpers import SoftmaxData, SoftmaxTask, in_two_processes, quiet_trainer
from tests.settings import SETTINGS


def oracle(scores, index, mask=None):
    """Means over the different anchors of κ and of m/κ, each anchor by all its samples."""
    scores = scores.detach().double()
    mask = torch.ones_like(scores, dtype=torch.bool) if mask is None else mask
    found = []
    for anchor in index.unique():
        own = torch.cat([row[kept] for row, kept in zip(scores[index == anchor], mask[index == anchor], strict=True)])
        if len(own):
            share = torch.softmax(own, dim=0).square().sum()
            found.append((len(own) * share, 1 / share))
    return [torch.stack(column).mean().item() for column in zip(*found, strict=True)]


def measured(samples, index, update=None, sides=1):
    tables = [DualVariable(30, update or SCENT(0.0)) for _ in range(sides)]
    for table in tables:
        table.measures_kappa = True
    entropic_risk(tables, samples, index, 0.0)
    return [[value.item() for value in table.last_step.kappa] for table in tables]


def normal(*shape, seed=0):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def assert_kappa(found, scores, index, mask=None):
    assert found == pytest.approx(oracle(scores, index, mask), rel=2e-5)


@pytest.mark.parametrize("shift", [0.0, 9e3, -9e3])
@pytest.mark.parametrize("spread", [0.0, 1.0, 30.0])
@pytest.mark.parametrize("update", [SCENT(0.0), BSGD(), ProximalPoint(0.5), SoftplusASGD(0.1, 1e-3)], ids=repr)
def test_dense_scores(update, spread, shift):
    scores, index = spread * normal(7, 11) + shift, torch.tensor([3, 1, 3, 8, 0, 3, 9])
    mask = normal(7, 11, seed=1) > -0.5
    mask[4] = False  # an anchor without a sample
    if isinstance(update, SoftplusASGD) and shift > 0:
        update = SoftplusASGD(0.1, 1e-3, max_log_weight=1.0)
    assert_kappa(measured(DenseScores(scores), index, update)[0], scores, index)
    assert_kappa(measured(DenseScores(scores, mask), index, update)[0], scores, index, mask)


def test_other_samples_that_move_nu():
    loss, moving, index = normal(3, 4), normal(3, 7, seed=1), torch.tensor([4, 0, 2])
    table = DualVariable(6, SCENT(0.5))
    table.measures_kappa = True
    table.entropic_risk(loss, index, dual_scores=moving)
    assert_kappa([value.item() for value in table.last_step.kappa], moving, index)


def test_one_row():
    scores = 3 * normal(1, 20)
    assert_kappa(measured(DenseScores(scores), torch.tensor([4]))[0], scores, torch.tensor([4]))


def test_samples_of_weight_zero_count_in_m():
    scores = torch.tensor([[0.0, 0.0, -torch.inf, -torch.inf]])
    assert measured(DenseScores(scores), torch.tensor([0]), BSGD())[0] == [2.0, 2.0]


@pytest.mark.parametrize("normalize", [False, True])
@pytest.mark.parametrize("negatives", ["in_batch", "uniform", "all"])
@pytest.mark.parametrize("scale", [0.1, 20.0])
def test_sampled_heads(negatives, normalize, scale):
    head = ClassSampledLinear(6, 40, negatives, num_negatives=9, normalize=normalize, scale=scale)
    head.weight.data = normal(40, 6)
    features, labels, index = normal(12, 6, seed=1), torch.arange(12) % 5 * 7, torch.arange(12).clamp(max=9)
    generators = [torch.Generator().manual_seed(3) for _ in range(2)]
    scores, mask = head(features, labels, generator=generators[0])
    samples = head.samples(features, labels, generator=generators[1])
    assert isinstance(samples, Exponentials) == (negatives != "uniform")
    assert_kappa(measured(samples, index)[0], scores, index, mask)


@pytest.mark.parametrize("way", ["blocks", "chunk", "one piece"])
@pytest.mark.parametrize("epsilon", [0.0, 1e-2])
@pytest.mark.parametrize("tau", [1.0, 0.05, 0.004])  # the last: columns too far apart for one exponential
@pytest.mark.parametrize("update", [SCENT(0.0), SoftplusASGD(0.1, 1e-3, max_log_weight=1.0)], ids=repr)
def test_contrastive_pairs(update, tau, epsilon, way, monkeypatch):
    if way == "one piece":  # as on a GPU
        monkeypatch.setattr(products, "_in_one_piece", lambda device, chunk: True)
    chunk = 4 if way == "chunk" else None
    image, text = F.normalize(normal(13, 3), dim=1), F.normalize(normal(13, 3, seed=1), dim=1)
    if tau < 0.01:
        image[:, 0] = image[:, 0].abs()
        text[::2] = -image[::2]
    index, off = torch.arange(13).clamp(max=11), ~torch.eye(13, dtype=torch.bool)
    epsilon = 0.0 if isinstance(update, SoftplusASGD) else epsilon
    samples = ContrastiveSamples(image, text, tau, epsilon=epsilon, chunk=chunk)
    found = measured(samples, index, update, sides=2)
    if update.has_exponential_objective:
        assert (samples._means._columns is None) == (tau < 0.01)
    logits = image.double() @ text.double().T / tau
    for side, scores in zip(found, (logits, logits.T), strict=True):
        scores = scores - scores.diagonal().unsqueeze(1)
        assert side == pytest.approx(oracle(scores, index, off), rel=1e-3 if tau < 0.01 else 2e-5)


def test_samples_that_do_not_know_it_log_nothing():
    class Own(Samples):
        def __init__(self, dense):
            self._dense = dense

        def __len__(self):
            return len(self._dense)

        def sides(self):
            return self._dense.sides()

        def loss(self, places):
            return self._dense.loss(places)

    table = DualVariable(30, SCENT(0.0))
    table.measures_kappa = True
    entropic_risk([table], Own(DenseScores(normal(3, 4))), torch.arange(3), 0.0)
    assert table.last_step.kappa is None


def _uneven(rank):
    scores, index = 2 * normal(9, 6), torch.tensor([0, 1, 2, 3, 1, 5, 0, 0, 7])
    mine = slice(0, 3) if rank == 0 else slice(3, 9)
    dense = measured(DenseScores(scores[mine]), index[mine])[0]
    image, text = F.normalize(normal(9, 3), dim=1), F.normalize(normal(9, 3, seed=1), dim=1)
    pairs = measured(ContrastiveSamples(image[mine], text[mine], 0.1), index[mine], sides=2)
    return dense, pairs


@pytest.mark.slow
def test_processes_know_that_of_the_whole_batch(tmp_path):
    scores, index = 2 * normal(9, 6), torch.tensor([0, 1, 2, 3, 1, 5, 0, 0, 7])
    logits = (F.normalize(normal(9, 3), dim=1) @ F.normalize(normal(9, 3, seed=1), dim=1).T).double() / 0.1
    off = ~torch.eye(9, dtype=torch.bool)
    for dense, pairs in in_two_processes(_uneven, tmp_path):
        assert_kappa(dense, scores, index)
        for found, side in zip(pairs, (logits, logits.T), strict=True):
            assert_kappa(found, side - side.diagonal().unsqueeze(1), index, off)


class Measured(L.Callback):
    def __init__(self):
        self.steps = []

    def on_train_batch_end(self, trainer, module, outputs, batch, batch_idx):
        if next(iter(module.duals.values())).last_step.kappa is not None:
            self.steps.append(trainer.global_step)


@pytest.mark.parametrize("accumulate", [1, 2])
def test_only_at_logging_steps_and_without_a_trace_in_the_run(tmp_path, accumulate):
    def fit(*callbacks, logger):
        L.seed_everything(0, verbose=False)
        task = SoftmaxTask(24)
        quiet_trainer(
            max_epochs=4,
            log_every_n_steps=3,
            accumulate_grad_batches=accumulate,
            callbacks=list(callbacks),
            logger=logger,
        ).fit(task, SoftmaxData(batch_size=4))
        return task

    logger, seen = L.pytorch.loggers.TensorBoardLogger(tmp_path), Measured()
    logged = fit(seen, DualVariableMonitor(), logger=logger)
    assert {step for step in seen.steps if step % 3 == 0} == set(range(3, 24 // accumulate + 1, 3))
    assert len(seen.steps) == 8 // accumulate * accumulate  # each batch of such a step
    assert not logged.duals["nu"].measures_kappa
    torch.testing.assert_close(logged.state_dict(), fit(logger=False).state_dict(), rtol=0, atol=0)


@pytest.mark.parametrize("kind", SETTINGS)
def test_every_task_logs_it(kind, tmp_path):
    (tmp_path / "data").mkdir()
    L.seed_everything(0, verbose=False)
    task, data = SETTINGS[kind](tmp_path / "data", 16)
    logger = L.pytorch.loggers.TensorBoardLogger(tmp_path)
    quiet_trainer(
        max_steps=2,
        log_every_n_steps=2,
        limit_val_batches=0,
        logger=logger,
        callbacks=[DualVariableMonitor(detail=True)],
    ).fit(task, data)
    events = EventAccumulator(logger.log_dir)
    events.Reload()
    for name in task.duals:
        (kappa,), (samples,) = (events.Scalars(f"dual/{name}/{tag}") for tag in ("kappa", "effective_samples"))
        assert kappa.step == 1
        assert kappa.value >= 1
        assert samples.value >= 1
