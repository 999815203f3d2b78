"""Features from files and synthetic ones: values, order, laziness, distributions, and every bad input."""

import pickle
import shutil
from itertools import chain

import lightning as L
import numpy as np
import pytest
import torch

from scent_lightning.data import feature_files
from scent_lightning.data.features import FeatureDataModule, SyntheticFeatureDataModule
from scent_lightning.data.hashing import STEP, hashed_keys, mix, normal, uniform
from scent_lightning.duals import SOX
from scent_lightning.errors import InputError
from scent_lightning.tasks import ExtremeClassificationTask
from tests.helpers import Steps, quiet_trainer

ROWS = {"train": 23, "val": 7, "test": 5}
WIDTH = 4


def arrays(split, dtype=np.float32):
    generator = np.random.default_rng(ROWS[split])
    features = generator.standard_normal((ROWS[split], WIDTH)).astype(dtype)
    return features, generator.integers(0, 6, ROWS[split])


def write(folder, splits=ROWS, dtype=np.float32, suffix="npy"):
    for split in splits:
        (folder / split).mkdir(parents=True)
        for name, array in zip(("features", "labels"), arrays(split, dtype), strict=True):
            save(folder / split / f"{name}.{suffix}", array)
    return folder


def save(path, array):
    if path.suffix == ".npy":
        np.save(path, array)
    else:
        torch.save(torch.as_tensor(array), path)


def rows_of(loader):
    batches = list(loader)
    return tuple(torch.cat([batch[i] for batch in batches]) for i in range(3))


def module(folder, **arguments):
    return FeatureDataModule(str(folder), **{"batch_size": 5, "eval_batch_size": 3, **arguments})


def trainer():
    return L.Trainer(
        max_epochs=1,
        accelerator="cpu",
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )


@pytest.mark.parametrize("dtype", [np.float16, np.float32])
@pytest.mark.parametrize("suffix", ["npy", "pt"])
def test_files(tmp_path, dtype, suffix):
    data = module(write(tmp_path, dtype=dtype, suffix=suffix))
    assert (data.num_features, data.num_anchors) == (WIDTH, 23)
    assert data.num_classes == max(arrays(split)[1].max() for split in ROWS) + 1
    loaders = {"train": data.train_dataloader(), "val": data.val_dataloader(), "test": data.test_dataloader()}
    for split, loader in loaders.items():
        features, labels, index = rows_of(loader)
        assert (features.dtype, labels.dtype, index.dtype) == (torch.float32, torch.int64, torch.int64)
        expected_features, expected_labels = arrays(split, dtype)
        np.testing.assert_array_equal(features, expected_features[index].astype(np.float32))
        np.testing.assert_array_equal(labels, expected_labels[index])
        order = index.tolist()
        assert sorted(order) == list(range(ROWS[split]))
        assert (order == sorted(order)) == (split != "train")
    assert [len(batch[2]) for batch in loaders["train"]] == [5, 5, 5, 5, 3]
    assert [len(batch[2]) for batch in loaders["val"]] == [3, 3, 1]


@pytest.mark.parametrize("suffix", ["npy", "pt"])
def test_any_order_repeated_rows_and_single_rows(tmp_path, suffix):
    dataset = module(write(tmp_path, suffix=suffix)).train_dataloader().dataset
    features, labels = arrays("train")
    chosen = [22, 0, 7, 7, 3, 22]
    batch = dataset.__getitems__(chosen)
    np.testing.assert_array_equal(batch[0], features[chosen])
    np.testing.assert_array_equal(batch[1], labels[chosen])
    assert batch[2].tolist() == chosen
    x, y, index = dataset[9]
    assert (x.tolist(), y.item(), index.item()) == (features[9].tolist(), labels[9], 9)
    assert len(list(dataset)) == 23
    for outside in (-1, 23):
        with pytest.raises(IndexError, match="the split has 23 rows"):
            dataset.__getitems__([0, outside])


def test_batches_are_the_callers_own(tmp_path):
    dataset = module(write(tmp_path)).train_dataloader().dataset
    dataset.__getitems__([0, 1])[0].zero_()
    np.testing.assert_array_equal(dataset.__getitems__([0, 1])[0], arrays("train")[0][:2])


