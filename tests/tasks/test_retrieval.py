"""Retrieval: what the corrected batches estimate, the ranking of all items, and what holds for every task."""

import itertools
import math

import lightning as L
import numpy as np
import pandas as pd
import pytest
import torch
from lightning.pytorch.callbacks import ModelCheckpoint
from torch import nn
from torchmetrics.functional.retrieval import retrieval_normalized_dcg, retrieval_recall

from scent_lightning.callbacks import PredictionWriter, VectorExport
from scent_lightning.data import Interactions, InteractionsDataModule
from scent_lightning.data.interactions import Ragged, hashed_ngrams
from scent_lightning.duals import BSGD, MSVR, SCENT, SOX, SoftplusASGD
from scent_lightning.errors import InputError
from scent_lightning.modules import EmbeddingTower, HashedTextTower
from scent_lightning.optim import RowSparseAdam
from scent_lightning.tasks import RetrievalTask
from tests.helpers import quiet_trainer
from tests.settings import recommendation

QUERIES, ITEMS = 7, 9
PAIRS = [(0, 1), (0, 2), (1, 1), (2, 1), (2, 5), (3, 1), (4, 2), (5, 8), (6, 2), (6, 1)]


def interactions():
    queries, items = torch.tensor(PAIRS).T
    return Interactions(queries, items, QUERIES, ITEMS)


def task_of(dual=None, pairs=None, **arguments):
    torch.manual_seed(0)
    pairs = pairs or interactions()
    sizes = pairs.num_queries, pairs.num_items, len(pairs)
    task = RetrievalTask(*sizes, dual or SCENT(2.0), **{"dim": 4, "ks": (1, 3), **arguments})
    task.use_interactions(pairs)
    return task.double()


def batch_of(rows):
    rows = torch.as_tensor(rows)
    pairs = interactions()
    return pairs.queries[rows], pairs.items[rows], rows


def log_mean(task, rows):
    """The logarithm of the inner mean of each row of a batch."""
    return task._samples(*batch_of(rows))[0].sides()[0].log_mean


# ------------------------------------------------------------------ what is estimated


@pytest.mark.parametrize("anchor", ["interaction", "query"])
@pytest.mark.parametrize("mask_hits", [False, True])
@pytest.mark.parametrize("include_target", [False, True])
@pytest.mark.parametrize("num_mined", [0, 3])
def test_a_corrected_batch_estimates_the_mean_over_all_others(anchor, mask_hits, include_target, num_mined):
    """In expectation over all batches that a row may be in, each of the same probability."""
    task = task_of(anchor=anchor, mask_hits=mask_hits, include_target=include_target, num_mined=num_mined)
    if num_mined:
        task.mine()
    pairs = interactions()
    with torch.no_grad():
        logits = task(pairs.queries) @ task.item_vectors(torch.arange(ITEMS)).T
    for row in range(len(PAIRS)):
        query, own = PAIRS[row]
        others = [other for other in range(len(PAIRS)) if other != row]
        found = [log_mean(task, (row, *rest))[0].exp().item() for rest in itertools.combinations(others, 3)]
        hits = {item for of, item in PAIRS if of == query} if mask_hits else set()
        # An item without an interaction is in no batch.
        mined = set(task.mined[query].tolist()) if num_mined else set()
        counted = {item for _, item in PAIRS} | mined
        counted = counted - hits - {own} | ({own} if include_target else set())
        less = logits[row, own] if anchor == "interaction" else 0.0
        expected = sum((logits[row, item] - less).exp().item() for item in counted) / (ITEMS - 1)
        assert np.mean(found) == pytest.approx(expected, rel=1e-6), row  # log-probabilities are float32


def test_evenly_drawn_items_estimate_it_too():
    task = task_of(negatives="uniform", num_negatives=3)
    pairs = interactions()
    logits = (task(pairs.queries) @ task.item_vectors(torch.arange(ITEMS)).T).detach()
    expected = [
        (logits[row] - logits[row, own]).exp().sum().item() / (ITEMS - 1) - 1 / (ITEMS - 1)
        for row, (_, own) in enumerate(PAIRS)
    ]
    drawn = []

    def draw(high, size, **_):
        return torch.tensor(drawn[-1])

    rows = range(len(PAIRS))
    total = np.zeros(len(PAIRS))
    with pytest.MonkeyPatch.context() as patch:
        for triple in itertools.product(range(ITEMS), repeat=3):
            drawn.append(triple)
            patch.setattr(torch, "randint", draw)
            total += log_mean(task, list(rows)).exp().detach().numpy()
    assert total / ITEMS**3 == pytest.approx(expected, rel=1e-6)


