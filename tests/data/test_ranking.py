"""Query groups from SVMlight files, and the lists that are drawn of long ones."""

import bz2
import itertools

import numpy as np
import pytest
import torch
from sklearn.preprocessing import StandardScaler

from scent_lightning.data import RankingDataModule
from scent_lightning.data.ranking_files import drawn
from scent_lightning.errors import InputError
from scent_lightning.functional import list_scores, log_mean_exp


def queries(seed=0, count=12, longest=9, features=4, unanswerable=(3,)):
    """Lists of (relevance, features) by query; some without a relevant document, some longer than others."""
    generator = np.random.default_rng(seed)
    groups = {}
    for query in range(count):
        documents = generator.integers(2, longest + 1)
        relevance = generator.integers(0, 4, documents) * (query not in unanswerable)
        relevance[0] += query not in unanswerable
        groups[100 + query] = [(grade, 5 + 3 * generator.standard_normal(features)) for grade in relevance.tolist()]
    return groups


def lines(groups, first=1):
    for query, documents in groups.items():
        for grade, row in documents:
            values = " ".join(f"{number}:{value:.17g}" for number, value in enumerate(row, start=first))
            yield f"{grade} qid:{query} {values} # a comment"


def write(path, groups, first=1):
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("\n".join(lines(groups, first)) + "\n")
    return str(path)


@pytest.fixture
def folder(tmp_path):
    write(tmp_path / "train.txt", queries())
    write(tmp_path / "vali.txt", queries(1, 5, unanswerable=(0, 2)))
    write(tmp_path / "test.txt", queries(2, 4, features=3))
    return tmp_path


def test_lists_are_those_of_the_file(folder):
    data = RankingDataModule(str(folder), batch_size=3, eval_batch_size=2)
    data.setup("fit")
    groups = {query: documents for query, documents in queries().items() if query != 103}
    assert (data.num_anchors, data.num_features) == (len(groups), 4)
    scaler = StandardScaler().fit(np.array([row for documents in groups.values() for _, row in documents]))
    seen = []
    for features, relevance, mask, index in data.train_dataloader():
        assert features.shape[:2] == relevance.shape == mask.shape
        assert mask.dtype == torch.bool
        assert mask.any(dim=0).all()  # no longer than the longest
        for row, query in enumerate(index.tolist()):
            documents = list(groups.values())[query]
            assert relevance[row][mask[row]].tolist() == [grade for grade, _ in documents]
            expected = scaler.transform([row for _, row in documents])
            torch.testing.assert_close(features[row][mask[row]].numpy(), expected.astype(np.float32))
            assert not features[row][~mask[row]].any()
            seen.append(query)
    assert sorted(seen) == list(range(len(groups)))
    assert [batch[3].tolist() for batch in data.val_dataloader()] == [[0, 1], [2, 3], [4]]


def test_a_shorter_file_has_zeros(folder):
    """Features that no row of the test file has; scaled as in training."""
    data = RankingDataModule(str(folder), standardize=False, batch_size=2)
    data.setup("test")
    features, _, mask, _ = next(iter(data.test_dataloader()))
    assert features.shape[2] == 4
    assert not features[..., 3].any()
    assert features[mask][:, :3].abs().min() > 0


@pytest.mark.parametrize("first", [0, 1])
@pytest.mark.parametrize("ending", ["train.txt", "train", "train.svm.bz2"])
def test_features_are_counted_from_0_or_1(tmp_path, first, ending):
    """The training file says which, for files that have no feature 0 or 1 in any row too."""
    text = "\n".join(lines(queries(), first))
    path = tmp_path / ending
    path.write_bytes(bz2.compress(text.encode())) if ending.endswith("bz2") else path.write_text(text)
    (tmp_path / "val.txt").write_text(f"1 qid:3 {first + 2}:7\n0 qid:3 {first + 1}:8\n")
    data = RankingDataModule(str(tmp_path), standardize=False, batch_size=2)
    data.setup("fit")
    assert data.num_features == 4
    assert next(iter(data.val_dataloader()))[0].tolist() == [[[0, 0, 7, 0], [0, 8, 0, 0]]]


def test_documents_of_a_query_need_not_follow_each_other(tmp_path):
    write(tmp_path / "a.txt", groups := queries(unanswerable=()))
    mixed = [line for line in itertools.chain(*itertools.zip_longest(*chunks(groups))) if line]
    (tmp_path / "b.txt").write_text("\n".join(mixed))
    one, other = (RankingDataModule(str(tmp_path / f"{name}.txt"), val_fraction=0, batch_size=2) for name in "ab")
    for first, second in zip(one.predict_dataloader(), other.predict_dataloader(), strict=True):
        for part, same in zip(first, second, strict=True):
            torch.testing.assert_close(part, same)


