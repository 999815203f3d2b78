"""Zero-shot evaluation on sets in CLIP benchmark's layout: the numbers by definition, the averages, every bad input."""

import io
import json
import tarfile

import lightning as L
import numpy as np
import pytest
import torch
from lightning.pytorch.callbacks import EMAWeightAveraging
from PIL import Image
from sklearn.metrics import balanced_accuracy_score

from scent_lightning.callbacks import ZeroShotBenchmark
from scent_lightning.cli import main
from scent_lightning.data import ImageTextDataModule
from scent_lightning.data.evaluation_sets import find_evaluation_sets
from scent_lightning.duals import BSGD
from scent_lightning.errors import InputError
from scent_lightning.tasks import CLIPTask
from tests.conftest import ROOT
from tests.helpers import SoftmaxData, SoftmaxTask, ddp_trainer, quiet_trainer, under_two_trainers
from tests.settings import ARCHITECTURE, letters

COLOURS = {"black": 10, "grey": 128, "white": 245, "dark": 60, "bright": 190, "red": 90, "blue": 220}
TEMPLATES = ["a {}.", "{} thing"]


def pixels(seed, level=128, size=20):
    generator = np.random.default_rng(seed)
    return np.clip(generator.integers(-60, 60, (size, size, 3)) + level, 0, 255).astype(np.uint8)


def encoded(array, extension):
    file = io.BytesIO()
    Image.fromarray(array).save(file, {"jpg": "JPEG", "png": "PNG", "webp": "WEBP"}[extension])
    return file.getvalue()


def write_set(folder, samples, kind=None, classes=(), templates=("a {c}.", "{c} thing"), shards=2, metadata=True):
    """A set of (image, extension, text) samples; texts are numbers of classes, or lists of captions."""
    (folder / "test").mkdir(parents=True)
    for shard in range(shards):
        with tarfile.open(folder / "test" / f"{shard}.tar", "w") as archive:
            for number, (image, extension, text) in list(enumerate(samples))[shard::shards]:
                content = str(text) if isinstance(text, int) else "\n".join(text)
                members = {"cls" if isinstance(text, int) else "txt": content.encode(), extension: image, "json": b"{}"}
                for name, value in members.items():
                    member = tarfile.TarInfo(f"s{number:07d}.{name}")
                    member.size = len(value)
                    archive.addfile(member, io.BytesIO(value))
    (folder / "test" / "nshards.txt").write_text(f"{shards}\n")
    if kind:
        (folder / "dataset_type.txt").write_text(kind)
    if classes and metadata:
        (folder / "classnames.txt").write_text("\n".join(classes) + "\n")
        if templates:
            (folder / "zeroshot_classification_templates.txt").write_text("\n".join(templates))
    return folder


def classified(names, count, seed=0):
    extensions = ("jpg", "png", "webp")
    labels = np.random.default_rng(seed).integers(0, len(names), count).tolist()
    levels = list(COLOURS.values())
    return [
        (encoded(pixels([seed, row], levels[label]), extension), extension, label)
        for row, label, extension in zip(range(count), labels, extensions * count, strict=False)
    ]


def captioned(count, seed=1):
    """One to three captions an image; some captions have the same words."""
    words = ["a black cat", "grey sky", "white dog", "the sea", "two trees", "a red car"]
    generator = np.random.default_rng(seed)
    return [
        (encoded(pixels([seed, row], 30 * row % 250), "png"), "png", list(generator.choice(words, 1 + row % 3)))
        for row in range(count)
    ]


def in_order(samples, shards=2):
    return [samples[row] for shard in range(shards) for row in range(shard, len(samples), shards)]


def data_of(**arguments):
    sizes = {"image_size": 16, "rows": 24, "val_rows": 8, "batch_size": 8}
    return ImageTextDataModule(source="shapes", tokenizer=letters, **{**sizes, **arguments})


