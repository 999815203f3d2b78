"""Features with several labels a row, from a padded matrix or a sparse one."""

import numpy as np
import pytest
import torch
from scipy import sparse

from scent_lightning.data import FeatureDataModule
from scent_lightning.errors import InputError

ANSWERS = [[3], [0, 4], [], [1, 4, 2], [4, 0]]
WEIGHTS = [[1.0], [0.5, 2.0], [], [1.0, 3.0, 2.0], [1.0, 1.0]]


def padded(answers=ANSWERS, width=4):
    return np.array([row + [-1] * (width - len(row)) for row in answers])


def as_sparse(weights=WEIGHTS, classes=6):
    matrix = sparse.lil_matrix((len(ANSWERS), classes), dtype=np.float32)
    for row, (labels, values) in enumerate(zip(ANSWERS, weights, strict=True)):
        for label, value in zip(labels, values, strict=True):
            matrix[row, label] = value
    return matrix.tocsr()


def write(folder, labels, rows=5, split="train"):
    (folder / split).mkdir(parents=True, exist_ok=True)
    np.save(folder / split / "features.npy", np.arange(rows * 2, dtype=np.float32).reshape(rows, 2))
    if sparse.issparse(labels):
        sparse.save_npz(folder / split / "labels.npz", labels)
    else:
        np.save(folder / split / "labels.npy", labels)
    return FeatureDataModule(str(folder), batch_size=2)


def by_row(data):
    """Answers and weights of every training row, by its index."""
    found = {}
    for _, answers, *weights, index in data.train_dataloader():
        for row, number in enumerate(index.tolist()):
            there = answers[row] >= 0
            values = weights[0][row][there].tolist() if weights else None
            found[number] = dict(zip(answers[row][there].tolist(), values or [None] * int(there.sum()), strict=True))
    return found


@pytest.mark.parametrize("kind", ["padded", "anywhere", "sparse", "weights"])
def test_answers_of_each_row(tmp_path, kind):
    labels = {
        "padded": padded(),
        "anywhere": padded()[:, ::-1],  # −1 first
        "sparse": as_sparse([[1.0] * len(row) for row in ANSWERS]),
        "weights": as_sparse(),
    }[kind]
    data = write(tmp_path, labels)
    with pytest.warns(UserWarning, match="1 rows of split 'train' have no label and add nothing: 2"):
        data.setup("fit")
    of_each = WEIGHTS if kind == "weights" else [[None] * len(row) for row in ANSWERS]
    assert by_row(data) == {
        row: dict(zip(labels, weights, strict=True))
        for row, (labels, weights) in enumerate(zip(ANSWERS, of_each, strict=True))
    }
    assert data.num_classes == (6 if "s" in kind[:1] or kind == "weights" else 5)
    assert data.class_counts[:5].tolist() == [2, 1, 1, 1, 3]


def test_a_batch_is_as_wide_as_its_widest_row(tmp_path):
    for labels, folder in ((padded(), tmp_path / "a"), (as_sparse(), tmp_path / "b")):
        rows = write(folder, labels).existing("train")
        assert [rows[index][1].shape for index in ([0], [0, 1], [2], [3, 2])] == [(1, 1), (2, 2), (1, 0), (2, 3)]
        assert all(part.dtype == torch.int64 for part in (rows[[0, 3]][1], rows[[0, 3]][-1]))


def test_changed_labels_are_seen(tmp_path):
    """Appended rows, another label, another weight."""
    for name, first, more, other in (
        ("padded", padded(), np.concatenate([padded(), padded()[:1]]), np.where(padded() == 2, 0, padded())),
        ("sparse", as_sparse(), sparse.vstack([as_sparse(), as_sparse()[:1]]), as_sparse([[9.0], *WEIGHTS[1:]])),
    ):
        state = write(tmp_path / name, first).state_dict()
        for labels, change in ((first, "none"), (more, "appended"), (other, "replaced")):
            data = write(tmp_path / name, labels, rows=labels.shape[0])
            data.load_state_dict(state)
            assert data.changed_rows() == change


def test_other_splits_and_rows_to_predict(tmp_path):
    write(tmp_path, as_sparse())
    write(tmp_path, padded(), split="val")
    write(tmp_path, padded(), split="predict")
    data = write(tmp_path, as_sparse())
    data.setup("fit")
    assert [len(batch) for batch in data.val_dataloader()] == [3]
    assert [len(batch) for batch in data.predict_dataloader()] == [3]
    (tmp_path / "predict" / "labels.npy").unlink()
    assert next(iter(write(tmp_path, as_sparse()).predict_dataloader()))[1] is None


@pytest.mark.parametrize(("labels", "message"), [
    (padded()[:4], "features and labels of split 'train' differ in length: .* has 5 rows, the labels have 4"),
    (as_sparse()[:4], "features and labels of split 'train' differ in length: .* has 5 rows, the labels have 4"),
    (padded().astype(float), r"labels.npy must hold integers of shape \(n,\) or \(n, P\), got float64 \(5, 4\)"),
    (padded() - 1, "labels of split 'train' must be at least 0, or -1 for none, got -2 in row 0"),
    (np.where(padded() == 2, 4, padded()), "labels of split 'train' must name a class once, got 4 twice in row 3"),
    (np.full((5, 2), -1), "labels of split 'train' have no class in any row"),
    (as_sparse([[1.0], [0.5, -2.0], [], [1.0, 1.0, 1.0], [1.0, 1.0]]), r"labels.npz has weight -2 in row 1 \(counted"),
    (as_sparse([[1.0], [0.5, 1.0], [], [1.0, np.nan, 1.0], [1.0, 1.0]]), r"labels.npz has weight nan in row 3 "),
])  # fmt: skip
def test_labels_that_cannot_be_used(tmp_path, labels, message):
    with pytest.raises(InputError, match=message):
        write(tmp_path, labels).setup("fit")


@pytest.mark.parametrize(("labels", "message"), [
    (padded(), "must be at least 0 and below num_classes 4, or -1 for none, got 4 in row 1"),
    (as_sparse(), "labels of split 'train' have 6 columns, and num_classes is 4"),
])  # fmt: skip
def test_more_classes_than_said(tmp_path, labels, message):
    write(tmp_path, labels)
    with pytest.raises(InputError, match=message):
        FeatureDataModule(str(tmp_path), batch_size=2, num_classes=4).setup("fit")


def test_a_damaged_archive(tmp_path):
    write(tmp_path, as_sparse())
    (tmp_path / "train" / "labels.npz").write_bytes(b"PK nothing")
    with pytest.raises(InputError, match=r"cannot read .*labels\.npz as a sparse matrix of scipy's: "):
        FeatureDataModule(str(tmp_path), batch_size=2).setup("fit")
