"""The pictures of evaluation: what they hold, the files, TensorBoard, several processes, and what is refused."""

import io
import math

import lightning as L
import matplotlib.image
import pytest
import torch
from lightning.pytorch.loggers import TensorBoardLogger
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
from torch.utils.data import DataLoader, TensorDataset

from scent_lightning.callbacks import (
    AccuracyByFrequency,
    PredictedAgainstTrue,
    SimilarityHistogram,
    accuracy_by_frequency,
    predicted_against_true,
    similarity_histogram,
)
from scent_lightning.callbacks.accuracy_by_frequency import draw_accuracy_by_frequency
from scent_lightning.callbacks.predicted_against_true import draw_predicted_against_true
from scent_lightning.callbacks.similarity_histogram import draw_similarities
from scent_lightning.data import ImageTextDataModule, SyntheticFeatureDataModule, TabularRegressionDataModule
from scent_lightning.duals import BSGD
from scent_lightning.errors import InputError
from scent_lightning.tasks import CLIPTask, DRORegressionTask, ExtremeClassificationTask
from tests.helpers import ddp_trainer, quiet_trainer, under_two_trainers

CALLBACKS = [PredictedAgainstTrue, AccuracyByFrequency, SimilarityHistogram]
CLASSES, ROWS = 6, 60


class Everything(L.LightningModule):
    """Returns what each of the callbacks wants, worked out of a row's number; ``change`` makes something else of it."""

    def __init__(self, change=None):
        super().__init__()
        self.change = change or (lambda found: found)
        self.weight = torch.nn.Parameter(torch.zeros(()))

    def validation_step(self, batch, batch_idx):
        (number,) = batch
        image = torch.nn.functional.one_hot(number % 7, 7).float()
        return self.change(
            {
                "prediction": number.float(),
                "target": number.float() + 1,
                "log_weight": 0.05 * number.float(),
                "label": number % CLASSES,
                "rank": number % 4,
                "image": image,
                "text": image.roll(1, dims=1) * 0.6 + image * 0.8,
                "group": number % 7,
            }
        )

    test_step = validation_step


class Rows(L.LightningDataModule):
    class_counts = torch.tensor([1, 2, 2, 5, 9, 0])

    def __init__(self, numbers=range(ROWS), target=None):
        super().__init__()
        self.numbers = torch.tensor(list(numbers))
        self.target = target

    def val_dataloader(self):
        return DataLoader(TensorDataset(self.numbers), batch_size=16)

    test_dataloader = val_dataloader


def texts(axes):
    legend = axes.get_legend()
    return [legend.get_title().get_text(), *(text.get_text() for text in legend.get_texts())]


@pytest.fixture
def drawn(monkeypatch):
    """What the callbacks drew: the arguments and the figure of each."""
    found = {}
    for module, name in (
        (predicted_against_true, "draw_predicted_against_true"),
        (accuracy_by_frequency, "draw_accuracy_by_frequency"),
        (similarity_histogram, "draw_similarities"),
    ):
        draw = getattr(module, name)

        def recording(*args, _draw=draw, _name=name, **more):
            found[_name] = (args, more, _draw(*args, **more))
            return found[_name][2]

        monkeypatch.setattr(module, name, recording)
    return found


# ---------------------------------------------------------------- predicted against true


def test_areas_are_proportional_to_the_weights_and_the_light_rows_are_on_top():
    weight = torch.tensor([0.1, 0.25, 0.45, 0.2])
    figure = draw_predicted_against_true(torch.arange(4.0), torch.arange(4.0) + 1, weight, name="price ($)")
    axes = figure.axes[0]
    points = axes.collections[0]
    areas = points.get_sizes()
    assert areas / areas[0] == pytest.approx([1.0, 5 / 9, 4 / 9, 2 / 9], rel=1e-5)
    assert points.get_offsets()[:, 0].tolist() == [3.0, 2.0, 4.0, 1.0]  # true values, by weight
    assert (axes.get_xlabel(), axes.get_ylabel()) == ("true price ($)", "predicted price ($)")
    effective = 1 / weight.square().sum().item()
    assert texts(axes)[0].startswith("4 rows")
    assert f"as many as {effective:.4g} count" in texts(axes)[0]
    assert axes.get_xlim() == axes.get_ylim()