def test_all_items_give_the_exact_softmax():
    """Loss and gradient at BSGD are those of torch's cross-entropy, but for a constant."""
    task = task_of(BSGD(), negatives="all", include_target=True)
    batch = batch_of(range(len(PAIRS)))
    loss = task.training_step(batch, 0)
    loss.backward()
    found = [tower.embedding.weight.grad.to_dense() for tower in (task.query_tower, task.item_tower)]
    task.zero_grad()
    logits = task(batch[0]) @ task.item_vectors(torch.arange(ITEMS)).T
    exact = nn.functional.cross_entropy(logits, batch[1])
    exact.backward()
    assert loss.item() == pytest.approx(exact.item() - math.log(ITEMS - 1), abs=1e-6)
    for gradient, tower in zip(found, (task.query_tower, task.item_tower), strict=True):
        torch.testing.assert_close(gradient, tower.embedding.weight.grad.to_dense(), rtol=1e-5, atol=1e-7)


@pytest.mark.parametrize("anchor", ["interaction", "query"])
@pytest.mark.parametrize("correction", ["frequency", "none"])
@pytest.mark.parametrize("include_target", [False, True])
def test_the_cross_entropy_of_training_is_exact(anchor, correction, include_target):
    task = task_of(negatives="all", anchor=anchor, correction=correction, include_target=include_target)
    logged = {}
    task.log = lambda name, value, **_: logged.update({name: value.item()})
    batch = batch_of(range(len(PAIRS)))
    samples, scored = task._samples(*batch)
    if scored is None:
        task.entropic_risk("nu", samples, batch[2])
    task._log_cross_entropy(scored)
    logits = task(batch[0]) @ task.item_vectors(torch.arange(ITEMS)).T
    exact = nn.functional.cross_entropy(logits, batch[1]).item()
    assert logged == {"train/cross_entropy": pytest.approx(exact, rel=1e-6)}


@pytest.mark.parametrize("negatives", ["in_batch", "all"])
@pytest.mark.parametrize("correction", ["frequency", "none"])
@pytest.mark.parametrize("options", [{}, {"include_target": True}, {"normalize": True, "scale": 9.0}])
@pytest.mark.parametrize("dual", [SCENT(log_alpha=1.0), SoftplusASGD(0.3, 1e-2), MSVR(0.5, 0.5)])
def test_a_step_by_exponentials_is_that_of_the_scores(negatives, correction, options, dual, monkeypatch):
    found = []
    for by_scores in (False, True):
        task = task_of(dual, negatives=negatives, correction=correction, **options)
        if by_scores:
            monkeypatch.setattr(task, "_exponentials", lambda *_: None)
        optimizer = torch.optim.SGD(task.parameters(), lr=0.5)
        losses = []
        for rows in ([0, 2, 4, 6], [1, 2, 3, 4], [0, 2, 4, 6]):
            loss = task.training_step(batch_of(rows), 0)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            losses.append(loss.item())
        assert (task._samples(*batch_of([0, 2, 4, 6]))[1] is None) == (
            not by_scores and not (options.get("include_target") and correction == "none")
        )
        found.append((torch.tensor(losses), task.duals["nu"].nu, *(weight.detach() for weight in task.parameters())))
    for one, other in zip(*found, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-6, atol=1e-7)


@pytest.mark.parametrize("include_target", [False, True])
def test_a_query_as_anchor_has_the_same_gradient_where_nu_is_exact(include_target):
    """With ν at ℓ, as BSGD has it, it does not matter what the own score is subtracted from."""
    rows = [0, 2, 4, 6, 7]  # of five queries
    found = []
    for anchor in ("interaction", "query"):
        task = task_of(BSGD(), anchor=anchor, include_target=include_target)
        loss = task.training_step(batch_of(rows), 0)
        loss.backward()
        found.append([loss.item(), *(p.grad.to_dense() for p in task.parameters())])
    for one, other in zip(*found, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-6, atol=1e-8)