def chunks(groups):
    return [list(lines({query: documents})) for query, documents in groups.items()]


def test_one_file_is_split_by_query(tmp_path):
    path = write(tmp_path / "all.txt", queries(count=20, unanswerable=()))
    data = RankingDataModule(path, val_fraction=0.25, test_fraction=0.1, batch_size=4)
    ids = {split: data.existing(split).ids.tolist() for split in ("train", "val", "test")}
    assert {split: len(found) for split, found in ids.items()} == {"train": 13, "val": 5, "test": 2}
    assert sorted(itertools.chain(*ids.values())) == list(range(100, 120))
    other = RankingDataModule(path, val_fraction=0.25, test_fraction=0.1, split_seed=1)
    assert other.existing("val").ids.tolist() != ids["val"]
    assert len(data.existing("predict")) == 20


def test_long_lists_are_drawn_anew_every_epoch(tmp_path):
    path = write(
        tmp_path / "all.txt",
        {1: [(2, [0.0]), (1, [1.0]), *((0, [float(i)]) for i in range(2, 30))], 2: [(1, [5.0]), (0, [6.0])]},
    )
    data = RankingDataModule(path, val_fraction=0, list_size=6, standardize=False, batch_size=2)
    rows = data.existing("train")
    seen = set()
    for epoch in range(60):
        rows.epoch = epoch
        features, relevance, mask = rows.fetch(np.array([0, 1]))
        assert relevance.tolist() == [[2, 1, 0, 0, 0, 0], [1, 0, 0, 0, 0, 0]]
        assert mask.tolist() == [[1, 1, 7, 7, 7, 7], [1, 1, 0, 0, 0, 0]]
        again = rows.fetch(np.array([1, 0]))
        assert torch.equal(again[0].flip(0), features)  # whatever else is in the batch
        seen.add(tuple(features[0, 2:, 0].tolist()))
    assert len(seen) > 50
    assert set(itertools.chain(*seen)) == set(map(float, range(2, 30)))
    assert data.data_summary()["training"] == "2 queries of 2 to 30 documents; 1 are sampled, to 6 documents"


