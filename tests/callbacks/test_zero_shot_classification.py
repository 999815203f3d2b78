"""Zero-shot classification: the numbers, where and when they are logged, several processes, every bad input."""

import sys

import lightning as L
import numpy as np
import open_clip
import pytest
import torch
import yaml
from lightning.pytorch.loggers import TensorBoardLogger
from PIL import Image
from sklearn.metrics import balanced_accuracy_score
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from scent_lightning.callbacks import ZeroShotClassification
from scent_lightning.callbacks.zero_shot_classification import _image_folder
from scent_lightning.data import ImageTextDataModule
from scent_lightning.duals import BSGD
from scent_lightning.errors import InputError
from scent_lightning.tasks import CLIPTask
from tests.forked import finished, start_command
from tests.helpers import SoftmaxData, SoftmaxTask, ddp_trainer, quiet_trainer, under_two_trainers

TOWER = {"layers": 1, "width": 16}
ARCHITECTURE = {
    "embed_dim": 8,
    "vision_cfg": {**TOWER, "image_size": 16, "patch_size": 8, "head_width": 8},
    "text_cfg": {**TOWER, "context_length": 16, "vocab_size": 49408, "heads": 2},
}
COLOURS = {
    "black": (10, 10, 10),
    "blue_green": (20, 120, 130),
    "dark_red": (120, 10, 20),
    "green": (20, 200, 30),
    "orange": (250, 150, 10),
    "violet": (130, 20, 200),
    "white": (245, 245, 245),
}
NAMES = [name.replace("_", " ") for name in COLOURS]
SHORT = [name.split()[-1] for name in NAMES]
TEMPLATES = ["a {}.", "a photo of a {} thing", "{}"]
RESULTS = ("top1", "top5", "mean_per_class_recall")
TRAIN, VAL = 24, 13
# The class of every validation row; one has none.
CLASSES = ["white", "", "green", "white", "black", "blue_green", "dark_red", "white", "green", *["violet"] * 4]


def draw(path, colour, seed):
    path.parent.mkdir(parents=True, exist_ok=True)
    generator = np.random.default_rng(seed)
    height, width = generator.integers(16, 40, 2)
    noise = generator.integers(-60, 60, (height, width, 3))
    Image.fromarray(np.clip(noise + COLOURS[colour], 0, 255).astype(np.uint8)).save(path)


def write_folder(folder):
    """One to three images of each class: 13 in all."""
    for number, name in enumerate(COLOURS):
        for image in range(1 + number % 3):
            draw(folder / name / f"{image}.png", name, [number, image])
    return folder


def write_table(folder, classes=CLASSES):
    training = [list(COLOURS)[row % 7] for row in range(TRAIN)]
    lines = ["filepath\ttitle\tcolour\tpart"]
    for part, colours in (("train", training), ("val", classes)):
        for row, colour in enumerate(colours):
            draw(folder / part / f"{row}.png", colour or "orange", [row, len(part)])
            lines.append(f"{part}/{row}.png\ta {colour or 'orange'} thing\t{colour}\t{part}")
    (folder / "pairs.tsv").write_text("\n".join(lines) + "\n")
    return folder / "pairs.tsv"


def data_of(table, **arguments):
    defaults = {"class_column": "colour", "split_column": "part", "batch_size": 8, "eval_batch_size": 5}
    return ImageTextDataModule(path=str(table), image_size=16, context_length=16, **{**defaults, **arguments})


def task_of(seed=0, **arguments):
    torch.manual_seed(seed)
    return CLIPTask(TRAIN, BSGD(), architecture=ARCHITECTURE, lr=1e-2, **arguments)


