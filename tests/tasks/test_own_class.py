"""The own class in the sum: gradually by default, and what that is good for."""

import math
import warnings

import lightning as L
import pytest
import torch
from torch.nn import functional as F

from scent_lightning.data import IndexedTensorDataset, SyntheticFeatureDataModule, batch_loader
from scent_lightning.duals import BSGD, SCENT, DenseScores
from scent_lightning.errors import InputError
from scent_lightning.modules import ClassSampledLinear
from scent_lightning.modules.several_answers import Answers, answer_scores
from scent_lightning.tasks import ExtremeClassificationTask, MultiLabelTask
from tests.helpers import quiet_trainer

K, D, N = 12, 5, 60


def rows_of():
    generator = torch.Generator().manual_seed(0)
    labels = torch.arange(N) % K
    return torch.randn(K, D, generator=generator)[labels] + torch.randn(N, D, generator=generator), labels


def task_of(**arguments):
    return ExtremeClassificationTask(D, K, N, arguments.pop("dual", SCENT()), **arguments)


@pytest.mark.parametrize("negatives", ["in_batch", "uniform", "all"])
@pytest.mark.parametrize("progress", [0.0, 0.3, 1.0])
def test_it_comes_in_over_the_run(negatives, progress):
    """At first its weight is 1/(K − 1)⁴ of the sum's mean, at the end 1/(K − 1), the softmax."""
    features, labels = rows_of()
    head = ClassSampledLinear(D, K, negatives, include_target="gradual")
    torch.nn.init.normal_(head.weight)
    head.progress = progress
    (side,) = head.samples(features, labels, generator=torch.Generator().manual_seed(3)).sides()
    scores, mask = head(features, labels, generator=torch.Generator().manual_seed(3))
    mean = (scores.double().exp() * mask).sum(dim=1) / mask.sum(dim=1)
    expected = (mean + (K - 1) ** -(4 - 3 * progress)).log()
    torch.testing.assert_close(side.log_mean, expected.detach(), rtol=1e-5, atol=1e-5)
    if negatives == "all" and progress == 1.0:
        cross_entropy = F.cross_entropy(features @ head.weight.T, labels, reduction="none")
        torch.testing.assert_close(side.log_mean.float(), (cross_entropy - math.log(K - 1)).detach())


@pytest.mark.parametrize("is_given", [True, False])
@pytest.mark.parametrize("dense", [True, False])
def test_frequent_classes_have_less_of_a_margin(is_given, dense):
    """A class of c times as many rows as the mean has a c-th of it, rarer ones than the mean all of it."""
    features, _ = rows_of()
    labels = torch.tensor([0, 0, 1, 2, 11])
    counts = torch.tensor([40, 10, 1] + [5] * 8 + [1])
    head = ClassSampledLinear(D, K, correction="frequency" if is_given else "none", include_target="gradual")
    torch.nn.init.normal_(head.weight)
    if is_given:
        head.frequencies.give(counts)
        rarity = [counts.sum() / K / 40, counts.sum() / K / 40, counts.sum() / K / 10, 1.0, 1.0]
    else:
        head.frequencies.see(torch.arange(K).repeat_interleave(counts))
        mean = (counts.sum() + K / 2) / K
        rarity = [mean / 40.5, mean / 40.5, mean / 10.5, 1.0, 1.0]
    assert head.frequencies.rarity(labels).tolist() == pytest.approx([float(each) for each in rarity])
    scores, mask = head(features[:5], labels)
    samples = DenseScores(scores, mask) if dense else head._exponentials(features[:5], labels)
    head.progress = 0.25
    (side,) = head.with_target(samples, labels).sides()
    powers = 1 + 3 * 0.75 * torch.tensor(rarity, dtype=torch.float64)
    mean = (scores.double().exp() * mask).sum(dim=1) / mask.sum(dim=1)
    torch.testing.assert_close(side.log_mean, (mean + (K - 1) ** -powers).log().detach(), rtol=1e-5, atol=1e-5)


def test_rows_are_told_of_whatever_the_negatives_are():
    for more in ({"correction": "none"}, {"negatives": "uniform"}, {"negatives": "all"}):
        data = SyntheticFeatureDataModule(K, D, rows=N, val_rows=10, zipf_exponent=1.0, batch_size=15)
        task = task_of(**more)
        quiet_trainer(max_epochs=1).fit(task, datamodule=data)
        assert torch.equal(task.head.frequencies.counts, torch.as_tensor(data.class_counts))
        assert task.head.frequencies.rarity(torch.tensor([0])) < 0.5


def test_the_task_says_how_far_the_run_is():
    seen, task = [], task_of()
    of_head = task.head.with_target
    task.head.with_target = lambda *given: seen.append(task.head.progress) or of_head(*given)
    loader = batch_loader(IndexedTensorDataset(*rows_of()), 15, True)
    quiet_trainer(max_epochs=2).fit(task, loader)
    assert seen == pytest.approx([i / 8 for i in range(8)])
    seen.clear()
    quiet_trainer(max_steps=5).fit(task, loader)
    assert seen == pytest.approx([i / 5 for i in range(5)])


