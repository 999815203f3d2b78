"""Listwise ranking against the exact loss, and as a run of the command line."""

import math
import re
import runpy

import lightning as L
import pandas as pd
import pytest
import torch
from torch import nn

from scent_lightning.cli import main
from scent_lightning.data import RankingDataModule
from scent_lightning.duals import BSGD, MSVR, SCENT, SOX
from scent_lightning.errors import InputError
from scent_lightning.tasks import RankingTask
from tests.helpers import assert_resumed_is_the_same, quiet_trainer


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """The small data of the examples."""
    made = tmp_path_factory.mktemp("small")
    module = runpy.run_path("examples/small_data.py")
    module["queries"](made / "queries", module["np"].random.default_rng(0))
    return made / "queries"


def batch_of(seed=0, rows=4, longest=6, features=3):
    generator = torch.Generator().manual_seed(seed)
    mask = torch.arange(longest) < torch.randint(2, longest + 1, (rows, 1), generator=generator)
    relevance = torch.randint(0, 3, (rows, longest), generator=generator).float() * mask
    relevance[:, 0] += 1
    inputs = torch.randn(rows, longest, features, generator=generator) * mask.unsqueeze(2)
    return inputs, relevance, mask, torch.arange(rows)


def exact(task, batch, gain="exponential"):
    """Cross-entropy of each list, by a loop."""
    losses = []
    for features, relevance, mask in zip(*batch[:3], strict=True):
        scores = task(features[mask])
        gains = 2 ** relevance[mask] - 1 if gain == "exponential" else relevance[mask]
        losses.append(scores.logsumexp(0) - gains / gains.sum() @ scores)
    return torch.stack(losses)


def task_of(dual=None, **arguments):
    return RankingTask(3, 4, dual or BSGD(), **arguments)


@pytest.mark.parametrize("gain", ["exponential", "linear"])
def test_the_loss_of_whole_lists_is_the_listwise_cross_entropy(gain):
    task = task_of(gain=gain, network=nn.Sequential(nn.Linear(3, 5), nn.Tanh(), nn.Linear(5, 1)))
    batch = batch_of()
    loss = task.training_step(batch, 0)
    expected = exact(task, batch, gain)
    torch.testing.assert_close(loss, expected.mean())
    torch.testing.assert_close(task.duals["nu"].nu, expected.detach())
    parameters = list(task.network.parameters())
    found = torch.autograd.grad(loss, parameters, retain_graph=True, allow_unused=True)
    for one, other in zip(found, torch.autograd.grad(expected.mean(), parameters, allow_unused=True), strict=True):
        torch.testing.assert_close(one, other, atol=1e-6, rtol=1e-4)


def test_a_list_without_a_relevant_document_or_without_any_adds_nothing():
    task = task_of()
    features, relevance, mask, index = batch_of()
    relevance[1], mask[2] = 0, False
    loss = task.training_step((features, relevance, mask, index), 0)
    expected = exact(task, (features[[0, 3]], relevance[[0, 3]], mask[[0, 3]]))
    torch.testing.assert_close(loss, expected.mean())
    assert task.duals["nu"].visited.tolist() == [True, False, False, True]


def test_places_without_a_document_are_not_seen_by_the_network():
    """Batch norm has the statistics of the documents alone, whatever the padding."""
    network = nn.Sequential(nn.BatchNorm1d(3), nn.Linear(3, 1))
    task = task_of(network=network)
    batch = batch_of()
    task.training_step(batch, 0)
    torch.testing.assert_close(network[0].running_mean, 0.1 * batch[0][batch[2]].mean(dim=0))


def test_evaluation_is_exact(folder):
    data = RankingDataModule(str(folder), batch_size=16, eval_batch_size=7)
    data.setup("fit")
    task = RankingTask(data.num_features, data.num_anchors, BSGD(), ks=[3])
    nn.init.normal_(task.network.weight, generator=torch.Generator().manual_seed(0))
    found = quiet_trainer().validate(task, data, verbose=False)[0]
    assert set(found) == {"val/cross_entropy", "val/ndcg@3", "val/mrr"}
    losses = []
    for batch in data.val_dataloader():
        rows = batch[1].any(dim=1)
        losses.append(exact(task, [part[rows] for part in batch]))
    losses = torch.cat(losses)
    assert len(losses) == 48  # two queries have no relevant document
    assert found["val/cross_entropy"] == pytest.approx(losses.mean().item(), rel=1e-5)