@pytest.mark.parametrize("weight", [[1.0], [0.0, 1.0], [1e-300, 1.0], [0.5, 0.5]])
def test_weights_at_their_ends(weight):
    values = torch.zeros(len(weight))  # all at one place: the axes still have a length
    figure = draw_predicted_against_true(values, values, torch.tensor(weight, dtype=torch.float64))
    low, high = figure.axes[0].get_xlim()
    assert low < high
    figure.canvas.draw()


def test_of_many_rows_the_heaviest_are_kept_and_weights_are_of_all(drawn, tmp_path):
    callback = PredictedAgainstTrue(rows=20, folder=tmp_path)
    states = []
    for callbacks in ([], [callback]):
        torch.manual_seed(0)
        quiet_trainer(callbacks=callbacks).validate(Everything(), Rows(target="rent"), verbose=False)
        states.append(torch.random.get_rng_state())
    assert torch.equal(*states)
    (prediction, target, weight), more, figure = drawn["draw_predicted_against_true"]
    weights = torch.softmax(0.05 * torch.arange(ROWS, dtype=torch.float64), dim=0)
    assert len(weight) == 20
    assert torch.equal(target, prediction + 1)
    assert torch.allclose(weight, weights[prediction.long()], rtol=1e-6)
    assert set(range(ROWS - 4, ROWS)) <= set(prediction.long().tolist())
    assert min(prediction) < ROWS - 20  # others are there as well
    assert more["rows"] == ROWS
    assert more["effective_rows"] == pytest.approx(1 / weights.square().sum().item())
    assert figure.axes[0].get_xlabel() == "true rent"
    assert texts(figure.axes[0])[0].startswith("20 of 60 rows")


# ---------------------------------------------------------------- accuracy by frequency


def test_accuracy_of_each_count_with_its_interval():
    counts = torch.tensor([3, 3, 10, 200, 7])
    rows = torch.tensor([4, 6, 10, 0, 5])
    right = {1: torch.tensor([1, 4, 9, 0, 0]), 3: torch.tensor([2, 6, 10, 0, 5])}
    figure = draw_accuracy_by_frequency(counts, rows, right)
    accuracy, amounts = figure.axes
    assert [label.get_text() for label in amounts.get_xticklabels()] == ["3", "7", "10"]  # no row of class 3
    first, third = (container.lines[0].get_ydata() for container in accuracy.containers)
    assert list(first) == pytest.approx([0.5, 0.0, 0.9])
    assert list(third) == pytest.approx([0.8, 1.0, 1.0])
    # Wilson's interval of 5 of 10 by hand.
    low, high = accuracy.containers[0].lines[2][0].get_segments()[0][:, 1]
    assert (low, high) == (pytest.approx(0.2366, abs=1e-4), pytest.approx(0.7634, abs=1e-4))
    assert texts(accuracy)[1:] == ["top-1; of all rows 56.0%", "top-3; of all rows 92.0%"]
    assert [bar.get_height() for bar in amounts.containers[0]] == [10, 5, 10]
    assert [bar.get_height() for bar in amounts.containers[1]] == [2, 1, 1]


def test_many_counts_share_places_by_powers_of_two():
    counts = torch.tensor([0, 1, 2, 3, 4, 7, 8, 100, 1000])
    figure = draw_accuracy_by_frequency(counts, torch.ones(9).long(), {1: torch.ones(9).long()})
    names = [label.get_text() for label in figure.axes[1].get_xticklabels()]
    assert names == ["0", "1", "2–3", "4–7", "8–15", "64–127", "512–1,023"]
    assert [bar.get_height() for bar in figure.axes[1].containers[1]] == [1, 1, 2, 2, 1, 1, 1]


def test_accuracy_counts_all_rows(drawn, tmp_path):
    callback = AccuracyByFrequency(ks=(1, 2, 3), folder=tmp_path)
    quiet_trainer(callbacks=[callback]).validate(Everything(), Rows(), verbose=False)
    (counts, rows, right, _), _, _ = drawn["draw_accuracy_by_frequency"]
    number = torch.arange(ROWS)
    assert torch.equal(counts, Rows.class_counts)
    assert torch.equal(rows, torch.bincount(number % CLASSES))
    for k, found in right.items():
        assert torch.equal(found, torch.bincount(number[number % 4 < k] % CLASSES, minlength=CLASSES))


@pytest.mark.parametrize("ks", [(), (0,), "15", 5, (1, 1.5), (1, 2, 3, 4, 5, 6)])
def test_bad_ks(ks):
    with pytest.raises(InputError, match="ks must be"):
        AccuracyByFrequency(ks=ks)