def expected(task, files, labels, names=NAMES, templates=TEMPLATES):
    """The definition, one prompt and one image at a time."""
    tokenizer = open_clip.get_tokenizer("ViT-B-32", context_length=16)
    transform = open_clip.image_transform(16, is_train=False)
    task.eval()
    with torch.no_grad():
        means = []
        for name in names:
            prompts = [task.model.encode_text(tokenizer([text.format(name)]))[0] for text in templates]
            means.append(sum(prompt / prompt.norm() for prompt in prompts) / len(prompts))
        order = []
        for file in files:
            image = task.model.encode_image(transform(Image.open(file)).unsqueeze(0))[0]
            order.append(sorted(range(len(names)), key=lambda k: -float(image @ means[k] / means[k].norm())))
    found = {
        "top1": np.mean([label == ranked[0] for label, ranked in zip(labels, order, strict=True)]),
        "top5": np.mean([label in ranked[:5] for label, ranked in zip(labels, order, strict=True)]),
        "mean_per_class_recall": balanced_accuracy_score(labels, [ranked[0] for ranked in order]),
    }
    assert 0 < found["top1"] < found["top5"] <= 1
    return found


def of_rows(task, table):
    rows = [row for row, colour in enumerate(CLASSES) if colour]
    return expected(
        task,
        [table.parent / "val" / f"{row}.png" for row in rows],
        [list(COLOURS).index(CLASSES[row]) for row in rows],
        names=list(COLOURS),
    )


def of_folder(task, folder):
    files = sorted(folder.glob("*/*.png"))
    return expected(task, files, [list(COLOURS).index(file.parent.name) for file in files])


def results(metrics, prefix):
    return {name: float(metrics[f"{prefix}-{name}"]) for name in RESULTS}


@pytest.fixture(scope="module")
def table(tmp_path_factory):
    return write_table(tmp_path_factory.mktemp("table"))


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return write_folder(tmp_path_factory.mktemp("data") / "paints" / "val")


@pytest.fixture(scope="module")
def trained(table):
    """Weights that tell the colours apart, a little."""
    task = task_of()
    quiet_trainer(max_epochs=20, limit_val_batches=0).fit(task, data_of(table))
    return task


@pytest.mark.filterwarnings("ignore:y_pred contains classes")
@pytest.mark.parametrize("stage", ["val", "test"])
def test_rows_and_folder_are_classified_by_definition(trained, table, folder, stage):
    callbacks = [
        ZeroShotClassification(templates=TEMPLATES, batch_size=4),
        ZeroShotClassification(str(folder), templates=TEMPLATES, batch_size=4),
    ]
    trainer = quiet_trainer(callbacks=callbacks)
    run = trainer.validate if stage == "val" else trainer.test
    (metrics,) = run(trained, datamodule=data_of(table), verbose=False)
    assert results(metrics, f"{stage}/colour-zeroshot-val") == pytest.approx(of_rows(trained, table))
    assert results(metrics, f"{stage}/paints-zeroshot-val") == pytest.approx(of_folder(trained, folder))
    assert {name for name in metrics if "zeroshot" in name} == {
        f"{stage}/{name}-zeroshot-val-{result}" for name in ("colour", "paints") for result in RESULTS
    }


@pytest.mark.parametrize(
    ("arguments", "names", "templates", "prefix"),
    [
        ({"templates": "openai", "name": "seven"}, NAMES, open_clip.OPENAI_IMAGENET_TEMPLATES, "seven"),
        ({"templates": "simple", "class_names": SHORT}, SHORT, open_clip.SIMPLE_IMAGENET_TEMPLATES, None),
        ({"class_names": "names.txt", "num_workers": 1}, NAMES[::-1], ["a photo of a {}."], None),
    ],
)
def test_names_and_templates(trained, table, folder, tmp_path, monkeypatch, arguments, names, templates, prefix):
    monkeypatch.setenv("SCENT_LIGHTNING_DATA", str(folder.parent.parent))
    monkeypatch.chdir(tmp_path)
    (tmp_path / "names.txt").write_text("\ufeff" + "\n".join(NAMES[::-1]) + " \n\n", encoding="utf-8")
    trainer = quiet_trainer(callbacks=[ZeroShotClassification("paints/val", **arguments)])
    (metrics,) = trainer.validate(trained, datamodule=data_of(table, class_column=None), verbose=False)
    texts = [(template if isinstance(template, str) else template("{}")) for template in templates]
    files = sorted(folder.glob("*/*.png"))
    labels = [list(COLOURS).index(file.parent.name) for file in files]
    found = results(metrics, f"val/{prefix or 'paints'}-zeroshot-val")
    assert found == pytest.approx(expected(trained, files, labels, names, texts))