@pytest.mark.parametrize("dual", [SCENT(), SOX(0.5), MSVR(gamma=0.5, beta=0.5)], ids=repr)
def test_drawn_lists_train_to_the_optimum_of_the_whole_ones(folder, dual):
    """Of lists of 5 to 59 documents 8 are drawn; the exact loss comes to that of whole lists, within half a percent."""
    found = []
    for list_size, update in ((None, BSGD()), (8, dual)):
        L.seed_everything(0, verbose=False)
        data = RankingDataModule(str(folder), batch_size=32, list_size=list_size)
        data.setup("fit")
        task = RankingTask(data.num_features, data.num_anchors, update)
        quiet_trainer(max_epochs=15).fit(task, datamodule=data)
        whole = RankingDataModule(str(folder))
        rows = whole.evaluation_loader(whole.existing("train"))
        found.append(quiet_trainer().validate(task, rows, verbose=False)[0]["val/cross_entropy"])
    assert found[1] == pytest.approx(found[0], rel=5e-3)


def test_resumed_within_an_epoch_it_is_the_same(folder, tmp_path):
    """The draws of the lists as well."""

    def make():
        data = RankingDataModule(str(folder), batch_size=32, list_size=8)
        data.setup("fit")
        return RankingTask(data.num_features, data.num_anchors, SCENT()), data

    assert_resumed_is_the_same(make, tmp_path, step=4, max_epochs=2)  # of 6 steps an epoch


def test_the_command_line(folder, tmp_path, capsys):
    settings = [
        "--config",
        "configs/ranking_letor.yaml",
        "--data.path",
        str(folder),
        "--trainer.default_root_dir",
        str(tmp_path),
    ]
    main(["fit", *settings, "--trainer.max_epochs", "3", "--trainer.check_val_every_n_epoch", "1"])
    (last,) = tmp_path.glob("lightning_logs/version_0/checkpoints/last.ckpt")
    found = []
    for arguments in ([], ["--data.list_size", "null"]):
        capsys.readouterr()
        main(["validate", *settings, "--ckpt_path", str(last), *arguments])
        found.append(float(re.search(r"val/ndcg@10\D*([\d.]+)", capsys.readouterr().out)[1]))
    assert found[0] == found[1] > 0.8
    main(["predict", *settings, "--ckpt_path", str(last)])
    (file,) = tmp_path.glob("lightning_logs/*/predictions.csv")
    table = pd.read_csv(file)
    assert list(table.columns) == ["index", "document", "score"]
    assert table.groupby("index")["document"].agg(lambda places: places.tolist() == list(range(len(places)))).all()
    assert table["index"].nunique() == 50  # of the validation file, as there is none to test or predict


@pytest.mark.parametrize(("change", "message"), [
    (lambda f, r, m, i: (f, r, m), r"a batch must be \(features, relevance, mask, index\), .*, got 3 part\(s\)"),
    (lambda f, r, m, i: f, "a batch must be .*, got Tensor"),
    (lambda f, r, m, i: (f[0], r, m, i), r"features of shape \(B, L, D\), .* got \(6, 3\), \(4, 6\) and \(4, 6\)"),
    (lambda f, r, m, i: (f, r[:2], m, i), r"got \(4, 6, 3\), \(2, 6\) and \(4, 6\)"),
    (lambda f, r, m, i: (f, r - 3, m, i), "relevance must be at least 0, got -3"),
    (lambda f, r, m, i: (f, r * math.nan, m, i), "relevance must be at least 0, got nan"),
    (lambda f, r, m, i: (f, r + 100, m, i), "relevance must be at least 0, and at most 60 where gain is .*, got 10"),
])  # fmt: skip
def test_batches(change, message):
    with pytest.raises(InputError, match=message):
        task_of().training_step(change(*batch_of()), 0)


@pytest.mark.parametrize(("arguments", "message"), [
    ({"gain": "log"}, "gain must be one of exponential, linear, got 'log'"),
    ({"ks": []}, r"ks must hold at least one k, got \[\]"),
    ({"ks": [3, 0]}, "each of ks must be an integer of at least 1, got 0"),
])  # fmt: skip
def test_arguments(arguments, message):
    with pytest.raises(InputError, match=message):
        task_of(**arguments)


def test_a_network_of_several_outputs():
    with pytest.raises(InputError, match=r"network must give one score a document: expected shape .*, got \(\d+, 2\)"):
        task_of(network=nn.Linear(3, 2)).training_step(batch_of(), 0)