def task_of(seed=0):
    torch.manual_seed(seed)
    return CLIPTask(24, BSGD(), architecture=ARCHITECTURE, lr=1e-2)


def embedded(task, samples):
    transform = data_of().evaluation_transform
    with torch.no_grad():
        images = [np.array(Image.open(io.BytesIO(image)).convert("RGB")) for image, _, _ in samples]
        images = [transform(torch.from_numpy(image).permute(2, 0, 1)) for image in images]
        return torch.stack([task.model.encode_image(image.unsqueeze(0), normalize=True)[0] for image in images])


def by_class(task, samples, names, templates=TEMPLATES):
    task.eval()
    with torch.no_grad():
        prompts = [
            [task.model.encode_text(letters([t.format(n)]), normalize=True)[0] for t in templates] for n in names
        ]
    means = torch.stack([torch.nn.functional.normalize(sum(each), dim=0) for each in prompts])
    ranked = (embedded(task, samples) @ means.T).argsort(dim=1, descending=True).tolist()
    labels = [label for _, _, label in samples]
    found = {
        "top1": np.mean([label == order[0] for label, order in zip(labels, ranked, strict=True)]),
        "mean_per_class_recall": balanced_accuracy_score(labels, [order[0] for order in ranked]),
    }
    if len(names) > 5:
        found["top5"] = np.mean([label in order[:5] for label, order in zip(labels, ranked, strict=True)])
    return found


def by_retrieval(task, samples):
    task.eval()
    images = embedded(task, samples)
    captions = [(row, caption) for row, (_, _, texts) in enumerate(samples) for caption in texts]
    with torch.no_grad():
        texts = torch.cat([task.model.encode_text(letters([caption]), normalize=True) for _, caption in captions])
    scores = (images @ texts.T).tolist()
    before_image, before_text = [], []
    for row, of in enumerate(scores):
        best, words = max((score, words) for score, (owner, words) in zip(of, captions, strict=True) if owner == row)
        others = [s for s, (owner, w) in zip(of, captions, strict=True) if owner != row and w != words]
        before_image.append(sum(score >= best for score in others))
    for column, (owner, _) in enumerate(captions):
        before_text.append(sum(of[column] >= scores[owner][column] for of in scores) - 1)
    ways = {"image_to_text": before_image, "text_to_image": before_text}
    return {f"{way}_R@{k}": np.mean([b < k for b in before]) for way, before in ways.items() for k in (1, 5, 10)}


SEVEN = classified(COLOURS, 13)
THREE = classified(list(COLOURS)[:3], 8, seed=2)
PAIRS = captioned(11)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    root = tmp_path_factory.mktemp("sets")
    write_set(root / "wds_seven_test", SEVEN, classes=list(COLOURS))
    write_set(root / "wds_vtab" / "three", THREE, "classification", list(COLOURS)[:3], templates=())
    write_set(root / "flickr", PAIRS, "retrieval\n")
    return root


@pytest.fixture(scope="module")
def trained():
    task = task_of()
    quiet_trainer(max_epochs=3, limit_val_batches=0).fit(task, data_of())
    return task


def zero_shot(metrics):
    return {name: float(value) for name, value in metrics.items() if "zeroshot" in name}


def expected(task, stage="val"):
    seven, three = (
        by_class(task, in_order(SEVEN), list(COLOURS)),
        by_class(task, in_order(THREE), list(COLOURS)[:3], ["{}!"]),
    )
    pairs = by_retrieval(task, in_order(PAIRS))
    found = {f"{stage}/seven-zeroshot-test-{name}": value for name, value in seven.items()}
    found |= {f"{stage}/vtab-three-zeroshot-test-{name}": value for name, value in three.items()}
    found |= {f"{stage}/flickr-zeroshot-test-{name}": value for name, value in pairs.items()}
    retrieval = (pairs["image_to_text_R@1"] + pairs["text_to_image_R@1"]) / 2
    found[f"{stage}/zeroshot-retrieval"] = retrieval
    found[f"{stage}/zeroshot-all"] = np.mean([seven["top1"], three["top1"], retrieval])
    return found