def test_few_classes_have_no_top5(tmp_path):
    data = ImageTextDataModule(
        source="shapes", class_column="shape", image_size=16, context_length=16, rows=24, val_rows=20, batch_size=8
    )
    trainer = quiet_trainer(callbacks=[ZeroShotClassification()])
    (metrics,) = trainer.validate(task_of(), datamodule=data, verbose=False)
    zero_shot = {name for name in metrics if "zeroshot" in name}
    assert zero_shot == {f"val/shape-zeroshot-val-{result}" for result in ("top1", "mean_per_class_recall")}


@pytest.mark.parametrize("precision", ["bf16-mixed", "bf16-true"])
def test_precision(table, folder, precision):
    callbacks = [ZeroShotClassification(), ZeroShotClassification(str(folder))]
    trainer = quiet_trainer(callbacks=callbacks, precision=precision)
    (metrics,) = trainer.validate(task_of(), datamodule=data_of(table), verbose=False)
    for name in ("colour", "paints"):
        assert 0 <= results(metrics, f"val/{name}-zeroshot-val")["top1"] <= 1


class Modes(L.Callback):
    """Whether every part of the module trains at the first step of each epoch."""

    def __init__(self):
        self.seen = []

    def on_train_batch_start(self, trainer, pl_module, batch, batch_idx):
        if batch_idx == 0:
            self.seen.append(all(part.training for part in pl_module.modules()))


def test_fit_logs_and_is_not_disturbed(table, folder, tmp_path):
    """One value for each epoch asked for, none of the sanity check, and training as without the callback."""
    weights = []
    for callbacks in ([], [ZeroShotClassification(), ZeroShotClassification(str(folder), every_n_epochs=2)]):
        logger = TensorBoardLogger(tmp_path)
        modes = Modes()
        task = task_of(warmup_steps=1)
        torch.manual_seed(1)
        trainer = quiet_trainer(max_epochs=4, logger=logger, callbacks=[*callbacks, modes], num_sanity_val_steps=2)
        trainer.fit(task, datamodule=data_of(table))
        assert modes.seen == [True] * 4
        weights.append((task.state_dict(), torch.get_rng_state()))
    (without, state), (with_callbacks, state_then) = weights
    assert all(torch.equal(without[name], with_callbacks[name]) for name in without)
    assert torch.equal(state, state_then)
    events = EventAccumulator(logger.log_dir)
    events.Reload()
    for name, steps in (("colour", [2, 5, 8, 11]), ("paints", [5, 11])):
        for result in RESULTS:
            assert [event.step for event in events.Scalars(f"val/{name}-zeroshot-val-{result}")] == steps


def _validated(trainer_of, weights, tables, folder):
    """Results for the folder and the rows of each table."""
    task = task_of()
    task.load_state_dict(weights)
    callbacks = [
        ZeroShotClassification(templates=TEMPLATES, batch_size=4),
        ZeroShotClassification(str(folder), templates=TEMPLATES, batch_size=4),
    ]
    found = []
    for table in tables:
        trainer = trainer_of(callbacks=callbacks)
        (metrics,) = trainer.validate(task, datamodule=data_of(table), verbose=False)
        found.append({name: value for name, value in metrics.items() if "zeroshot" in name})
    return found


class _Validate:
    def __init__(self, *arguments):
        self.arguments = arguments

    def __call__(self, rank):
        return _validated(ddp_trainer, *self.arguments)


@pytest.mark.slow
def test_two_processes_give_the_values_of_one(trained, table, folder, tmp_path):
    """Of 13 rows Lightning repeats one; 13 images are 7 and 6; a table with one class leaves a process without rows."""
    arguments = trained.state_dict(), [table, write_table(tmp_path, classes=["", "", "white", ""])], folder
    one = _validated(quiet_trainer, *arguments)
    first, second = under_two_trainers(_Validate(*arguments))
    assert first == second
    for few, alone in zip(first, one, strict=True):
        assert few == pytest.approx(alone)
        assert len(few) == 6