def test_repeated_queries_count_once():
    task = task_of(BSGD(), anchor="query")
    loss = task.training_step(batch_of([0, 1, 2, 5]), 0)  # query 0 twice
    batch = batch_of([0, 1, 2, 5])
    scored = task._scored(task._made(*batch[:2]), batch[2], False)
    means = scored.scores.masked_fill(~scored.mask, -math.inf).exp().sum(dim=1) / scored.mask.sum(dim=1)
    expected = [
        math.log((means[0] + means[1]) / 2) - float(scored.own[:2].mean()),
        math.log(means[2]) - float(scored.own[2]),
        math.log(means[3]) - float(scored.own[3]),
    ]
    assert loss.item() == pytest.approx(sum(expected) / 3, rel=1e-6)
    assert task.duals["nu"].visited.nonzero().flatten().tolist() == [0, 1, 3]


# ------------------------------------------------------------------ the ranking of all items


@pytest.mark.parametrize("chunk", [1, 4, 100])
@pytest.mark.parametrize("options", [{}, {"normalize": True, "scale": 8.0}, {"leave_out_seen": False}])
def test_ranking_against_torchmetrics(chunk, options):
    task = task_of(item_chunk=chunk, **options)
    relevant = torch.tensor([[5, 8, -1], [2, 5, 8], [8, -1, -1], [5, -1, -1]])
    queries = torch.tensor([0, 1, 4, 6])
    logits = (task(queries) @ task.item_vectors(torch.arange(ITEMS)).T * task.scale).detach()
    cross_entropy = torch.logsumexp(logits, dim=1, keepdim=True) - logits
    ranks, found = task.rank_items(queries, task(queries), relevant)
    torch.testing.assert_close(found, torch.cat([cross_entropy[i, row[row >= 0]] for i, row in enumerate(relevant)]))
    if task.leave_out_seen:
        for query, item in PAIRS:
            logits[queries == query, item] = -math.inf
    logits = logits.exp()  # in some versions of torchmetrics an item of a score of 0 or less is never found
    task.log_metrics = lambda stage, **values: task.stage_metrics[stage].update(**values)
    task.evaluation_step("val", (queries, relevant, queries))
    metrics = task.stage_metrics["val"].compute()
    target = torch.zeros(len(queries), ITEMS, dtype=torch.bool)
    for row, items in enumerate(relevant):
        target[row, items[items >= 0]] = True
    for name, function in (("recall", retrieval_recall), ("ndcg", retrieval_normalized_dcg)):
        for k in (1, 3):
            expected = np.mean([float(function(logits[row], target[row], top_k=k)) for row in range(len(queries))])
            assert float(metrics[f"val/{name}@{k}"]) == pytest.approx(expected, abs=1e-6)
    assert float(metrics["val/cross_entropy"]) == pytest.approx(found.mean().item(), abs=1e-5)
    assert (ranks[relevant < 0] == -1).all()


def test_what_training_never_had_comes_last():
    """By its number an item or a query says nothing; by its text it does."""
    task = task_of()
    ranks, _ = task.rank_items(torch.tensor([0]), task(torch.tensor([0])), torch.tensor([[0, 5]]))
    assert ranks[0, 0] == ITEMS - 1  # item 0 has no interaction
    assert ranks[0, 1] < ITEMS - 1
    pairs = Interactions(torch.tensor([0, 0]), torch.tensor([1, 2]), 2, 3)
    cold = task_of(pairs=pairs)
    assert cold.rank_items(torch.tensor([1]), cold(torch.tensor([1])), torch.tensor([[1]]))[0].item() == 2
    texts = hashed_ngrams([f"item {number}" for number in range(ITEMS)], "words")
    reading = task_of(item_tower=HashedTextTower(50, 4))
    reading.use_interactions(interactions(), texts)
    with torch.no_grad():
        vectors = reading.item_vectors(torch.arange(ITEMS))
    ranks, _ = reading.rank_items(torch.tensor([4]), vectors[:1], torch.tensor([[0]]))
    scores = vectors @ vectors[0]
    assert ranks.item() == int((scores > scores[0]).sum())