@pytest.mark.parametrize(("stage", "num_workers"), [("val", 0), ("test", 1)])
def test_sets_are_evaluated_by_definition(trained, folder, stage, num_workers):
    callback = ZeroShotBenchmark(str(folder), templates="{}!", batch_size=4, num_workers=num_workers)
    trainer = quiet_trainer(callbacks=[callback])
    run = trainer.validate if stage == "val" else trainer.test
    (metrics,) = run(trained, datamodule=data_of(), verbose=False)
    wanted = expected(trained, stage)
    assert zero_shot(metrics) == pytest.approx(wanted)
    assert 0 < wanted[f"{stage}/flickr-zeroshot-test-image_to_text_R@5"] < 1
    assert 0 < wanted[f"{stage}/seven-zeroshot-test-top5"] < 1


def test_the_averages_of_the_paper(trained, tmp_path, caplog):
    names = [
        "imagenet1k",
        "wds_imagenetv2",
        "imagenet_sketch",
        "imagenet-a",
        "imagenet-o",
        "imagenet-r",
        "wds_objectnet",
    ]
    for seed, name in enumerate([*names[:-1], "other"]):
        write_set(tmp_path / name, classified(list(COLOURS)[:3], 3, seed), classes=list(COLOURS)[:3])
    for seed in (8, 9):
        write_set(tmp_path / f"pairs{seed}", captioned(3, seed), "retrieval")

    def logged(**arguments):
        trainer = quiet_trainer(callbacks=[ZeroShotBenchmark(str(tmp_path), **arguments)])
        return zero_shot(trainer.validate(trained, datamodule=data_of(), verbose=False)[0])

    with caplog.at_level("INFO"):
        assert "val/zeroshot-imagenet_and_6_shifts" not in logged()
    assert "The average over ImageNet and its 6 shifts is not logged: there is no objectnet" in caplog.text
    write_set(tmp_path / names[-1], classified(list(COLOURS)[:3], 3, 7), classes=list(COLOURS)[:3])
    found = logged()
    top1 = {name: found[f"val/{name.removeprefix('wds_')}-zeroshot-test-top1"] for name in [*names, "other"]}
    recalls = [
        np.mean([found[f"val/pairs{seed}-zeroshot-test-{way}_R@1"] for way in ("image_to_text", "text_to_image")])
        for seed in (8, 9)
    ]
    assert found["val/zeroshot-imagenet_and_6_shifts"] == pytest.approx(np.mean([top1[name] for name in names]))
    assert found["val/zeroshot-retrieval"] == pytest.approx(np.mean(recalls))
    assert found["val/zeroshot-all"] == pytest.approx(np.mean([*top1.values(), *recalls]))
    some = logged(sets=["other", "pairs9"])
    assert some["val/zeroshot-all"] == pytest.approx((top1["other"] + recalls[1]) / 2)
    assert not any("imagenet" in name for name in some)


def test_a_fit_logs_and_is_not_disturbed(folder):
    ends = []
    for callbacks in ([], [ZeroShotBenchmark(str(folder), templates="{}!", every_n_epochs=2)]):
        task = task_of()
        L.seed_everything(1, verbose=False)
        trainer = quiet_trainer(max_epochs=2, callbacks=callbacks)
        trainer.fit(task, data_of())
        ends.append((task.state_dict(), torch.get_rng_state()))
    (weights, state), (with_callback, state_then) = ends
    torch.testing.assert_close(weights, with_callback, rtol=0, atol=0)
    assert torch.equal(state, state_then)
    assert zero_shot(trainer.callback_metrics) == pytest.approx(expected(task))