@pytest.mark.slow
def test_command_line(table, folder, tmp_path):
    """Both from the command line in a process of its own, in TensorBoard under open_clip's names."""
    settings = {
        "trainer": {"max_epochs": 1, "accelerator": "cpu", "enable_progress_bar": False},
        "model": {"class_path": "CLIPTask", "init_args": {"architecture": ARCHITECTURE}},
        "data": {
            "class_path": "ImageTextDataModule",
            "init_args": {"path": str(table), "split_column": "part", "class_column": "colour", "batch_size": 8},
        },
        "dual": {"class_path": "BSGD"},
    }
    settings["data"]["init_args"].update(image_size=16, context_length=16)
    (tmp_path / "config.yaml").write_text(yaml.safe_dump(settings))
    callback = "--trainer.callbacks+=scent_lightning.callbacks.ZeroShotClassification"
    arguments = [callback, "--trainer.callbacks.templates", '["a {}.", "{}"]']
    arguments += [callback, "--trainer.callbacks.path", str(folder), "--trainer.callbacks.templates", "simple"]
    finished(start_command(tmp_path, "fit", "--config", "config.yaml", *arguments))
    events = EventAccumulator(str(tmp_path / "lightning_logs" / "version_0"))
    events.Reload()
    wanted = {f"val/{name}-zeroshot-val-{result}" for name in ("colour", "paints") for result in RESULTS}
    assert wanted <= set(events.Tags()["scalars"])
    assert {len(events.Scalars(tag)) for tag in wanted} == {1}


# Bad input


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"templates": ["a {}", "a photo"]}, r"texts with \{\} for the class's name, got 'a photo'"),
        ({"templates": "OpenAI"}, r"templates must be 'openai', 'simple', or texts with \{\} .*, got 'OpenAI'"),
        ({"templates": ["a {name}"]}, r"got 'a \{name\}'"),
        ({"templates": ["a {} of {}"]}, r"got 'a \{\} of \{\}'"),
        ({"templates": [3]}, "got 3"),
        ({"templates": []}, r"templates must be .*, at least one, got \[\]"),
        ({"every_n_epochs": 0}, "every_n_epochs must be an integer of at least 1, got 0"),
        ({"batch_size": True}, "batch_size must be an integer of at least 1, got True"),
        ({"num_workers": -1}, "num_workers must be an integer of at least 0, got -1"),
    ],
)
def test_bad_arguments(arguments, message):
    with pytest.raises(InputError, match=message):
        ZeroShotClassification(**arguments)


def fit(data, task=None, **arguments):
    """One epoch, after the sanity check."""
    trainer = quiet_trainer(max_epochs=1, callbacks=[ZeroShotClassification(**arguments)])
    trainer.fit(task or task_of(), datamodule=data)


def one_class(folder):
    (folder / "only").mkdir()
    (folder / "only" / "a.png").touch()


def junk(folder):
    one_class(folder)
    (folder / ".ipynb_checkpoints").mkdir()
    (folder / "__MACOSX" / "only").mkdir(parents=True)
    (folder / "__MACOSX" / "only" / "._a.png").touch()


def empty_class(folder):
    one_class(folder)
    (folder / "none").mkdir()


def test_files_that_are_not_classified_are_counted(tmp_path, caplog):
    for name in ("a", "b"):
        (tmp_path / name).mkdir()
        for file in ("0.png", "1.JFIF", "._0.png", "2.heic"):
            (tmp_path / name / file).touch()
    with caplog.at_level("INFO"):
        found = _image_folder(str(tmp_path), lambda image: image)
    assert (found.classes, len(found)) == (["a", "b"], 4)
    assert f"4 images to classify in {tmp_path}; passed over: 4 files (2 .heic, 2 hidden)" in caplog.text