@pytest.mark.parametrize("chunk", [2, 50])
def test_predictions_by_name(tmp_path, chunk):
    task, data = recommendation(tmp_path, 16, item_chunk=chunk, top_k=4)
    writer = PredictionWriter(str(tmp_path / "p.csv"))
    export = VectorExport(str(tmp_path / "vectors"))
    quiet_trainer(callbacks=[writer, export]).predict(task, data)
    table = pd.read_csv(tmp_path / "p.csv")
    assert len(table) == data.num_queries
    queries, items = (np.load(tmp_path / "vectors" / f"{name}.npy") for name in ("queries", "items"))
    of_query, of_item = ((tmp_path / "vectors" / f"{n}.txt").read_text().split() for n in ("queries", "items"))
    assert (len(of_query), len(of_item)) == (len(queries), len(items)) == (data.num_queries, data.num_items)
    seen = pd.read_csv(tmp_path / "pairs" / "pairs.csv").groupby("user")["item"].agg(set)
    for row in range(3):
        scores = dict(zip(of_item, (items @ queries[row]).tolist(), strict=True))
        assert table["query"][row] == of_query[row]
        left = sorted(set(scores) - seen[of_query[row]], key=lambda name: -scores[name])[:4]
        assert [table[f"item_{place}"][row] for place in range(4)] == left
        assert table["score_0"][row] == pytest.approx(scores[left[0]], rel=1e-5)


def test_what_is_mined():
    """The best items that a query does not have in training; of fewer than asked for, all."""
    task = task_of(num_mined=8)
    task.mine()
    logits = (task(torch.arange(QUERIES)) @ task.item_vectors(torch.arange(ITEMS)).T).detach()
    for query in range(QUERIES):
        seen = {item for of, item in PAIRS if of == query}
        expected = sorted(set(range(ITEMS)) - seen, key=lambda item: -float(logits[query, item]))
        assert [item for item in task.mined[query].tolist() if item >= 0] == expected[:8]


def test_no_item_is_left():
    pairs = Interactions(torch.tensor([0, 0, 1]), torch.tensor([0, 1, 1]), 2, 2)
    task = task_of(pairs=pairs, top_k=2)
    queries = torch.tensor([0, 1])
    assert task.predict_step((queries, None, queries), 0)["item"].tolist() == [[-1, -1], [0, -1]]


# ------------------------------------------------------------------ training


@pytest.mark.parametrize("dual", [SCENT(), SOX(0.5), BSGD()], ids=repr)
@pytest.mark.parametrize(
    "options", [{}, {"negatives": "uniform", "num_negatives": 8}, {"anchor": "query"}, {"num_mined": 4}], ids=repr
)
def test_learns(tmp_path, dual, options):
    L.seed_everything(0, verbose=False)
    task, data = recommendation(tmp_path, 16, lr=0.1, **options)
    for variable in task.duals.values():
        variable.use(dual)
    pairs = data.interactions

    def cross_entropy():
        return task.rank_items(pairs.queries, task(pairs.queries), pairs.items.unsqueeze(1))[1].mean().item()

    before = cross_entropy()
    quiet_trainer(max_epochs=10, limit_val_batches=0).fit(task, datamodule=data)
    assert cross_entropy() < before - 0.2
    assert task.duals["nu"].visited.all()


def test_towers_of_text_share_what_they_know(tmp_path):
    """A word of a new definition is found, as its letters are known."""
    stems = [f"{a}{b}" for a in ("bar", "del", "fim", "gon", "kal") for b in ("tu", "ve", "wi", "xo")]
    rows = [(f"what {stem} does, {number}", f"{stem}{number}") for stem in stems for number in range(12)]
    path = tmp_path / "t.csv"
    path.write_text("\n".join(["means,word", *(f'"{meaning}",{word}' for meaning, word in rows)]))
    data = InteractionsDataModule(
        str(path),
        "means",
        "word",
        query_ngrams="words",
        item_ngrams="characters",
        leave_out="query",
        val_fraction=0.1,
        test_fraction=0.0,
        batch_size=48,
    )
    L.seed_everything(0, verbose=False)
    towers = {"query_tower": HashedTextTower(4096, 16), "item_tower": HashedTextTower(4096, 16, mode="sum")}
    task = RetrievalTask(data.num_queries, data.num_items, data.num_anchors, SCENT(), ks=(12,), lr=0.03, **towers)
    trainer = quiet_trainer(max_epochs=15, num_sanity_val_steps=0)
    trainer.fit(task, datamodule=data)
    assert trainer.callback_metrics["val/recall@12"] > 0.6