def test_files_are_mapped_not_read(tmp_path, monkeypatch):
    dataset = module(write(tmp_path / "npy")).train_dataloader().dataset
    assert isinstance(dataset.dataset.features, np.memmap)
    features, _ = arrays("train")
    features[4] = 8.0
    np.save(tmp_path / "npy" / "train" / "features.npy", features)  # same size: the map sees it
    assert dataset[4][0].tolist() == [8.0] * WIDTH

    load, calls = torch.load, []
    monkeypatch.setattr(torch, "load", lambda *a, **k: calls.append(k) or load(*a, **k))
    module(write(tmp_path / "pt", suffix="pt")).setup("fit")
    assert len(calls) == 6
    assert all(call["mmap"] and call["weights_only"] for call in calls)


def test_pickled_split_holds_a_path_not_its_rows(tmp_path):
    dataset = module(write(tmp_path)).train_dataloader().dataset
    dumped = pickle.dumps(dataset)
    assert len(dumped) < 400
    assert torch.equal(pickle.loads(dumped).__getitems__([3, 1])[0], dataset.__getitems__([3, 1])[0])


def test_files_in_a_loader_process(tmp_path):
    data = module(write(tmp_path), num_workers=1)
    np.testing.assert_array_equal(rows_of(data.test_dataloader())[0], arrays("test")[0])


def test_npy_before_pt_and_other_integer_types(tmp_path):
    write(tmp_path, ["train"])
    torch.save(torch.zeros(2, 9), tmp_path / "train" / "features.pt")
    np.save(tmp_path / "train" / "labels.npy", arrays("train")[1].astype(">u2"))
    data = module(tmp_path)
    assert data.num_features == WIDTH
    _, labels, index = rows_of(data.train_dataloader())
    np.testing.assert_array_equal(labels, arrays("train")[1][index])


def test_num_classes_given(tmp_path):
    assert module(write(tmp_path), num_classes=360_232).num_classes == 360_232


def test_epochs_are_shuffled_by_their_number_alone(tmp_path):
    loader = module(write(tmp_path)).train_dataloader()

    def order(epoch):
        loader.sampler.set_epoch(epoch)
        return rows_of(loader)[2].tolist()

    first = order(0)
    assert order(1) != first
    torch.rand(5)
    assert order(0) == first


def test_each_process_has_its_own_rows(tmp_path):
    write(tmp_path, ["train"])
    seen = []
    for rank in range(2):
        data = module(tmp_path)
        data.trainer = type("Trainer", (), {"world_size": 2, "global_rank": rank, "current_epoch": 0})()
        seen.append(set(rows_of(data.train_dataloader())[2].tolist()))
    assert seen[0] | seen[1] == set(range(23))
    assert not seen[0] & seen[1]


def test_trainer_with_all_splits(tmp_path):
    write(tmp_path)
    model = Steps()
    trainer().fit(model, module(tmp_path))
    trainer().test(model, module(tmp_path), verbose=False)
    labels = trainer().predict(model, module(tmp_path))
    assert sorted(chain(*model.seen["train"])) == list(range(23))
    assert model.seen["val"][-7:] == list(range(7))  # after two sanity batches
    assert model.seen["test"] == model.seen["predict"] == list(range(5))
    np.testing.assert_array_equal(torch.cat(labels), arrays("test")[1])


def test_trainer_without_a_validation_split(tmp_path):
    write(tmp_path, ["train"])
    model = Steps()
    trainer().fit(model, module(tmp_path))
    assert sorted(chain(*model.seen["train"])) == list(range(23))
    assert model.seen["val"] == []
    with pytest.raises(InputError, match=r"val_split 'val': missing split, .* has: train"):
        trainer().validate(model, module(tmp_path))
    with pytest.raises(InputError, match=r"test_split 'test': missing split, .* has: train"):
        trainer().test(model, module(tmp_path))