def test_the_weights_that_were_validated_are_evaluated(folder):
    """Though a callback before it that averages them puts the others back at the end of the validation."""
    average, benchmark = EMAWeightAveraging(decay=0.9), ZeroShotBenchmark(str(folder), templates="{}!")
    task = task_of()
    trainer = quiet_trainer(max_epochs=2, limit_val_batches=1, callbacks=[average, benchmark], num_sanity_val_steps=0)
    trainer.fit(task, data_of())  # at its end the average is the task's
    assert zero_shot(trainer.callback_metrics) == pytest.approx(expected(task))


def _validated(trainer_of, weights, folders):
    task = task_of()
    task.load_state_dict(weights)
    callbacks = [ZeroShotBenchmark(folder, templates="{}!", batch_size=3) for folder in folders]
    trainers = [trainer_of(callbacks=[callback]) for callback in callbacks]
    return [zero_shot(t.validate(task, datamodule=data_of(), verbose=False)[0]) for t in trainers]


class _Validate:
    def __init__(self, *arguments):
        self.arguments = arguments

    def __call__(self, rank):
        return _validated(ddp_trainer, *self.arguments)


@pytest.mark.slow
def test_two_processes_give_the_values_of_one(trained, folder, tmp_path):
    """Also where a set has one sample, and a process none."""
    write_set(tmp_path / "one", captioned(1), "retrieval", shards=1)
    arguments = trained.state_dict(), [str(folder), str(tmp_path)]
    alone = _validated(quiet_trainer, *arguments)
    for found in under_two_trainers(_Validate(*arguments)):
        for one, other in zip(found, alone, strict=True):
            assert one == pytest.approx(other)


def test_from_the_command_line(folder, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("SCENT_LIGHTNING_DATA", str(folder.parent))
    monkeypatch.setenv("COLUMNS", "160")  # the table of results breaks longer names
    towers = {**ARCHITECTURE, "text_cfg": {**ARCHITECTURE["text_cfg"], "vocab_size": 49408}}
    (tmp_path / "towers.json").write_text(json.dumps(towers))
    shared = ["--config", str(ROOT / "configs" / "clip_zero_shot.yaml"), "--trainer.accelerator=cpu"]
    shared += ["--data.image_size=16", "--data.context_length=16", "--model.architecture=towers.json"]
    sets = ["--trainer.callbacks.path", folder.name, "--trainer.callbacks.num_workers=0"]
    more_rows = ["--data.rows=24", "--trainer.max_epochs=1"]
    main(["fit", *shared, *sets, *more_rows, "--trainer.enable_progress_bar=false"])
    main(["test", *shared, *sets, "--trainer.callbacks.sets=[flickr]", "--ckpt_path=checkpoints/last.ckpt"])
    said = capsys.readouterr().out
    assert "test/flickr-zeroshot-test-image_to_text_R@1" in said
    assert "test/zeroshot-retrieval" in said


# Bad input


def validate(path, task, data=None, **arguments):
    trainer = quiet_trainer(callbacks=[ZeroShotBenchmark(str(path), **arguments)])
    trainer.validate(task, datamodule=data or data_of(val_rows=1), verbose=False)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"batch_size": 0}, "batch_size must be an integer of at least 1, got 0"),
        ({"num_workers": -1}, "num_workers must be an integer of at least 0"),
        ({"every_n_epochs": 0}, "every_n_epochs must be an integer of at least 1"),
        ({"templates": "a photo"}, r"templates must be texts with \{\} for the class's name, got 'a photo'"),
    ],
)
def test_bad_arguments(arguments, message):
    with pytest.raises(InputError, match=message):
        ZeroShotBenchmark("sets", **arguments)


def of_classes(**arguments):
    return lambda folder: write_set(folder / "a", THREE, classes=["x", "y", "z"], **arguments)


def then(make, file, content):
    def changed(folder):
        make(folder)
        (folder / file).write_bytes(content)

    return changed