def test_a_step_touches_the_rows_of_the_batch_alone():
    task = task_of()
    before = [parameter.clone() for parameter in task.parameters()]
    optimizer = RowSparseAdam(task.trained_parameters(), lr=0.1)
    queries, items, index = batch_of([0, 4, 7])
    task.training_step((queries, items, index), 0).backward()
    assert all(parameter.grad.is_sparse for parameter in task.parameters())
    optimizer.step()
    for parameter, old, rows in zip(task.parameters(), before, (queries, items), strict=True):
        changed = (parameter != old).any(dim=1).nonzero().flatten().tolist()
        assert changed == sorted(set(rows.tolist()))


def test_resumed_in_the_middle_of_an_epoch_a_run_is_bit_identical(tmp_path):
    def fit(resume=None):
        L.seed_everything(1, verbose=False)
        task, data = recommendation(tmp_path, 16, negatives="uniform", num_negatives=8, num_mined=2)
        keep = ModelCheckpoint(tmp_path, "{step}", every_n_train_steps=10, save_top_k=-1)
        trainer = quiet_trainer(max_epochs=3, callbacks=[keep], enable_checkpointing=True, limit_val_batches=0)
        trainer.fit(task, datamodule=data, ckpt_path=resume, weights_only=True)
        return task, trainer.optimizers[0]

    whole, first = fit()
    resumed, second = fit(tmp_path / "step=10.ckpt")
    for key, value in whole.state_dict().items():
        assert torch.equal(value, resumed.state_dict()[key]), key
    for one, other in zip(first.state_dict()["state"].values(), second.state_dict()["state"].values(), strict=True):
        for key, value in one.items():
            assert torch.equal(torch.as_tensor(value), torch.as_tensor(other[key])), key


@pytest.mark.parametrize("own_tower", [False, True])
def test_a_checkpoint_loads(tmp_path, own_tower):
    given = {"item_tower": nn.Sequential(EmbeddingTower(40, 8), nn.Linear(8, 8))} if own_tower else {}
    task, data = recommendation(tmp_path, 16, num_mined=2, ks=(3, 5), **given)
    trainer = quiet_trainer(max_epochs=1, limit_val_batches=0)
    trainer.fit(task, datamodule=data)
    trainer.save_checkpoint(tmp_path / "a.ckpt")
    if own_tower:
        with pytest.raises(InputError, match="item_tower must be given to load_from_checkpoint again"):
            RetrievalTask.load_from_checkpoint(tmp_path / "a.ckpt")
    loaded = RetrievalTask.load_from_checkpoint(tmp_path / "a.ckpt", **given)
    for key, value in task.state_dict().items():
        assert torch.equal(value, loaded.state_dict()[key]), key
    assert set(loaded.stage_metrics["val"]) == set(task.stage_metrics["val"])


@pytest.mark.parametrize(("algorithm", "limit"), [("norm", 0.01), ("value", 1e-4)])
def test_clipping_and_other_optimisers(tmp_path, algorithm, limit):
    task, data = recommendation(tmp_path, 16, optimizer=lambda parameters: torch.optim.SparseAdam(parameters, lr=0.01))
    options = {"gradient_clip_val": limit, "gradient_clip_algorithm": algorithm, "accumulate_grad_batches": 2}
    quiet_trainer(max_epochs=1, limit_val_batches=0, **options).fit(task, datamodule=data)
    assert all(parameter.isfinite().all() for parameter in task.parameters())


# ------------------------------------------------------------------ bad input


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"negatives": "few"}, "negatives must be one of in_batch, uniform, all"),
        ({"correction": "sign"}, "correction must be one of frequency, none"),
        ({"anchor": "item"}, "anchor must be one of interaction, query"),
        ({"anchor": "query", "weight_step": "proximal"}, "anchor 'query' needs weight_step 'gradient'"),
        ({"ks": ()}, "ks must hold at least one k"),
        ({"ks": (0,)}, "k must be an integer of at least 1, got 0"),
        ({"scale": 0.0}, "scale must be a finite number above 0"),
        ({"dim": 0}, "dim must be an integer of at least 1"),
        ({"num_mined": ITEMS + 1}, f"num_mined must be an integer from 0 to {ITEMS}"),
        ({"num_negatives": 0}, "num_negatives must be an integer of at least 1"),
        ({"lr": -1.0}, "lr must be a finite number above 0"),
    ],
)
def test_bad_arguments(arguments, message):
    with pytest.raises(InputError, match=message):
        task_of(**arguments)