@pytest.mark.parametrize(
    ("there", "arguments", "expected"),
    [
        (["train", "val", "test"], {}, 5),
        (["train", "val"], {}, 7),
        (["train"], {}, 23),
        (["train", "val", "test"], {"test_split": "val"}, 7),
    ],
)
def test_predict_takes_the_first_split_there_is(tmp_path, there, arguments, expected):
    index = rows_of(module(write(tmp_path, there), **arguments).predict_dataloader())[2]
    assert index.tolist() == list(range(expected))


DEAD = {
    "labels from 1": (
        [1, 2, 3, 1, 2, 3],
        [1, 3],
        None,
        r"1 of 4 classes .* row: 0; do the labels start at 1\?",
    ),
    "in another split only": (
        [0, 1, 2, 0, 1, 2],
        [0, 4, 4, 5, 1],
        None,
        "3 of 6 classes have no training row: 3, 4, 5; 3 rows of split 'val' are of 2 of them: 4, 5$",
    ),
    "a gap": ([0, 2, 4, 0, 2, 4], [0, 2], None, "2 of 5 classes have no training row: 1, 3$"),
    "more classes than labels": (
        [0, 1, 2, 0, 1, 2],
        [0],
        100,
        "97 of 100 .* training row: 3, 4, 5, 6, 7, … \\(97 in all\\)$",
    ),
    "both": ([1, 3, 1, 3, 1, 3], [0, 2], None, "2 of 4 .* row: 0, 2; 2 rows of split 'val' are of 2 of them: 0, 2$"),
}


@pytest.mark.parametrize(("train", "val", "num_classes", "message"), DEAD.values(), ids=DEAD.keys())
@pytest.mark.parametrize("at_once", [4, 2**20])
def test_classes_without_a_training_row_are_named(tmp_path, monkeypatch, at_once, train, val, num_classes, message):
    monkeypatch.setattr(feature_files, "COUNTED_AT_ONCE", at_once)
    for split, labels in (("train", train), ("val", val)):
        (tmp_path / split).mkdir()
        save(tmp_path / split / "features.npy", np.ones((len(labels), 2), dtype=np.float32))
        save(tmp_path / split / "labels.npy", np.array(labels, dtype=np.uint16))
    data = module(tmp_path, batch_size=2, num_classes=num_classes)
    with pytest.warns(UserWarning, match=message) as said:
        data.setup("fit")
    assert len(said) == 1


def test_nothing_is_said_where_every_class_has_a_row(tmp_path, recwarn):
    module(write(tmp_path)).setup("fit")
    module(tmp_path).setup("validate")
    assert not recwarn.list


def test_splits_of_other_names(tmp_path):
    write(tmp_path)
    (tmp_path / "val").rename(tmp_path / "dev")
    data = module(tmp_path, val_split="dev", test_split="train")
    data.setup("validate")
    assert len(rows_of(data.val_dataloader())[2]) == 7
    assert rows_of(data.test_dataloader())[2].tolist() == list(range(23))
    misspelt = (
        ("fit", {"val_split": "valid"}),
        ("validate", {"val_split": "valid"}),
        ("test", {"test_split": "tset"}),
    )
    for stage, arguments in misspelt:
        with pytest.raises(InputError, match=r"missing split, there is no folder .*(valid|tset); .* dev, test, train"):
            module(tmp_path, **arguments).setup(stage)
    with pytest.raises(InputError, match=r"test_split 'tset': missing split"):
        module(tmp_path, test_split="tset").predict_dataloader()


@pytest.mark.parametrize("suffix", ["npy", "pt"])
@pytest.mark.parametrize("dtype", [np.float16, np.float32])
@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf])
def test_a_bad_feature_is_found_with_its_batch(tmp_path, suffix, dtype, value):
    write(tmp_path, dtype=dtype, suffix=suffix)
    features, _ = arrays("val", dtype)
    features[[6, 4], [1, 0]] = value
    save(tmp_path / "val" / f"features.{suffix}", features)
    data = module(tmp_path)
    data.setup("fit")
    dataset = data.val_dataloader().dataset
    np.testing.assert_array_equal(dataset.__getitems__([3, 5, 0])[0], features[[3, 5, 0]])
    with pytest.raises(InputError, match=r"features of split 'val' are NaN or infinite in row 4 \(counted from 0\)"):
        dataset.__getitems__([5, 6, 0, 4])