@pytest.mark.parametrize(
    ("make", "arguments", "message"),
    [
        (lambda folder: folder.rmdir(), {}, "path .* is not a folder; it must have evaluation sets"),
        (lambda folder: None, {}, r"has no evaluation set: no folder in it has test/nshards\.txt"),
        (of_classes(), {"sets": ["b"]}, "sets must be some of a, got b"),
        (of_classes(), {"sets": ["a", "a"]}, "sets must name each set once"),
        (of_classes(kind="multilabel"), {"sets": ["a"]}, "dataset_type.txt must say one of .*, got 'multilabel'"),
        (of_classes(metadata=False), {}, r"evaluation set .*a has no classnames\.txt"),
        (then(of_classes(), "a/classnames.txt", b"x\n"), {}, "must name two classes or more"),
        (then(of_classes(), "a/classnames.txt", b"\xff\xfe"), {}, r"classnames\.txt cannot be read"),
        (
            then(of_classes(), "a/test/nshards.txt", b"two"),
            {},
            r"nshards\.txt must be a number of at least 1, got 'two'",
        ),
        (then(of_classes(), "a/test/nshards.txt", b"3"), {}, r"says 3, and there is no .*a/test/2\.tar"),
        (then(of_classes(), "a/test/1.tar", b"x" * 600), {}, r"shard .*1\.tar cannot be read as a whole"),
        (
            of_classes(templates=("a {c}", "a thing")),
            {},
            r"templates of evaluation set 'a' must be texts .* got 'a thing'",
        ),
        (
            lambda folder: write_set(folder / "a", [(THREE[0][0], "jpg", 3)], classes=["x", "y", "z"], shards=1),
            {},
            "the class of sample 's0000000' of .* must be a number from 0 to 2, got b'3'",
        ),
        (
            lambda folder: write_set(folder / "a", [(b"no image", "jpg", 1)], classes=["x", "y"], shards=1),
            {},
            "cannot read sample 's0000000' of .* as an image",
        ),
        (
            lambda folder: write_set(folder / "a", [(PAIRS[0][0], "png", [" "])], "retrieval", shards=1),
            {},
            "sample 's0000000' of .* has no caption",
        ),
        (
            lambda folder: write_set(folder / "a", [(PAIRS[0][0], "png", 1)], "retrieval", shards=1),
            {},
            r"sample 's0000000' of .* has no \.txt member",
        ),
        (lambda folder: write_set(folder / "a", [], "retrieval", shards=1), {}, "evaluation set 'a' has no samples"),
    ],
)
def test_bad_sets(trained, tmp_path, make, arguments, message):
    (tmp_path / "sets").mkdir()
    make(tmp_path / "sets")
    with pytest.raises(InputError, match=message) as caught:
        validate(tmp_path / "sets", trained, **arguments)
    assert "\n" not in str(caught.value)


def test_sets_of_other_kinds_are_passed_over(tmp_path):
    of_classes()(tmp_path)
    write_set(tmp_path / "voc", [], "multilabel", shards=1)
    with pytest.warns(
        UserWarning, match=r"other kinds than classification and retrieval are passed over: voc \(multilabel"
    ):
        assert [each.name for each in find_evaluation_sets(str(tmp_path))] == ["a"]
    assert [each.name for each in find_evaluation_sets(str(tmp_path / "a"))] == ["a"]


def test_other_modules_and_data(trained, folder):
    with pytest.raises(InputError, match=r"ZeroShotBenchmark needs a module whose 'model' is open_clip's"):
        validate(folder, SoftmaxTask(24), SoftmaxData())
    with pytest.raises(InputError, match=r"needs a data module with tokenize and evaluation_transform, .* SoftmaxData"):
        validate(folder, trained, data=SoftmaxData())
    trainer = quiet_trainer(max_epochs=1, callbacks=[ZeroShotBenchmark(str(folder), templates="{}!")])
    with pytest.raises(InputError, match="ZeroShotBenchmark evaluates at the end of a validation, and the data module"):
        trainer.fit(trained, datamodule=data_of(val_rows=0))