def test_without_class_counts(tmp_path):
    trainer = quiet_trainer(callbacks=[AccuracyByFrequency(folder=tmp_path)])
    with pytest.raises(InputError, match="AccuracyByFrequency needs a data module with class_counts"):
        trainer.test(Everything(), Rows().test_dataloader(), verbose=False)


# ---------------------------------------------------------------- similarities


@pytest.mark.parametrize("grouped", [False, True])
def test_histograms_are_those_of_all_pairs(grouped):
    generator = torch.Generator().manual_seed(0)
    image, text = (torch.nn.functional.normalize(torch.randn(700, 8, generator=generator), dim=1) for _ in range(2))
    text = torch.nn.functional.normalize(image + 0.5 * text, dim=1)
    group = torch.arange(700) // 3 if grouped else None
    figure = draw_similarities(image, text, group)
    number = torch.arange(700) if group is None else group
    wrong = number[:, None] != number
    similarity = image @ text.T
    nearest = similarity.masked_fill(~wrong, -2).amax(dim=1)
    own = similarity.diagonal()
    edges = torch.linspace(-1, 1, 81)
    for drawn, expected in zip(figure.axes[0].patches, (own, similarity[wrong], nearest), strict=True):
        shares = torch.histogram(expected, edges)[0] / len(expected)
        assert torch.as_tensor(drawn.get_data().values).float() == pytest.approx(shares, abs=1e-3)
    head, *means = texts(figure.axes[0])
    assert head == f"700 pairs; of {float((own > nearest).float().mean()):.1%} the own text is the nearest"
    assert [float(mean.split()[-1]) for mean in means] == pytest.approx(
        [values.mean().item() for values in (own, similarity[wrong], nearest)], abs=6e-4
    )


@pytest.mark.parametrize("group", [[0, 0, 0], [0, 0, 1]])
def test_pairs_without_a_wrong_one(group):
    figure = draw_similarities(torch.eye(3), torch.eye(3), torch.tensor(group))
    assert len(figure.axes[0].patches) == (3 if max(group) else 1)


def test_the_first_pairs_are_kept(drawn, tmp_path):
    quiet_trainer(callbacks=[SimilarityHistogram(rows=20, folder=tmp_path)]).validate(
        Everything(), Rows(), verbose=False
    )
    (image, _, group, _), _, _ = drawn["draw_similarities"]
    assert image.argmax(dim=1).tolist() == group.tolist() == [number % 7 for number in range(20)]


# ---------------------------------------------------------------- all of them


def evaluated(task, data, callback, folder, **arguments):
    """Fit an epoch and test; the images of TensorBoard by name."""
    logger = TensorBoardLogger(folder)
    trainer = quiet_trainer(max_epochs=1, logger=logger, callbacks=[callback], **arguments)
    trainer.fit(task, datamodule=data)
    trainer.test(task, datamodule=data, verbose=False)
    events = EventAccumulator(logger.log_dir, size_guidance={"images": 0})
    events.Reload()
    images = {tag: events.Images(tag) for tag in events.Tags()["images"]}
    return images, folder / "lightning_logs" / "version_0"


def regression():
    data = TabularRegressionDataModule("diabetes", batch_size=64)
    return DRORegressionTask(data.num_features, BSGD()), data, PredictedAgainstTrue()


def classification():
    data = SyntheticFeatureDataModule(40, 8, 800, val_rows=200, batch_size=64, zipf_exponent=1.0)
    return ExtremeClassificationTask(8, 40, 800, BSGD()), data, AccuracyByFrequency()


def clip():
    tower = {"layers": 1, "width": 16}
    architecture = {
        "embed_dim": 8,
        "vision_cfg": {**tower, "image_size": 16, "patch_size": 8, "head_width": 8},
        "text_cfg": {**tower, "context_length": 16, "vocab_size": 49408, "heads": 2},
    }
    data = ImageTextDataModule(source="shapes", image_size=16, context_length=16, rows=32, val_rows=20, batch_size=8)
    return CLIPTask(32, BSGD(), architecture=architecture), data, SimilarityHistogram()