def test_a_sum_that_overflows_is_no_bad_feature(tmp_path):
    write(tmp_path, ["train"])
    features = np.full((23, WIDTH), 3e38, dtype=np.float32)
    np.save(tmp_path / "train" / "features.npy", features)
    assert (rows_of(module(tmp_path).train_dataloader())[0] == features[0, 0]).all()


def put(split, name, array):
    return lambda folder: save(folder / split / name, array)


def remove(*names):
    def change(folder):
        for name in names:
            (shutil.rmtree if (folder / name).is_dir() else type(folder).unlink)(folder / name)

    return change


def cut(name, size):
    return lambda folder: (folder / name).write_bytes((folder / name).read_bytes()[:size])


def as_pt(value, **arguments):
    def change(folder):
        (folder / "train" / "features.npy").unlink()
        torch.save(value, folder / "train" / "features.pt", **arguments)

    return change


def labels(split, **changes):
    array = arrays(split)[1]
    for row, value in changes.items():
        array[int(row[1:])] = value
    return array


def no_file(folder):
    np.savez(folder / "x.npz", a=np.zeros(3))
    (folder / "x.npz").rename(folder / "train" / "features.npy")


CASES = [
    (remove("train", "val", "test"), {}, r"path needs a split 'train': missing split, .*train; .* has: no folder"),
    (remove("train"), {}, r"path needs a split 'train': missing split, there is no folder .*train; .* has: test, val"),
    (remove("train/features.npy"), {}, "train has neither features.npy nor features.pt"),
    (remove("val/labels.npy"), {}, "val has neither labels.npy nor labels.pt"),
    (put("val", "labels.npy", np.zeros(6, int)), {}, r"'val' differ in length: .*features.npy has 7 rows, .* has 6$"),
    (put("train", "features.npy", np.zeros(23, np.float32)), {}, r"features.npy must have shape \(n, D\) .* \(23,\)"),
    (put("train", "features.npy", np.zeros((23, 0), np.float32)), {}, r"with D at least 1, got \(23, 0\)"),
    (put("train", "features.npy", np.zeros((23, 4))), {}, "must be float16 or float32, got float64"),
    (put("train", "labels.npy", np.zeros(23)), {}, "labels.npy must hold integers, got float64"),
    (put("train", "labels.npy", np.zeros(23, bool)), {}, "labels.npy must hold integers, got bool"),
    (put("train", "labels.npy", np.zeros((23, 1), int)), {}, r"labels.npy must have shape \(n,\), got \(23, 1\)"),
    (put("test", "features.npy", np.zeros((5, 3), np.float16)), {}, "'train' has 4, 'test' has 3"),
    (
        put("val", "labels.npy", labels("val", r5=6, r3=7)),
        {"num_classes": 6},
        r"labels of split 'val' must be at least 0 and below num_classes 6, got 7 in row 3 \(counted from 0\)",
    ),
    (put("train", "labels.npy", labels("train", r9=-2)), {}, "split 'train' must be at least 0, got -2 in row 9 "),
    (put("train", "labels.npy", labels("train", r9=-1)), {"num_classes": 6}, "below num_classes 6, got -1 in row 9 "),
    (cut("train/features.npy", 200), {}, r"cannot read .*features.npy as one plain array, .*: mmap length is greater"),
    (cut("train/features.npy", 0), {}, "cannot read .*features.npy as one plain array, .*: No data left in file$"),
    (lambda f: (f / "train" / "labels.npy").write_bytes(b"0, 1, 2"), {}, r"cannot read .*labels.npy .* data$"),
    (put("train", "labels.npy", np.array([{}, 1], object)), {}, "cannot read .*labels.npy .*: Array can't be memory-m"),
    (no_file, {}, "features.npy must hold one array, got NpzFile"),
    (as_pt({"features": torch.zeros(23, 4)}), {}, "features.pt must hold one array, got dict"),
    (as_pt([np.float32]), {}, "features.pt .*: it holds objects other than tensors"),
    (as_pt(torch.zeros(23, 4, dtype=torch.bfloat16)), {}, "features.pt .*: Got unsupported ScalarType BFloat16"),
    (as_pt(torch.zeros(23, 4), _use_new_zipfile_serialization=False), {}, "features.pt .*: mmap can only be used with"),
    (
        lambda f: (as_pt(torch.zeros(23, 4))(f), cut("train/features.pt", 500)(f)),
        {},
        "cannot read .*features.pt .*: PytorchStreamReader failed reading zip archive: failed finding central",
    ),
    (
        lambda f: [
            save(f / "val" / f"{n}.npy", a[:0]) for n, a in zip(("features", "labels"), arrays("val"), strict=True)
        ],
        {},
        "split 'val' is empty: .*features.npy has no rows",
    ),
    (lambda f: None, {"batch_size": 24}, "batch_size 24 is larger than the data: there are 23 training rows"),
    (lambda f: None, {"batch_size": 0}, "batch_size must be an integer of at least 1, got 0"),
    (lambda f: None, {"eval_batch_size": 0}, "eval_batch_size must be an integer of at least 1, got 0"),
    (lambda f: None, {"num_workers": -1}, "num_workers must be an integer of at least 0, got -1"),
    (lambda f: None, {"num_classes": 0}, "num_classes must be None or an integer of at least 1, got 0"),
    (lambda f: None, {"path": "nowhere"}, "path nowhere is not a folder"),
]


