"""Interactions: what is read, numbered, left out, and handed on in batches."""

import gzip

import numpy as np
import pandas as pd
import pytest
import torch

from scent_lightning.data import Interactions, InteractionsDataModule
from scent_lightning.data.interactions import Ragged, hashed_ngrams
from scent_lightning.data.interactions.held_out import left_out
from scent_lightning.errors import InputError

ROWS = [
    ("ann", "tea"),
    ("bob", "tea"),
    ("ann", "milk"),
    ("cy", "salt"),
    ("ann", "salt"),
    ("bob", "milk"),
    ("bob", "rum"),
]


def write(path, rows=ROWS, header=("user", "item"), separator=","):
    path.write_text("\n".join(separator.join(row) for row in (header, *rows)) + "\n")
    return str(path)


def module(path, **arguments):
    return InteractionsDataModule(str(path), **{"query": "user", "item": "item", "batch_size": 2, **arguments})


def pairs_of(data, split="train"):
    """Names of the interactions of a split."""
    pairs = data._all().splits[split]
    names = data.names_of("query"), data.names_of("item")
    return [(names[0][q], names[1][i]) for q, i in zip(pairs.queries.tolist(), pairs.items.tolist(), strict=True)]


def files(folder):
    """The same interactions in every kind of file."""
    write(folder / "a.csv")
    write(folder / "b.tsv", separator="\t")
    with gzip.open(folder / "c.csv.gz", "wt") as file:
        file.write((folder / "a.csv").read_text())
    frame = pd.DataFrame(ROWS, columns=["user", "item"])
    frame.to_parquet(folder / "d.parquet")
    np.savez(folder / "e.npz", user=np.array([row[0] for row in ROWS]), item=np.array([row[1] for row in ROWS]))
    return sorted(folder.iterdir())


def test_every_kind_of_file(tmp_path):
    for path in files(tmp_path):
        data = module(path, leave_out="none")
        assert (data.num_queries, data.num_items, data.num_anchors) == (3, 4, 7), path
        assert pairs_of(data) == ROWS, path
        assert data.names_of("query")[2] == "cy"
        assert data.names_of("score") is None


def test_numbers_are_names_too(tmp_path):
    np.savez(tmp_path / "n.npz", user=np.array([7, 7, 30]), item=np.array([2**40, 1, 1]))
    data = module(tmp_path / "n.npz", leave_out="none")
    assert pairs_of(data) == [("7", str(2**40)), ("7", "1"), ("30", "1")]


def test_leave_one_out_by_time_and_at_random():
    generator = np.random.default_rng(0)
    queries = generator.integers(0, 30, 200)
    time = generator.permutation(200).astype(float)
    split = left_out(queries, time, "one", (0, 0), 0)
    for query in range(30):
        mine = np.flatnonzero(queries == query)
        in_order = mine[np.argsort(time[mine])]
        expected = ["train"] * (len(mine) - 2) + ["val", "test"] if len(mine) >= 3 else ["train"] * len(mine)
        assert split[in_order].tolist() == expected
    first, again, other = (left_out(queries, None, "one", (0, 0), seed) for seed in (0, 0, 1))
    assert (first == again).all()
    assert (first != other).any()
    assert (first == "val").sum() == (split == "val").sum()


def test_whole_queries_left_out(tmp_path):
    rows = [(f"a text of {number // 2}", f"item{number % 7}") for number in range(200)]
    data = module(
        write(tmp_path / "t.csv", rows), query_ngrams="words", leave_out="query", val_fraction=0.1, test_fraction=0.2
    )
    sets = [set(data._all().splits[split].queries.tolist()) for split in ("train", "val", "test")]
    assert [len(each) for each in sets] == [70, 10, 20]
    assert len(set.union(*sets)) == 100
    texts, items, index = next(iter(data.train_dataloader()))
    assert texts.shape == (2, 7)  # four words and three pairs of them
    assert items.shape == index.shape == (2,)


def test_splits_that_are_given(tmp_path):
    splits = ["train", "train", "train", "train", "val", "val", "test"]
    by_column = module(
        write(tmp_path / "s.csv", [(*row, s) for row, s in zip(ROWS, splits, strict=True)], ("user", "item", "where")),
        split="where",
    )
    by_file = module(
        write(tmp_path / "train.csv", ROWS[:4]),
        val_file=write(tmp_path / "val.csv", ROWS[4:6]),
        test_file=write(tmp_path / "test.csv", ROWS[6:]),
    )
    for data in (by_column, by_file):
        assert [pairs_of(data, split) for split in ("train", "val", "test")] == [ROWS[:4], ROWS[4:6], ROWS[6:]]