@pytest.mark.parametrize(
    ("make", "arguments", "message"),
    [
        (None, {"path": "nowhere"}, "path nowhere is not a folder; it must have one folder of images per class"),
        (lambda folder: None, {}, "path .* must have one folder of images per class: it has none"),
        (empty_class, {}, "path .* must have one folder of images per class: none has no image"),
        (junk, {}, "needs at least two classes, got 'only' alone"),
        (one_class, {}, "needs at least two classes, got 'only' alone"),
        (
            write_folder,
            {"class_names": ["a", "b"]},
            r"each of 7 classes, got 2: the classes are black, .* in all\), the names a, b",
        ),
        (write_folder, {"class_names": "imagenet"}, r"for each of 7 classes, got 1000: .* names tench, goldfish,"),
        (write_folder, {"class_names": "no.txt"}, "class_names must be a list, 'imagenet' or a file with one name a"),
        (None, {"class_names": ["a", "b"]}, r"for each of 7 classes, got 2: .*, the names a, b$"),
    ],
)
def test_bad_folders_and_names(tmp_path, table, make, arguments, message):
    if make is not None:
        (tmp_path / "images").mkdir()
        make(tmp_path / "images")
        arguments = {"path": str(tmp_path / "images"), **arguments}
    with pytest.raises(InputError, match=message) as caught:
        fit(data_of(table), **arguments)
    assert "\n" not in str(caught.value)


def test_bad_names_file(tmp_path, table):
    (tmp_path / "names.txt").write_bytes(b"\xff\xfe")
    with pytest.raises(InputError, match=r"class_names .*names\.txt cannot be read"):
        fit(data_of(table), class_names=str(tmp_path / "names.txt"))


def test_data_without_classes(tmp_path, table):
    with pytest.raises(InputError, match="needs images with classes: give it path, or the data module class_column"):
        fit(data_of(table, class_column=None))
    bare = write_table(tmp_path, classes=[""] * 6)
    with pytest.raises(InputError, match="finds no class in any of 6 validation rows"):
        fit(data_of(bare))
    with pytest.raises(InputError, match="finds no class in any of 0 validation rows"):
        fit(data_of(table, val_split=None))


@pytest.mark.parametrize("sanity", [0, 2])
def test_no_validation_to_classify_after(table, folder, sanity):
    trainer = quiet_trainer(max_epochs=1, callbacks=[ZeroShotClassification(str(folder))], num_sanity_val_steps=sanity)
    with pytest.raises(InputError, match="at the end of a validation, and the data module has no validation rows"):
        trainer.fit(task_of(), datamodule=data_of(table, val_split=None))


def test_other_modules_and_data(table, folder):
    with pytest.raises(InputError, match=r"needs a module whose 'model' is open_clip's, .*, got SoftmaxTask"):
        fit(SoftmaxData(), SoftmaxTask(24))
    with pytest.raises(InputError, match=r"needs a data module with tokenize, such as .*, got SoftmaxData"):
        fit(SoftmaxData())
    trainer = quiet_trainer(callbacks=[ZeroShotClassification(str(folder))])
    with pytest.raises(InputError, match=r"with tokenize and evaluation_transform, such as .*, got NoneType"):
        trainer.validate(task_of(), dataloaders=data_of(table).val_dataloader(), verbose=False)


class OtherOutputs(CLIPTask):
    def validation_step(self, batch, batch_idx):
        return self(*batch[:2])[0].sum()


def test_other_outputs(table):
    trainer = quiet_trainer(callbacks=[ZeroShotClassification()])
    with pytest.raises(InputError, match=r"needs validation_step to return a dict .* 'image' and 'index', got Tensor"):
        trainer.validate(OtherOutputs(TRAIN, BSGD(), architecture=ARCHITECTURE), datamodule=data_of(table))


def test_an_image_that_cannot_be_read(tmp_path, table):
    write_folder(tmp_path)
    (tmp_path / "white" / "0.png").write_bytes(b"broken")
    with pytest.raises(InputError, match=r"cannot read .*white/0\.png as an image"):
        fit(data_of(table), path=str(tmp_path))
    fit(data_of(table), path=str(tmp_path), every_n_epochs=2)  # nor does the sanity check look at it


def test_without_open_clip(table, folder, monkeypatch):
    task = task_of()
    data = data_of(table)
    data.setup("validate")
    monkeypatch.setitem(sys.modules, "open_clip", None)
    message = r"ZeroShotClassification needs open_clip; install it with pip install 'scent-lightning\[vision\]'"
    with pytest.raises(InputError, match=message):
        fit(data, task, path=str(folder))
    assert not task.duals["image"].visited.any()