@pytest.mark.parametrize(("change", "arguments", "message"), CASES)
def test_bad_files_and_arguments(tmp_path, change, arguments, message):
    change(write(tmp_path))
    with pytest.raises(InputError, match=message) as caught:
        FeatureDataModule(**{"path": str(tmp_path), "batch_size": 5, **arguments}).setup("fit")
    assert "\n" not in str(caught.value)


# Synthetic


def synthetic(**arguments):
    return SyntheticFeatureDataModule(
        **{"num_classes": 50, "num_features": 16, "rows": 400, "val_rows": 90, **arguments}
    )


@pytest.mark.parametrize("num_features", [2, 5, 16, 65])
@pytest.mark.parametrize("zipf_exponent", [0.0, 1.0])
def test_a_row_does_not_depend_on_its_batch(num_features, zipf_exponent):
    dataset = synthetic(num_features=num_features, zipf_exponent=zipf_exponent).train_dataloader().dataset
    features, labels, index = dataset.__getitems__(range(400))
    assert (features.dtype, labels.dtype, index.dtype) == (torch.float32, torch.int64, torch.int64)
    assert features.shape == (400, num_features)
    generator = np.random.default_rng(0)
    for size in (1, 2, 3, 7, 128):
        chosen = generator.integers(0, 400, size)
        batch = dataset.__getitems__(chosen.tolist())
        assert torch.equal(batch[0], features[chosen])
        assert torch.equal(batch[1], labels[chosen])
        assert torch.equal(batch[2], index[chosen])
    x, y, _ = dataset[399]
    assert torch.equal(x, features[399])
    assert y == labels[399]
    with pytest.raises(IndexError, match="the split has 400 rows"):
        dataset[400]


def test_rows_do_not_depend_on_the_number_of_rows_or_loader_processes():
    reference = rows_of(synthetic().val_dataloader())
    for arguments in ({"num_workers": 1}, {"rows": 500}, {"batch_size": 7, "eval_batch_size": 13}):
        for found, expected in zip(rows_of(synthetic(**arguments).val_dataloader()), reference, strict=True):
            assert torch.equal(found, expected)
    more = synthetic(val_rows=200).val_dataloader().dataset.__getitems__(range(90))
    assert torch.equal(more[0], reference[0])


def test_seeds_and_splits_differ_and_share_what_they_should():
    first, again, other = (synthetic(seed=seed).split for seed in (0, 0, 1))
    rows = range(90)
    assert torch.equal(first("train").__getitems__(rows)[0], again("train").__getitems__(rows)[0])
    for another in (other("train"), first("val")):
        features, labels, _ = another.__getitems__(rows)
        assert not torch.isclose(features, first("train").__getitems__(rows)[0]).all(dim=1).any()
        assert (labels == first("train").__getitems__(rows)[1]).float().mean() < 0.2
    classes = np.arange(50)
    np.testing.assert_array_equal(first("train").centres(classes), first("val").centres(classes))
    assert not np.isclose(first("train").centres(classes), other("train").centres(classes)).all(axis=1).any()