def test_batches_of_evaluation_have_a_row_for_each_query(tmp_path):
    more = [("bob", "salt"), ("cy", "tea")]
    data = module(write(tmp_path / "train.csv", ROWS[:5]), val_file=write(tmp_path / "v.csv", [*ROWS[5:], *more]))
    (queries, items, numbers) = next(iter(data.val_dataloader()))
    assert queries.tolist() == numbers.tolist() == [1, 2]
    names = data.names_of("item")
    found = [{names[item] for item in row if item >= 0} for row in items.tolist()]
    assert found == [{"milk", "rum", "salt"}, {"tea"}]
    queries, none, numbers = next(iter(data.predict_dataloader()))
    assert queries.tolist() == numbers.tolist() == [0, 1, 2]
    assert none is None


def test_what_is_counted(tmp_path):
    """Repeats, what training has too, and queries and items that training does not have, each once."""
    held = [("ann", "tea"), ("ann", "rum"), ("zoe", "milk"), ("zoe", "gin"), ("bob", "rum")]
    data = module(write(tmp_path / "t.csv", [*ROWS[:6], ROWS[0], ROWS[0]]), val_file=write(tmp_path / "v.csv", held))
    with pytest.warns(UserWarning, match="are not in training") as caught:
        said = data.data_summary()
    sentences = [str(warning.message) for warning in caught]
    assert sentences == [
        "1 queries of val are not in training, ranked last: zoe",
        "2 items of val are not in training, ranked last: rum, gin",
    ]
    assert (
        said["passed over"]
        == "2 rows of train that occur twice; 1 of the 5 interactions of val, which training has too"
    )
    assert said["items"] == "5, 2 of them without a training interaction"
    assert said["training"] == "6 interactions"
    assert said["validation"] == "4 interactions of 3 queries"
    assert data.data_summary() == said  # and no second warning


def test_texts_of_columns(tmp_path):
    rows = [("q1", "i1", "red wine", ""), ("q2", "i1", "", "bottle"), ("q1", "i2", "other", "glass")]
    path = write(tmp_path / "t.csv", rows, ("user", "item", "says", "is"))
    data = module(
        path, query_text="says", item_text="is", query_ngrams="words", item_ngrams="characters", leave_out="none"
    )
    texts = data._all().query_texts
    assert torch.equal(texts.padded(torch.tensor([0]))[0], hashed_ngrams(["red wine"], "words").values)
    assert texts.lengths().tolist() == [3, 0]
    assert torch.equal(data.item_texts.values, hashed_ngrams(["bottle", "glass"], "characters").values)


def test_hashes_stay():
    """A checkpoint's vectors belong to them."""
    assert hashed_ngrams(["Red wine"], "words").values.tolist() == [4200685455, 1443652712, 2000024570]
    assert len(hashed_ngrams(["wine"], "characters").values) == 1 + 4 + 3 + 2


@pytest.mark.parametrize("device", ["cpu"])
def test_ragged_rows_of_every_length(device):
    generator = np.random.default_rng(0)
    lists = [generator.integers(0, 99, length).tolist() for length in generator.integers(0, 5, 40)]
    rows = Ragged.of_lists(lists).to(torch.device(device))
    index = torch.from_numpy(generator.integers(0, 40, 17))
    padded = rows.padded(index)
    places, values = rows.entries(index)
    for place, number in enumerate(index.tolist()):
        assert [value for value in padded[place].tolist() if value >= 0] == lists[number]
        assert values[places == place].tolist() == lists[number]
    assert Ragged.of_lists([[], []]).padded(torch.tensor([1])).shape == (1, 0)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"query": "who"}, "has no column who; it has: user, item"),
        ({"query": None}, "query must name a column of .*: user, item"),
        ({"time": "item"}, "column 'item' of .* must hold numbers"),
        ({"split": "item"}, "must be train, val or test, got milk, rum, salt"),
        ({"leave_out": "query"}, "leave_out 'query' needs query_ngrams"),
        ({"leave_out": "two"}, "leave_out must be one of one, query, none"),
        ({"query_ngrams": "letters"}, "query_ngrams must be one of words, characters"),
        ({"val_fraction": 1.0}, r"val_fraction must be a number in \[0, 1\)"),
        ({"val_file": "nowhere.csv"}, "val_file 'nowhere.csv' is no file"),
        ({"leave_out": "one", "split": "item"}, "does not go with splits that are given"),
        ({"batch_size": 100}, "batch_size 100 is larger than the data: there are .* training rows"),
    ],
)
def test_bad_arguments(tmp_path, arguments, message):
    path = write(tmp_path / "t.csv")
    with pytest.raises(InputError, match=message):
        module(path, **arguments).setup("fit")