def test_where_the_end_is_not_known_it_is_there():
    """In a run without one, and in a plain loop until it is told."""
    task = task_of(lr_schedule="constant", dual=SCENT(0.0))
    features, labels = rows_of()
    index = torch.arange(N)

    class Ends(L.Callback):
        def on_train_batch_end(self, trainer, module, outputs, batch, batch_idx):
            trainer.should_stop = trainer.global_step >= 3

    loader = batch_loader(IndexedTensorDataset(features, labels), 15, True)
    quiet_trainer(max_epochs=-1, callbacks=[Ends()]).fit(task, loader)
    fresh = {}
    for progress in (None, 0.0, 1.0):
        plain = task_of(dual=BSGD(), negatives="all")
        if progress is not None:
            plain.set_dual_progress(progress)
        plain.training_step((features, labels, index), 0)
        fresh[progress] = plain.duals["nu"].nu.clone()
    assert torch.equal(fresh[None], fresh[1.0])
    # From weights of 0 the mean over the others is 1.
    assert fresh[1.0].tolist() == pytest.approx([math.log(1 + 1 / (K - 1))] * N, rel=1e-5)
    assert fresh[0.0].tolist() == pytest.approx([math.log1p((K - 1) ** -4.0)] * N, rel=1e-2)


@pytest.mark.parametrize("include_target", ["gradual", True])
def test_rare_classes_are_learned(include_target):
    """Classes by Zipf's law that can be told apart: without the own class one in four rows is given up."""
    L.seed_everything(0, verbose=False)
    ends = {}
    for own in (include_target, False):
        data = SyntheticFeatureDataModule(300, 32, rows=6000, val_rows=500, noise=0.3, zipf_exponent=1.0, batch_size=64)
        task = ExtremeClassificationTask(32, 300, 6000, SCENT(), include_target=own)
        trainer = quiet_trainer(max_epochs=6, limit_val_batches=1.0)
        trainer.fit(task, datamodule=data)
        ends[own] = trainer.validate(task, datamodule=data, verbose=False)[0]
    assert ends[include_target]["val/top1"] > 0.95
    assert ends[include_target]["val/cross_entropy"] < 0.3
    assert ends[False]["val/top1"] < 0.9
    assert ends[False]["val/cross_entropy"] > 2.0


@pytest.mark.parametrize("lr", [1.0, 100.0, 10_000.0])
def test_no_rate_throws_rows_off_that_were_right(lr):
    """As the own class is no part of what the proximal step takes for exponential."""
    L.seed_everything(0, verbose=False)
    data = SyntheticFeatureDataModule(200, 32, rows=4000, val_rows=500, noise=0.3, batch_size=64)
    task = ExtremeClassificationTask(32, 200, 4000, SCENT(), include_target=True, lr=200 * lr)
    quiet_trainer(max_epochs=4).fit(task, datamodule=data)
    found = quiet_trainer(limit_val_batches=1.0).validate(task, datamodule=data, verbose=False)[0]
    assert found["val/top1"] > 0.98
    assert found["val/cross_entropy"] < 0.1


def test_a_run_that_began_with_another_loss_says_so(tmp_path):
    loader = batch_loader(IndexedTensorDataset(*rows_of()), 15, True)
    trainer = quiet_trainer(max_epochs=1)
    trainer.fit(task_of(include_target=False), loader)
    trainer.save_checkpoint(tmp_path / "a.ckpt")
    with pytest.warns(UserWarning, match="of a run with include_target=False, and this one has 'gradual'"):
        quiet_trainer(max_epochs=2).fit(task_of(), loader, ckpt_path=tmp_path / "a.ckpt")
    with warnings.catch_warnings():
        warnings.filterwarnings("error", message="the checkpoint is of a run")
        quiet_trainer(max_epochs=2).fit(task_of(include_target=False), loader, ckpt_path=tmp_path / "a.ckpt")


@pytest.mark.parametrize("given", ["always", 2, None])
def test_another_word(given):
    with pytest.raises(InputError, match=f"include_target must be one of False, True, gradual, got {given!r}"):
        task_of(include_target=given)


def test_right_answers_of_several_are_no_part_of_the_exponential():
    """Given ones that are wrong are, and those of weight 0."""
    head = ClassSampledLinear(D, K, "all", include_target=True)
    torch.nn.init.normal_(head.weight)
    features = rows_of()[0][:2]
    classes, hard = torch.tensor([[0, 3], [5, -1]]), torch.tensor([[1], [-1]])
    weights = torch.tensor([[1.0, 0.0], [2.0, 0.0]])
    samples = answer_scores(head, features, Answers(classes, weights, hard), classes[classes >= 0], 2)
    assert isinstance(samples, DenseScores)
    samples.sides()
    logits = (features @ head.weight.T).detach().double()
    others = logits.exp()
    others[0, 0] = others[1, 5] = 0.0
    own = logits[[0, 1], [0, 5]]
    torch.testing.assert_close(samples.moving(0), others.sum(dim=1).log() - own - math.log(K - 1), rtol=1e-5, atol=1e-5)


def test_multi_label_with_one_answer_each_takes_the_same_step(tmp_path):
    """The right answer is in both sums, and no part of what is exponential in either."""
    features, labels = rows_of()
    ends = []
    for kind, answers in ((ExtremeClassificationTask, labels), (MultiLabelTask, labels.unsqueeze(1))):
        more = {"include_target": True} if kind is ExtremeClassificationTask else {}
        task = kind(D, K, N, SCENT(0.0), lr=30.0, negatives="all", lr_schedule="constant", **more)
        quiet_trainer(max_epochs=2).fit(task, batch_loader(IndexedTensorDataset(features, answers), 15, False))
        ends.append(task.head.weight.detach())
    torch.testing.assert_close(*ends, rtol=1e-4, atol=1e-5)