def test_known_values():
    """A checkpoint's data must be the same in every version: SplitMix64 as published, and two rows."""
    start = np.array([1234567], dtype=np.uint64)
    assert mix(start + STEP).tolist() == [6457827717110365317]
    assert mix(start + STEP + STEP).tolist() == [3203168211198807973]
    features, labels, _ = synthetic(num_classes=1000, num_features=3, seed=7).split("train").__getitems__([0, 399])
    assert labels.tolist() == [167, 300]
    torch.testing.assert_close(
        features, torch.tensor([[-0.8564, 0.5067, 0.0991], [-0.6142, -0.1217, 0.7797]]), atol=1e-4, rtol=0
    )
    _, labels, _ = synthetic(num_classes=1000, zipf_exponent=1.0, seed=7).split("val").__getitems__([0, 1, 2, 3])
    assert labels.tolist() == [8, 15, 0, 0]


@pytest.mark.parametrize("zipf_exponent", [0.0, 0.8, 1.5])
def test_class_frequencies(zipf_exponent):
    rows, classes = 40_000, 30
    dataset = synthetic(num_classes=classes, num_features=2, rows=rows, zipf_exponent=zipf_exponent).split("train")
    labels = dataset.__getitems__(range(rows))[1].numpy()
    assert (labels.min(), labels.max()) == (0, classes - 1)
    share = np.arange(1, classes + 1.0) ** -zipf_exponent
    expected = rows * share / share.sum()
    statistic = ((np.bincount(labels, minlength=classes) - expected) ** 2 / expected).sum()
    assert statistic < 29 + 4 * np.sqrt(2 * 29)


def test_hash_is_uniform_and_normal():
    keys = hashed_keys(3, 2, np.arange(2000))
    drawn = uniform(hashed_keys(0, 1, np.arange(100_000)))
    assert 0 <= drawn.min() < drawn.max() < 1
    assert drawn.mean() == pytest.approx(0.5, abs=0.004)
    assert drawn.var() == pytest.approx(1 / 12, abs=0.002)
    values = normal(keys, 101).astype(np.float64)
    assert values.shape == (2000, 101)
    assert np.isfinite(values).all()
    for power, moment, tolerance in ((1, 0, 0.01), (2, 1, 0.015), (3, 0, 0.04), (4, 3, 0.1)):
        assert (values**power).mean() == pytest.approx(moment, abs=tolerance)
    assert (np.abs(values) < 1.96).mean() == pytest.approx(0.95, abs=0.003)
    correlation = np.corrcoef(values.T) - np.eye(101)  # between positions
    assert np.abs(correlation).max() < 5.5 / np.sqrt(2000)
    neighbours = (values[1:] * values[:-1]).mean()  # between rows
    assert neighbours == pytest.approx(0, abs=0.01)


@pytest.mark.parametrize("noise", [0.0, 0.5, 20.0])
def test_unit_length(noise):
    features, _, _ = rows_of(synthetic(noise=noise).train_dataloader())
    torch.testing.assert_close(features.norm(dim=1), torch.ones(400))


def test_features_are_centre_plus_noise():
    split = synthetic(num_features=512, noise=0.5).split("train")
    features, labels, _ = split.__getitems__(range(400))
    cosine = (features * torch.nn.functional.normalize(torch.from_numpy(split.centres(labels.numpy())))).sum(1)
    assert cosine.mean().item() == pytest.approx(1 / np.sqrt(1.25), abs=0.005)
    exact, labels, _ = synthetic(noise=0).split("train").__getitems__(range(400))
    centres = torch.from_numpy(synthetic().split("train").centres(labels.numpy()))
    torch.testing.assert_close(exact, torch.nn.functional.normalize(centres))


@pytest.mark.parametrize(("noise", "least", "most"), [(0.1, 1.0, 1.0), (5.0, 0.02, 0.5)])
def test_nearest_centre_is_the_label(noise, least, most):
    split = synthetic(noise=noise).split("val")
    features, labels, _ = split.__getitems__(range(90))
    centres = torch.nn.functional.normalize(torch.from_numpy(split.centres(np.arange(50))))
    found = (features @ centres.T).argmax(1)
    assert least <= (found == labels).float().mean() <= most