@pytest.mark.parametrize("make", [regression, classification, clip])
def test_pictures_of_a_task(make, tmp_path):
    task, data, callback = make()
    images, folder = evaluated(task, data, callback, tmp_path, num_sanity_val_steps=1)
    name = callback.picture
    assert sorted(image for image in images if name in image) == [f"test/{name}", f"val/{name}"]
    assert [len(images[f"{stage}/{name}"]) for stage in ("val", "test")] == [1, 1]
    pixels = matplotlib.image.imread(io.BytesIO(images[f"val/{name}"][0].encoded_image_string), format="png")
    assert min(pixels.shape[:2]) > 300
    assert pixels[..., :3].std() > 0.02
    files = {path.name for path in folder.iterdir() if path.suffix in {".png", ".svg"}}
    assert files == {f"{name}_{stage}.{ending}" for stage in ("val", "test") for ending in ("png", "svg")}


@pytest.mark.parametrize("kind", CALLBACKS)
@pytest.mark.parametrize(
    "change", [lambda found: None, lambda found: {**found, "target": 1.0, "rank": 1.0, "text": 1.0}, lambda found: {}]
)
def test_other_step_outputs(kind, change, tmp_path):
    with pytest.raises(InputError, match=f"{kind.__name__} needs validation_step to return a dict with the tensors"):
        quiet_trainer(callbacks=[kind(folder=tmp_path)]).validate(Everything(change), Rows(), verbose=False)


@pytest.mark.parametrize("kind", CALLBACKS)
@pytest.mark.parametrize(
    "change",
    [
        lambda found: {
            name: value[:3] if name in {"target", "rank", "text"} else value for name, value in found.items()
        },
        lambda found: {name: value[:, None] for name, value in found.items()},
    ],
)
def test_other_shapes(kind, change, tmp_path):
    with pytest.raises(InputError, match=f"{kind.__name__} needs '.* each of shape .*, got shapes"):
        quiet_trainer(callbacks=[kind(folder=tmp_path)]).validate(Everything(change), Rows(), verbose=False)


def _broken(rows, value):
    def change(found):
        found["prediction"][rows] = found["image"][rows] = value
        return found

    return change


@pytest.mark.parametrize("kind", [PredictedAgainstTrue, SimilarityHistogram])
@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
def test_rows_that_are_not_finite_end_no_run(kind, value, tmp_path):
    callback = kind(folder=tmp_path)
    with pytest.warns(UserWarning, match=f"{kind.__name__} leaves out 8 rows that are not finite"):  # of four batches
        quiet_trainer(callbacks=[callback]).validate(Everything(_broken(slice(2), value)), Rows(), verbose=False)
    assert len(list(tmp_path.iterdir())) == 2
    with pytest.warns(UserWarning, match=f"{kind.__name__} draws no test picture: 60 rows that are not finite"):
        quiet_trainer(callbacks=[callback]).test(Everything(_broken(slice(None), value)), Rows(), verbose=False)
    assert len(list(tmp_path.iterdir())) == 2


@pytest.mark.parametrize(("kind", "name"), [(PredictedAgainstTrue, "rows"), (SimilarityHistogram, "rows")])
@pytest.mark.parametrize("value", [0, 1.5, True])
def test_bad_numbers(kind, name, value):
    with pytest.raises(InputError, match=f"{name} must be an integer of at least 1"):
        kind(**{name: value})


def _share(rank):
    found = {}

    def recorded(module, name):
        draw = getattr(module, name)

        def recording(*args, **more):
            found[name] = [value.tolist() if torch.is_tensor(value) else value for value in args], more.get("rows")
            return draw(*args, **more)

        setattr(module, name, recording)

    recorded(predicted_against_true, "draw_predicted_against_true")
    recorded(accuracy_by_frequency, "draw_accuracy_by_frequency")
    recorded(similarity_histogram, "draw_similarities")
    numbers = range(10) if rank == 0 else range(10, ROWS)  # uneven
    trainer = ddp_trainer(callbacks=[kind() for kind in CALLBACKS], use_distributed_sampler=False)
    trainer.validate(Everything(), Rows(numbers), verbose=False)
    return found


@pytest.mark.slow
def test_two_processes_make_one_picture(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    first, second = under_two_trainers(_share)
    assert second == {}
    (prediction, _, weight), rows = first["draw_predicted_against_true"]
    assert rows == ROWS
    assert sorted(prediction) == list(range(ROWS))
    assert math.fsum(weight) == pytest.approx(1.0)
    (_, counted, right, _), _ = first["draw_accuracy_by_frequency"]
    assert counted == [ROWS // CLASSES] * CLASSES
    assert int(right[1].sum()) == ROWS // 4
    (image, *_), _ = first["draw_similarities"]
    assert len(image) == 10