@pytest.mark.parametrize("negatives", ["in_batch", "uniform", "all"])
@pytest.mark.parametrize(
    ("part", "value", "message"),
    [
        (0, QUERIES, f"queries must be from 0 to {QUERIES - 1}, got {QUERIES}"),
        (0, -1, f"queries must be from 0 to {QUERIES - 1}, got -1"),
        (1, ITEMS, f"items must be from 0 to {ITEMS - 1}, got {ITEMS}"),
        (1, -3, f"items must be from 0 to {ITEMS - 1}, got -3"),
        (2, len(PAIRS), "index .*nu"),
        (2, -1, "index .*nu"),
    ],
)
def test_bad_numbers(negatives, part, value, message):
    batch = [numbers.clone() for numbers in batch_of([0, 4, 7])]
    batch[part][1] = value
    task = task_of(negatives=negatives)
    with pytest.raises((InputError, IndexError), match=message):
        task.training_step(tuple(batch), 0)
    assert not task.duals["nu"].visited.any()


def test_bad_interactions():
    task = task_of()
    task.use_interactions(None)
    with pytest.raises(InputError, match="correction 'frequency' of in-batch negatives needs the interactions"):
        task.training_step(batch_of([0, 1]), 0)
    with pytest.raises(InputError, match="num_items of the interactions is 9, the task's 5"):
        RetrievalTask(QUERIES, 5, 10, SCENT()).use_interactions(interactions())
    with pytest.raises(InputError, match="item_texts must have 9 rows, one for each, got 1"):
        task.use_interactions(interactions(), Ragged.of_lists([[1]]))
    with pytest.raises(InputError, match="labels must be integers"):
        task.training_step((torch.tensor([0]), torch.tensor([0.5]), torch.tensor([0])), 0)


@pytest.mark.parametrize(
    ("optimizer", "message"),
    [
        (torch.optim.Adam, "optimizer Adam takes no sparse gradients"),
        (lambda p: torch.optim.SGD(p, weight_decay=0.1), "SGD with weight_decay takes no sparse gradients"),
        (torch.optim.SparseAdam, "SparseAdam takes sparse gradients only"),
    ],
)
def test_optimisers_that_cannot(tmp_path, optimizer, message):
    tower = nn.Sequential(EmbeddingTower(23, 8), nn.Linear(8, 8))
    task, data = recommendation(tmp_path, 16, optimizer=optimizer, query_tower=tower)
    with pytest.raises(InputError, match=message):
        quiet_trainer(max_epochs=1).fit(task, datamodule=data)


def test_export_of_another_task(tmp_path):
    with pytest.raises(InputError, match="VectorExport needs a task with item vectors, such as RetrievalTask, got"):
        VectorExport(str(tmp_path)).on_predict_start(None, nn.Linear(1, 1))


def test_faiss_is_asked_for(tmp_path):
    faiss = pytest.importorskip("faiss", reason="tested without it below")
    task, data = recommendation(tmp_path, 16)
    export = VectorExport(str(tmp_path / "vectors"), faiss_index="Flat")
    quiet_trainer(callbacks=[export]).predict(task, data)
    index = faiss.read_index(str(tmp_path / "vectors" / "items.faiss"))
    queries, items = (np.load(tmp_path / "vectors" / f"{name}.npy") for name in ("queries", "items"))
    assert (index.search(queries, 1)[1][:, 0] == (queries @ items.T).argmax(axis=1)).all()


def test_faiss_is_not_there(tmp_path, monkeypatch):
    monkeypatch.setitem(__import__("sys").modules, "faiss", None)
    with pytest.raises(InputError, match="faiss_index needs faiss; install it with pip install faiss-cpu"):
        VectorExport(str(tmp_path), faiss_index="Flat")