def test_published_size_costs_nothing():
    data = synthetic(num_classes=360_232, num_features=512, rows=17_091_657, zipf_exponent=1.0)
    data.setup("fit")
    assert (data.num_features, data.num_classes, data.num_anchors) == (512, 360_232, 17_091_657)
    features, labels, index = data.split("train").__getitems__([17_091_656, 0])
    assert features.shape == (2, 512)
    assert ((labels >= 0) & (labels < 360_232)).all()
    assert index.tolist() == [17_091_656, 0]


def test_trainer_on_synthetic_features():
    model = Steps()
    data = synthetic()
    trainer().fit(model, data)
    trainer().test(model, data, verbose=False)
    trainer().predict(model, data)
    assert sorted(chain(*model.seen["train"])) == list(range(400))
    assert model.seen["val"][-90:] == model.seen["test"] == model.seen["predict"] == list(range(90))


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"num_classes": 0}, "num_classes must be an integer of at least 1, got 0"),
        ({"num_features": 1}, "num_features must be an integer of at least 2, got 1"),
        ({"rows": 0}, "rows must be an integer of at least 1, got 0"),
        ({"val_rows": 0}, "val_rows must be an integer of at least 1, got 0"),
        ({"seed": -1}, "seed must be an integer of at least 0, got -1"),
        ({"seed": True}, "seed must be an integer of at least 0, got True"),
        ({"noise": -0.5}, "noise must be a finite number of at least 0, got -0.5"),
        ({"noise": float("nan")}, "noise must be a finite number of at least 0, got nan"),
        ({"zipf_exponent": float("inf")}, "zipf_exponent must be a finite number of at least 0, got inf"),
        ({"eval_batch_size": 2.0}, "eval_batch_size must be an integer of at least 1, got 2.0"),
        ({"num_workers": -1}, "num_workers must be an integer of at least 0, got -1"),
        ({"batch_size": 401}, "batch_size 401 is larger than the data: there are 400 training rows"),
    ],
)
def test_bad_synthetic_arguments(arguments, message):
    with pytest.raises(InputError, match=message):
        synthetic(**arguments).setup("fit")


@pytest.mark.parametrize("place", ["predict", "."])
@pytest.mark.parametrize("rows", [1, 6])
def test_unlabelled_rows_are_predicted_from_a_checkpoint(place, rows, tmp_path):
    (tmp_path / "old" / "train").mkdir(parents=True)
    for name, values in zip(("features", "labels"), arrays("train"), strict=True):
        np.save(tmp_path / "old" / "train" / f"{name}.npy", values)
    data = FeatureDataModule(str(tmp_path / "old"), batch_size=4, num_classes=9)
    task = ExtremeClassificationTask(data.num_features, data.num_classes, data.num_anchors, SOX(0.5), top_k=1)
    trainer = quiet_trainer(max_epochs=1, limit_val_batches=0)
    trainer.fit(task, data)
    trainer.save_checkpoint(tmp_path / "a.ckpt")
    (tmp_path / "new" / place).mkdir(parents=True)
    features = np.random.default_rng(9).standard_normal((rows, WIDTH)).astype(np.float32)
    np.save(tmp_path / "new" / place / "features.npy", features)
    new = FeatureDataModule(str(tmp_path / "new"))
    (found,) = quiet_trainer().predict(task, new, ckpt_path=tmp_path / "a.ckpt", weights_only=True)
    assert found["class"].squeeze(1).tolist() == task.head.logits(torch.from_numpy(features)).argmax(1).tolist()
    assert (new.num_features, new.num_classes, new.num_anchors) == (WIDTH, 9, ROWS["train"])
    np.save(tmp_path / "new" / place / "features.npy", features[:, 1:])
    new = FeatureDataModule.load_from_checkpoint(tmp_path / "a.ckpt", path=str(tmp_path / "new"))
    with pytest.raises(InputError, match=r"features\.npy has 3 features, the training rows had 4"):
        new.predict_dataloader()