@pytest.mark.parametrize(
    ("rows", "message"),
    [
        ([], "has no interaction"),
        ([("ann", "tea"), ("bob", "")], "column 'item' of .* is empty in row 1"),
        ([("ann", "tea"), ("", "tea")], "column 'user' of .* is empty in row 1"),
        ([("ann", "tea"), ("bob", "tea")], "leave_out 'one' needs queries with at least 3 interactions"),
        ([("ann", "tea", "more")], "line 2 has 3 fields where the header has 2"),
    ],
)
def test_bad_files(tmp_path, rows, message):
    with pytest.raises(InputError, match=message):
        module(write(tmp_path / "t.csv", rows)).setup("fit")


def test_unknown_data_sets(tmp_path):
    with pytest.raises(InputError, match="neither a file nor one of the known data sets: debian_dependencies, wordnet"):
        module("movies").setup("fit")
    for name in ("debian_dependencies", "wordnet", "wordnet_hypernyms"):
        with pytest.raises(InputError, match=f"{name.removesuffix('_hypernyms')!r} is not in data_dir"):
            InteractionsDataModule(name, data_dir=str(tmp_path)).setup("fit")
        with pytest.raises(InputError, match="query is part of the data set"):
            InteractionsDataModule(name, query="a")
    np.savez(tmp_path / "n.npz", user=np.zeros(3), item=np.zeros(4))
    with pytest.raises(InputError, match="must be of one shape"):
        module(tmp_path / "n.npz").setup("fit")
    with pytest.raises(InputError, match="items must be from 0 to 1, got 2"):
        Interactions(torch.tensor([0]), torch.tensor([2]), 1, 2)


def test_known_data_sets(data_dir):
    data = InteractionsDataModule("debian_dependencies", data_dir=str(data_dir))
    assert (data.num_queries, data.num_items, data.num_anchors) == (32542, 29012, 174700)
    assert len(data.split("test")) == 29798
    assert data.interactions.counts.max() / data.num_anchors == pytest.approx(0.061, abs=5e-4)


@pytest.mark.slow
def test_words_by_definitions(data_dir):
    data = InteractionsDataModule("wordnet", data_dir=str(data_dir))
    assert (data.num_queries, data.num_items) == (117659, 147306)
    assert len(data.split("val")) == len(data.split("test")) == 2353
    assert len(data.item_texts) == 147306


SYNSETS = """n1\t03\tentity\t\twhat exists
n2\t03\tphysical_entity|Thing\tn1\tan entity that is there
n3\t05\tcup\tn2|n1\ta small open container
"""


def test_hypernyms(tmp_path):
    """Links of a synset to those it is a kind of; the text of both is the words and the definition."""
    folder = tmp_path / "wordnet"
    folder.mkdir()
    (folder / "synsets.tsv.gz").write_bytes(gzip.compress(SYNSETS.encode()))
    data = InteractionsDataModule("wordnet_hypernyms", data_dir=str(tmp_path), leave_out="none")
    assert pairs_of(data) == [("n2", "n1"), ("n3", "n2"), ("n3", "n1")]
    texts = ["physical entity, Thing: an entity that is there", "cup: a small open container"]
    for found, expected in (
        (data.query_texts, texts),
        (data.item_texts, ["entity: what exists", "physical entity, Thing: an entity that is there"]),
    ):
        assert found.values.tolist() == hashed_ngrams(expected, "words").values.tolist()


@pytest.mark.slow
def test_hypernyms_of_wordnet(data_dir):
    data = InteractionsDataModule("wordnet_hypernyms", data_dir=str(data_dir))
    assert (data.num_queries, data.num_items) == (95322, 20472)
    assert len(data.split("val")) == len(data.split("test")) == 1906
    assert len(data.interactions) + 2 * 1906 <= 97666


def test_a_checkpoint_knows_the_names(tmp_path):
    data = module(write(tmp_path / "t.csv"), leave_out="none")
    state = data.state_dict()
    others = [("cy", "milk"), ("dee", "milk"), ("cy", "oil"), ("bob", "salt")]
    again = module(write(tmp_path / "o.csv", others), leave_out="none")
    again.load_state_dict(state)
    assert (again.num_queries, again.num_items) == (3, 4)
    assert pairs_of(again) == [("cy", "milk"), ("bob", "salt")]
    assert "2 rows of a query or an item that the training run did not have" in again.data_summary()["passed over"]
    assert again.changed_rows() == "replaced"


@pytest.mark.parametrize(
    ("rows", "change"), [(ROWS, "none"), ([*ROWS, ("cy", "tea")], "appended"), (ROWS[1:], "replaced")]
)
def test_changed_rows(tmp_path, rows, change):
    state = module(write(tmp_path / "t.csv"), leave_out="none").state_dict()
    again = module(write(tmp_path / "o.csv", rows), leave_out="none")
    again.load_state_dict(state)
    assert again.changed_rows() == change