@pytest.mark.parametrize("relevance", [[2, 0, 0, 1, 0, 0, 0], [0, 1, 0, 0], [3, 1, 2, 1, 0, 0]])
@pytest.mark.parametrize("size", [2, 3, 4])
def test_the_estimate_of_a_drawn_list_is_unbiased(relevance, size):
    """Over all draws, the exponential of a list's cross-entropy; a relevance that has no room is in all the same."""
    relevance = np.array(relevance)
    logits = torch.randn(len(relevance), dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    weights = torch.from_numpy(relevance).double()

    class Fixed:
        def choice(self, others, room, replace):
            assert not replace
            return np.array(list(itertools.combinations(others, room))[self.number])

    generator, estimates = Fixed(), []
    others = int((relevance == 0).sum())
    room = min(max(size - (relevance > 0).sum(), 1), others)
    for generator.number in range(len(list(itertools.combinations(range(others), room)))):
        documents, counts = drawn(relevance, size, generator)
        assert counts.sum() == pytest.approx(len(relevance))
        scores, mask = list_scores(
            logits[None, documents], weights[None, documents], torch.from_numpy(counts).double()[None]
        )
        estimates.append(log_mean_exp(scores, mask).exp())
    expected, mask = list_scores(logits[None], weights[None], torch.ones(1, len(relevance), dtype=torch.bool))
    assert torch.stack(estimates).mean().item() == pytest.approx(log_mean_exp(expected, mask).exp().item(), rel=1e-6)


def test_a_checkpoint_scales_other_files_alike(folder, tmp_path):
    trained = RankingDataModule(str(folder), batch_size=2)
    trained.setup("fit")
    state = trained.state_dict()
    assert set(state) == {"num_features", "zero_based", "mean", "scale", "rows", "fingerprint"}
    # The same rows from 0, all of them shifted: by itself that would be scaled away.
    shifted = {query: [(grade, row + 1) for grade, row in documents] for query, documents in queries(2, 4).items()}
    other = RankingDataModule(write(tmp_path / "other" / "new.txt", shifted))
    other.load_state_dict(state)
    features, _, mask, _ = next(iter(other.predict_dataloader()))
    rows = np.array([row for documents in shifted.values() for _, row in documents])
    expected = (rows - state["mean"].numpy()) / state["scale"].numpy()
    torch.testing.assert_close(features[mask].numpy(), expected.astype(np.float32))
    assert (other.num_features, trained.changed_rows(), other.changed_rows()) == (4, "none", "replaced")


def test_changed_rows(folder):
    state = RankingDataModule(str(folder), batch_size=2).state_dict()
    for change, text in (("none", ""), ("appended", "1 qid:900 1:3\n0 qid:900 1:4\n"), ("replaced", None)):
        file = folder / "train.txt"
        file.write_text(
            file.read_text() + text if text is not None else file.read_text().replace("2 qid:101", "3 qid:101")
        )
        data = RankingDataModule(str(folder), batch_size=2)
        data.load_state_dict(state)
        assert data.changed_rows() == change


def test_summary_says_what_is_left_out(folder):
    data = RankingDataModule(str(folder), batch_size=2)
    said = data.data_summary()
    assert said["passed over"] == "1 training query without a relevant document"
    assert said["validation"].startswith("5 queries of ")
    assert said["validation"].endswith(" documents, 2 without a relevant one, which no metric counts")
    assert said["features"] == "4, standardized"


GOOD = "1 qid:1 1:2 2:3\n0 qid:1 1:4 2:1\n2 qid:2 1:2 2:7\n"


@pytest.mark.parametrize(("text", "message"), [
    ("", "all.txt has no document$"),
    (GOOD + "1 1:2\n0 1:3\n", r"has 2 of 5 documents without a query id \(lines 4, 5\): each needs one, "),
    ("1 1:2\n", "has 1 of 1 documents without a query id"),
    (GOOD + "-1 qid:2 1:2\n", r"has relevance -1 in row 3 \(counted from 0\); it must be a finite number of "),
    (GOOD + "nan qid:2 1:2\n", r"has relevance nan in row 3"),
    (GOOD + "inf qid:2 1:2\n", r"has relevance inf in row 3"),
    (GOOD + "1 qid:3 2:nan\n0 qid:3 1:inf\n", r"has missing or non-finite features in rows 3, 4 \(counted from 0\)"),
    (GOOD.replace("1 qid", "0 qid").replace("2 qid", "0 qid"), "no training query of .* has a document of a rel"),
    (GOOD + "1 qid:a 1:2\n", "the query id in line 4 of .* must be an integer, got 'a'"),
    ("price,rooms\n3,4\n", "cannot be read as an SVMlight file"),
    ("1 qid:3\n0 qid:3\n", "has no feature in any row"),
    (GOOD + "1 qid:4 1:1e39\n", r"column '1' of .* has 1e\+39 in row 3 .*, which float32 cannot hold"),
])  # fmt: skip
def test_files_that_cannot_be_used(tmp_path, text, message):
    path = tmp_path / "all.txt"
    path.write_text(text)
    data = RankingDataModule(str(path), val_fraction=0, batch_size=1, standardize="1e39" not in text)
    with pytest.raises(InputError, match=message):
        data.setup("fit")


def test_folders_that_cannot_be_used(folder):
    write(folder / "test.txt", queries(features=5))
    with pytest.raises(InputError, match=r"test.txt has 5 features, and the training rows have 4"):
        RankingDataModule(str(folder), batch_size=2).setup("test")
    (folder / "train.svm").write_text(GOOD)
    with pytest.raises(InputError, match=r"has several files of split 'train': train\.svm, train\.txt"):
        RankingDataModule(str(folder), batch_size=2).setup("fit")
    (folder / "train.svm").unlink()
    (folder / "train.txt").unlink()
    with pytest.raises(
        InputError, match=r"path needs a split 'train': there is no .*train\.txt; .* has: test\.txt, vali\.txt"
    ):
        RankingDataModule(str(folder)).setup("fit")
    with pytest.raises(InputError, match=r"is neither a folder with train\.txt nor a file of documents by query"):
        RankingDataModule(str(folder / "nowhere")).setup("fit")


@pytest.mark.parametrize(("arguments", "message"), [
    ({"list_size": 1}, "list_size must be None or an integer of at least 2, got 1"),
    ({"val_fraction": 1.0}, r"val_fraction must be a number in \[0, 1\), got 1"),
    ({"val_fraction": 0.5, "test_fraction": 0.5}, r"val_fraction \+ test_fraction must be below 1, got 0.5 \+ 0.5"),
    ({"split_seed": -1}, "split_seed must be an integer of at least 0, got -1"),
    ({"batch_size": 50}, "batch_size 50 is larger than the data: there are 10 training rows"),
    ({"batch_size": 2, "val_fraction": 0.01}, "val_fraction of the 12 queries of .* leaves none to val"),
])  # fmt: skip
def test_arguments(tmp_path, arguments, message):
    path = write(tmp_path / "all.txt", queries(unanswerable=()))
    with pytest.raises(InputError, match=message):
        RankingDataModule(path, **arguments).setup("fit")


def test_no_split_to_test_on(tmp_path):
    data = RankingDataModule(write(tmp_path / "all.txt", queries()), batch_size=2)
    with pytest.raises(
        InputError, match=r"test_fraction is 0, and .*all\.txt is a single file: there are no rows of split 'test'"
    ):
        data.setup("test")
