"""Images become the files that FeatureDataModule reads, whatever happens on the way."""

import io
import json
import re
import shutil
import tarfile
import time
import urllib.error

import numpy as np
import pytest
import torch
import torchvision
from PIL import Image

from scent_lightning.cli import main
from scent_lightning.data import FeatureDataModule
from scent_lightning.extraction import output
from scent_lightning.extraction.extract import Samples
from scent_lightning.extraction.shards import ShardSource
from scent_lightning.extraction.sources import FolderSource, TorchvisionSource
from tests.forked import start_command

MODEL = ["--backbone", "torchvision:resnet18", "--weights", "none", "--image-size", "32", "--device", "cpu"]
COLOURS = {"blue": (20, 40, 200), "green": (30, 180, 60), "red": (200, 30, 30)}


def picture(seed, colour, size=(40, 48)):
    noise = np.random.default_rng(seed).integers(0, 55, (*size, 3))
    return Image.fromarray((np.array(colour) + noise).astype(np.uint8))


def make_images(folder, classes=COLOURS, each=4):
    for name in classes:
        (folder / name).mkdir(parents=True)
        for number in range(each):
            picture(number, COLOURS[name]).save(folder / name / f"{number}.png")
    return folder


@pytest.fixture(scope="module")
def images(tmp_path_factory):
    return make_images(tmp_path_factory.mktemp("images") / "all")


def run(*arguments):
    main(["extract", *(str(argument) for argument in arguments)])


def refused(capsys, *arguments):
    """The one line that is printed when a run is refused."""
    capsys.readouterr()
    with pytest.raises(SystemExit) as stopped:
        run(*arguments)
    assert stopped.value.code == 2
    said = capsys.readouterr().err.replace("\r", "\n").splitlines()
    (line,) = (line for line in said if line.startswith("scent-lightning: error: "))
    return line.removeprefix("scent-lightning: ")


def read(folder):
    return np.load(folder / "features.npy"), np.load(folder / "labels.npy")


def resnet18():
    torch.manual_seed(0)
    model = torchvision.models.resnet18(weights=None)
    model.fc = torch.nn.Identity()
    return model.eval()


def prepared(image):
    transforms = torchvision.transforms
    image = transforms.CenterCrop(32)(transforms.Resize(36)(image.convert("RGB")))
    tensor = transforms.functional.to_tensor(image)
    return transforms.functional.normalize(tensor, (0.485, 0.456, 0.406), (0.229, 0.224, 0.225))


def test_image_folder_to_data_module(images, tmp_path, capsys):
    out = tmp_path / "out"
    run("--image-folder", images, "--out", out, *MODEL, "--batch-size", 5)
    run("--image-folder", images, "--out", out, "--split", "val", *MODEL, "--normalize", "--dtype", "float32")
    paths = sorted(images.glob("*/*.png"))
    with torch.inference_mode():
        expected = resnet18()(torch.stack([prepared(Image.open(path)) for path in paths]))
    data = FeatureDataModule(str(out), batch_size=len(paths))
    data.setup("fit")
    features, labels, index = next(iter(data.train_dataloader()))
    assert (data.num_features, data.num_classes, data.num_anchors) == (512, 3, 12)
    assert labels[index.argsort()].tolist() == [0] * 4 + [1] * 4 + [2] * 4
    torch.testing.assert_close(features[index.argsort()], expected, rtol=1e-3, atol=1e-3)
    features, labels, _ = next(iter(data.val_dataloader()))
    torch.testing.assert_close(features, expected / expected.norm(dim=1, keepdim=True), rtol=1e-5, atol=1e-6)
    assert np.load(out / "train" / "features.npy").dtype == np.float16
    assert np.load(out / "val" / "features.npy").dtype == np.float32
    assert np.load(out / "train" / "labels.npy").dtype == np.int64
    assert json.loads((out / "classes.json").read_text()) == ["blue", "green", "red"]
    assert not list(out.glob("*/*.part"))
    assert "12 rows of 512 features" in capsys.readouterr().out


def test_killed_run_continues_to_the_same_bytes(tmp_path, capsys):
    images = make_images(tmp_path / "images", each=16)
    command = ["--image-folder", images, *MODEL, "--batch-size", 2, "--out"]
    run(*command, tmp_path / "whole")
    progress = tmp_path / "killed" / "train" / "progress.json"
    process = start_command(tmp_path, "extract", *map(str, command), str(tmp_path / "killed"))
    try:
        deadline = time.monotonic() + 120
        while not progress.exists() or json.loads(progress.read_text())["rows_done"] < 6:
            assert process.returncode is None
            assert time.monotonic() < deadline
            time.sleep(0.002)
    finally:
        process.kill()
        process.wait()
    done = json.loads(progress.read_text())["rows_done"]
    assert 6 <= done < 48
    assert {path.name for path in progress.parent.iterdir()} >= {"features.npy.part", "labels.npy.part"}
    assert not (progress.parent / "features.npy").exists()
    capsys.readouterr()
    run(*command, tmp_path / "killed")
    assert f"{done}/48" in capsys.readouterr().err  # the bar starts there
    for name in ("features.npy", "labels.npy", "progress.json"):
        assert (progress.parent / name).read_bytes() == (tmp_path / "whole" / "train" / name).read_bytes()
    assert sorted(path.name for path in progress.parent.iterdir()) == ["features.npy", "labels.npy", "progress.json"]


def test_no_row_is_computed_twice_and_workers_change_nothing(images, tmp_path, monkeypatch):
    command = ["--image-folder", images, *MODEL, "--batch-size", 4]
    run(*command, "--out", tmp_path / "whole", "--num-workers", 2)
    written = []
    append = output.Output.append

    def failing(self, *arrays):
        if len(written) == 2:
            raise KeyboardInterrupt
        written.append(len(arrays[0]))
        append(self, *arrays)

    monkeypatch.setattr(output.Output, "append", failing)
    with pytest.raises(SystemExit) as stopped:
        run(*command, "--out", tmp_path / "cut")
    assert stopped.value.code == 130
    written[:] = [0]
    run(*command, "--out", tmp_path / "cut")
    assert written == [0, 4]
    for name in ("features.npy", "labels.npy"):
        assert (tmp_path / "cut/train" / name).read_bytes() == (tmp_path / "whole/train" / name).read_bytes()


def test_killed_between_the_two_renames(images, tmp_path):
    command = ["--image-folder", images, *MODEL, "--out", tmp_path]
    run(*command)
    train = tmp_path / "train"
    before = [array.tobytes() for array in read(train)]
    (train / "labels.npy").rename(train / "labels.npy.part")
    run(*command)
    assert [array.tobytes() for array in read(train)] == before
    assert not (train / "labels.npy.part").exists()


def test_fake_data(tmp_path):
    arguments = json.dumps({"size": 5, "image_size": [3, 40, 40], "num_classes": 3})
    command = ["--torchvision-dataset", "FakeData", "--torchvision-args", arguments, *MODEL, "--out", tmp_path]
    run(*command, "--dtype", "float32", "--batch-size", 5)
    data = torchvision.datasets.FakeData(5, (3, 40, 40), 3, transform=prepared)
    features, labels = read(tmp_path / "train")
    assert labels.tolist() == [int(data[row][1]) for row in range(5)]
    with torch.inference_mode():
        expected = resnet18()(torch.stack([data[row][0] for row in range(5)]))
    np.testing.assert_allclose(features, expected.numpy(), rtol=1e-4, atol=1e-5)


def test_torchvision_classes_are_written(tmp_path):
    """CIFAR10's files are checked against their published hashes, so its class names are taken without reading it."""

    class Named(torch.utils.data.Dataset):
        classes = ("zero", ("one", "uno"))

        def __len__(self):
            return 2

        def __getitem__(self, index):
            return Image.new("L", (32, 32)), torch.tensor(index)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(torchvision.datasets, "FakeData", Named)
        run("--torchvision-dataset", "FakeData", *MODEL, "--out", tmp_path)
    assert json.loads((tmp_path / "classes.json").read_text()) == ["zero", "one, uno"]
    assert read(tmp_path / "train")[1].tolist() == [0, 1]


def encoded(image, kind):
    buffer = io.BytesIO()
    image.save(buffer, kind)
    return buffer.getvalue()


def test_webdataset_shards(tmp_path, capsys):
    pytest.importorskip("braceexpand", reason="shards need braceexpand")
    wds = pytest.importorskip("webdataset", reason="writes the shards")
    kinds = {"jpg": "JPEG", "png": "PNG", "webp": "WEBP", "jpeg": "JPEG"}
    for shard in range(2):
        with wds.TarWriter(str(tmp_path / f"part-{shard}.tar")) as writer:
            for number, (suffix, kind) in enumerate(kinds.items()):
                image = encoded(picture(10 * shard + number, COLOURS["red"]), kind)
                writer.write({"__key__": f"dir.x/{shard}{number}", suffix: image, "cls": 7 - number, "json": {"a": 1}})
    urls = tmp_path / "part-{0..1}.tar"
    command = ["--webdataset", urls, *MODEL, "--batch-size", 3, "--num-workers", 2, "--dtype", "float32", "--out"]
    run(*command, tmp_path / "counted")
    run(*command, tmp_path / "given", "--num-samples", 8)
    features, labels = read(tmp_path / "counted" / "train")
    loader = wds.WebDataset(str(urls), shardshuffle=False).decode("pil").to_tuple("jpg;png;webp;jpeg", "cls")
    samples = list(loader)
    assert labels.tolist() == [label for _, label in samples] == [7, 6, 5, 4] * 2
    with torch.inference_mode():
        expected = resnet18()(torch.stack([prepared(image) for image, _ in samples]))
    np.testing.assert_allclose(features, expected.numpy(), rtol=1e-4, atol=1e-5)
    np.testing.assert_array_equal(read(tmp_path / "given" / "train")[0], features)

    assert "the shards have only 8 samples" in refused(capsys, *command, tmp_path / "more", "--num-samples", 9)
    assert "there is no file" in refused(capsys, "--webdataset", "s3://a/{0..3}.tar", *MODEL, "--out", tmp_path)
    assert "must be local files" in refused(capsys, "--webdataset", "s3://a/{0..3}.tar", *MODEL, "--out", tmp_path)


def write_shard(path, files):
    with tarfile.open(path, "w") as file:
        for name, content in files.items():
            member = tarfile.TarInfo(name)
            member.size = len(content)
            file.addfile(member, io.BytesIO(content))
    return path


@pytest.mark.parametrize(
    ("files", "message"),
    [
        ({"a.png": b"image", "a.cls": b"0", "b.png": b"image"}, "sample b of {} has no label (cls)"),
        ({"a.cls": b"0", "a.txt": b"x"}, "sample a of {} has no image (jpg, png, webp, jpeg)"),
        ({"a.png": b"", "a.cls": b"cat"}, "sample a of {} has the label 'cat', which is not an integer"),
        ({"a.png": b"image", "a.cls": b"-1"}, "cannot read sample a of {}: no image can be decoded from it"),
        ({"a.png": None, "a.cls": b"-1"}, "sample a of {} has the negative label -1"),
        ({"a.png": b"", "b.png": b"", "a.cls": b"0"}, "sample a of {} is there twice, or its files are not together"),
        ({"a.png": b"", "a.PNG": b"", "a.cls": b"0"}, "sample a of {} has two files of the kind png"),
        ({}, "has no images"),
    ],
)
def test_bad_shards(tmp_path, capsys, files, message):
    pytest.importorskip("braceexpand", reason="shards need braceexpand")
    image = encoded(picture(0, COLOURS["red"]), "PNG")
    files = {name: image if content is None else content for name, content in files.items()}
    shard = write_shard(tmp_path / "0.tar", files)
    assert message.format(shard) in refused(capsys, "--webdataset", shard, *MODEL, "--out", tmp_path / "out")


@pytest.mark.parametrize("where", ["data", "header", "between", "garbage", "joined"])
@pytest.mark.parametrize("last", [False, True])
def test_a_shard_that_is_cut(tmp_path, capsys, where, last):
    pytest.importorskip("braceexpand", reason="shards need braceexpand")
    image = encoded(picture(0, COLOURS["red"]), "PNG")
    files = {f"{number}.{kind}": image if kind == "png" else b"0" for number in range(3) for kind in ("png", "cls")}
    for name in ("0.tar", "1.tar"):
        write_shard(tmp_path / name, files)
    shard = tmp_path / ("1.tar" if last else "0.tar")
    with tarfile.open(shard) as file:
        offset = file.getmember("2.png").offset_data
    content = shard.read_bytes()
    if where == "garbage":
        shard.write_bytes(content[: offset - 512] + b"x" * 512 + content[offset:])
    elif where == "joined":
        shard.write_bytes(2 * content)
    else:
        shard.write_bytes(content[: {"data": offset + 10, "header": offset - 100, "between": offset - 512}[where]])
    error = refused(capsys, "--webdataset", tmp_path / "{0,1}.tar", *MODEL, "--out", tmp_path / "out")
    assert f"cannot read {shard} as a whole, uncompressed tar file" in error


def test_shards_in_a_folder_named_like_a_pattern(tmp_path, capsys):
    pytest.importorskip("braceexpand", reason="shards need braceexpand")
    image = encoded(picture(0, COLOURS["red"]), "PNG")
    shards = tmp_path / "shards[1]"
    shards.mkdir()
    for name in ("0.tar", "1.tar"):
        write_shard(shards / name, {"a.png": image, "a.cls": b"\xef\xbb\xbf3\r\n"})
    run("--webdataset", shards / "{0..1}.tar", *MODEL, "--out", tmp_path / "out")
    assert read(tmp_path / "out" / "train")[1].tolist() == [3, 3]
    error = refused(capsys, "--webdataset", shards / "{0,1,0}.tar", *MODEL, "--out", tmp_path / "more")
    assert "0.tar more than once" in error


def test_file_that_is_no_tar(tmp_path, capsys):
    pytest.importorskip("braceexpand", reason="shards need braceexpand")
    (tmp_path / "0.tar").write_bytes(b"no tar file" * 100)
    error = refused(capsys, "--webdataset", tmp_path / "0.tar", *MODEL, "--out", tmp_path / "out")
    assert "as a whole, uncompressed tar file" in error
    assert "unbalanced braces" in refused(capsys, "--webdataset", "a{0..1", *MODEL, "--out", tmp_path / "out")


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ([], "give one source of --image-folder, --torchvision-dataset, --webdataset, got none"),
        (
            ["--image-folder", "a", "--webdataset", "b.tar"],
            "give one source of --image-folder, --torchvision-dataset, --webdataset, got --image-folder and "
            "--webdataset",
        ),
        (["--image-folder", "a"], "--image-folder a: there is no such folder"),
        (["--image-folder", "a", "--root", "b"], "--root goes with --torchvision-dataset, not with --image-folder"),
        (["--torchvision-dataset", "CIFAR"], "torchvision has no data set 'CIFAR'; did you mean CIFAR10"),
        (["--torchvision-dataset", "CIFAR10"], "--torchvision-dataset CIFAR10 needs --root"),
        (["--torchvision-dataset", "CIFAR10", "--root", "a"], "CIFAR10 cannot be opened: Dataset not found"),
        (["--torchvision-dataset", "FakeData", "--download"], "FakeData cannot be downloaded by torchvision"),
        (["--torchvision-dataset", "FakeData", "--torchvision-args", "{"], "--torchvision-args is not JSON"),
        (["--torchvision-dataset", "FakeData", "--torchvision-args", "[]"], "must be a JSON object, got []"),
        (["--torchvision-dataset", "FakeData", "--torchvision-args", '{"x": 1}'], "FakeData cannot be opened"),
        (["--torchvision-dataset", "FakeData", "--torchvision-args", '{"size": 0}'], "FakeData has no images"),
        (["--image-folder", "a", "--batch-size", "0"], "--batch-size must be at least 1, got 0"),
        (["--image-folder", "a", "--split", "a/b"], "--split must be the name of a folder, got 'a/b'"),
    ],
)
def test_bad_arguments(tmp_path, capsys, monkeypatch, arguments, message):
    monkeypatch.chdir(tmp_path)
    assert message in refused(capsys, *arguments, *MODEL, "--out", tmp_path / "out")
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize(
    ("backbone", "weights", "message"),
    [
        ("resnet18", "none", "unknown backbone 'resnet18': it must be torchvision:MODEL or open_clip:MODEL"),
        ("torchvision:resnet19", "none", "unknown backbone torchvision:resnet19; did you mean resnet18"),
        ("torchvision:squeezenet1_0", "none", "does not end in a linear classifier"),
        ("torchvision:vit_b_16", "none", "torchvision:vit_b_16 does not take images of 32x32 pixels"),
        ("torchvision:resnet18", "IMAGENET1K_V9", "did you mean IMAGENET1K_V1"),
        ("torchvision:resnet18", "IMAGENET1K_V1", "--image-size is for --weights none or a file"),
    ],
)
def test_bad_backbones(images, tmp_path, capsys, backbone, weights, message):
    command = ["--image-folder", images, "--image-size", 32, "--backbone", backbone, "--weights", weights]
    assert message in refused(capsys, *command, "--out", tmp_path)


def test_weights_without_network(images, tmp_path, capsys, monkeypatch):
    def offline(*_, **__):
        raise urllib.error.URLError("no network")

    monkeypatch.setenv("TORCH_HOME", str(tmp_path))
    monkeypatch.setattr(torch.hub, "download_url_to_file", offline)
    command = ["--image-folder", images, "--backbone", "torchvision:resnet18", "--weights", "DEFAULT"]
    error = refused(capsys, *command, "--out", tmp_path)
    assert "weights DEFAULT of torchvision:resnet18 could not be loaded" in error
    assert "no network" in error


def test_weights_from_a_file(images, tmp_path, capsys):
    """The classifier in the file may have any number of classes; other parameters must fit."""
    torch.manual_seed(5)
    model = torchvision.models.resnet18(num_classes=7).eval()
    torch.save({"state_dict": model.state_dict()}, tmp_path / "model.pt")
    command = ["--image-folder", images, "--backbone", "torchvision:resnet18", "--image-size", 32, "--weights"]
    run(*command, tmp_path / "model.pt", "--out", tmp_path / "out", "--dtype", "float32")
    model.fc = torch.nn.Identity()
    with torch.inference_mode():
        expected = model(torch.stack([prepared(Image.open(path)) for path in sorted(images.glob("*/*.png"))]))
    np.testing.assert_allclose(read(tmp_path / "out" / "train")[0], expected.numpy(), rtol=1e-4, atol=1e-5)

    torch.save({"conv1.weight": torch.ones(1)}, tmp_path / "other.pt")
    error = refused(capsys, *command, tmp_path / "other.pt", "--out", tmp_path / "out2")
    assert "do not fit torchvision:resnet18: Missing key(s)" in error
    (tmp_path / "junk.pt").write_bytes(b"junk")
    assert "cannot read weights" in refused(capsys, *command, tmp_path / "junk.pt", "--out", tmp_path / "out2")


def test_corrupt_image_is_named_and_can_be_put_right(images, tmp_path, capsys):
    folder = make_images(tmp_path / "images")
    bad = folder / "green" / "2.png"
    whole = bad.read_bytes()
    bad.write_bytes(whole[:200])
    command = ["--image-folder", folder, *MODEL, "--batch-size", 3, "--num-workers", 1, "--out", tmp_path / "out"]
    error = refused(capsys, *command)
    assert f"cannot read image {bad}" in error
    assert "6 rows are done" in error
    bad.write_bytes(whole)
    run(*command)
    run("--image-folder", images, *MODEL, "--batch-size", 3, "--out", tmp_path / "right")
    for found, right in zip(read(tmp_path / "out/train"), read(tmp_path / "right/train"), strict=True):
        np.testing.assert_array_equal(found, right)


def sources(place, content):
    """One sample of each source that reads files."""
    (place / "images" / "a").mkdir(parents=True)
    (place / "images" / "a" / "0.png").write_bytes(content)
    yield FolderSource(place / "images", None)
    yield TorchvisionSource("ImageFolder", place / "images", False, {})
    pytest.importorskip("braceexpand", reason="shards need braceexpand")
    shard = write_shard(place / "0.tar", {"a.png": content, "a.cls": b"0"})
    yield ShardSource(str(shard), None)


def test_images_of_16_bits_are_scaled(tmp_path):
    grey = np.linspace(0, 65535, 64).astype(np.uint16).reshape(8, 8)
    for source in sources(tmp_path, encoded(Image.fromarray(grey), "PNG")):
        image, label = source.read(0)
        assert (image.mode, label) == ("RGB", 0)
        np.testing.assert_allclose(np.array(image), np.repeat(grey[..., None] / 257, 3, axis=2), atol=0.6)


@pytest.mark.parametrize("kind", ["EPS", "TGA", "TIFF"])
def test_images_of_other_formats_and_depths_are_refused(kind, tmp_path, monkeypatch):
    """A PostScript file reaches no program, whatever its name."""
    monkeypatch.setattr("PIL.EpsImagePlugin.Ghostscript", lambda *arguments, **settings: pytest.fail("a program ran"))
    picture = Image.new("F", (8, 8)) if kind == "TIFF" else Image.new("RGB", (8, 8))
    for source in sources(tmp_path, encoded(picture, kind)):
        message = Samples(source, torchvision.transforms.functional.to_tensor)[0]
        assert re.match("cannot read .*: (cannot identify|no image can be decoded|its pixels are floating)", message)


def test_features_out_of_range(images, tmp_path, capsys):
    model = torchvision.models.resnet18()
    model.layer4[1].bn2.bias.data.fill_(1e6)
    torch.save(model.state_dict(), tmp_path / "model.pt")
    command = ["--image-folder", images, "--backbone", "torchvision:resnet18", "--image-size", 32]
    command += ["--weights", tmp_path / "model.pt", "--out", tmp_path / "out"]
    error = refused(capsys, *command)
    assert "0.png are NaN or infinite in float16; try --dtype float32" in error
    run(*command, "--dtype", "float32", "--overwrite")


def test_other_settings_are_refused(images, tmp_path, capsys):
    command = ["--image-folder", images, *MODEL, "--out", tmp_path]
    run(*command)
    before = (tmp_path / "train" / "features.npy").stat().st_mtime_ns
    run(*command)  # complete: nothing to do
    assert (tmp_path / "train" / "features.npy").stat().st_mtime_ns == before
    error = refused(capsys, *command, "--dtype", "float32", "--seed", 1)
    assert "holds a run with other settings (" in error
    assert "weights was 'none, seed 0', now 'none, seed 1'" in error
    assert "dtype was 'float16', now 'float32'" in error
    assert read(tmp_path / "train")[0].dtype == np.float16
    run(*command, "--dtype", "float32", "--overwrite")
    assert read(tmp_path / "train")[0].dtype == np.float32

    (tmp_path / "train" / "labels.npy").unlink()
    assert "labels.npy.part is gone" in refused(capsys, *command, "--dtype", "float32")
    (tmp_path / "train" / "progress.json").write_text("[]")
    assert "is not one of this program" in refused(capsys, *command)
    (tmp_path / "train" / "progress.json").unlink()
    assert "has no progress.json beside it" in refused(capsys, *command)
    run(*command, "--overwrite")
    assert read(tmp_path / "train")[0].dtype == np.float16


def test_class_order(images, tmp_path, capsys):
    out = tmp_path / "out"
    run("--image-folder", images, *MODEL, "--out", out)
    val = make_images(tmp_path / "val", ["blue", "red"], each=1)
    command = ["--image-folder", val, *MODEL, "--out", out, "--split", "val"]
    error = refused(capsys, *command)
    assert "class 1 is 'red', there 'green'" in error
    assert f"--classes {out / 'classes.json'}" in error
    assert "class order does not match" in refused(capsys, *command, "--overwrite")
    run(*command, "--classes", out / "classes.json")
    assert read(out / "val")[1].tolist() == [0, 2]

    classes = tmp_path / "classes.json"
    classes.write_text('["red", "blue"]')
    reordered = ["--image-folder", val, *MODEL, "--out", tmp_path / "reordered", "--classes", classes]
    run(*reordered)
    labels = read(tmp_path / "reordered" / "train")[1]
    assert sorted(labels.tolist()) == [0, 1]
    samples = FolderSource(val, classes)
    assert [("red", "blue")[label] in samples.name(row) for row, label in enumerate(labels)] == [True, True]
    # Alone in its folder, a split may change the order.
    run("--image-folder", val, *MODEL, "--out", tmp_path / "reordered", "--overwrite")
    assert json.loads((tmp_path / "reordered" / "classes.json").read_text()) == ["blue", "red"]

    for content, message in (
        ('["red"]', f"folder {val / 'blue'} is not a class of {classes}"),
        ('["red", "blue", "red"]', "has 'red' more than once"),
        ('{"red": 0}', "must hold a JSON list of class names"),
        ("red", "as JSON"),
    ):
        classes.write_text(content)
        assert message in refused(capsys, *command, "--classes", classes)


def test_folders_without_images(tmp_path, capsys):
    (tmp_path / "images").mkdir()
    command = ["--image-folder", tmp_path / "images", *MODEL, "--out", tmp_path / "out"]
    assert "it must hold a folder for each class" in refused(capsys, *command)
    (tmp_path / "images" / "red").mkdir()
    (tmp_path / "images" / "red" / "notes.txt").write_text("none")
    assert "its folders hold none of" in refused(capsys, *command)


def test_folders_and_files_of_systems_and_programs(images, tmp_path, capsys):
    """They change no class's number and no row, and are counted."""
    folder = tmp_path / "images"
    shutil.copytree(images, folder)
    for name in (".ipynb_checkpoints", "__MACOSX", "a empty"):
        (folder / name).mkdir()
    picture(0, COLOURS["red"]).save(folder / "__MACOSX" / "0.png")
    (folder / "blue" / "._0.png").touch()
    (folder / "red" / "4.heic").touch()
    found = FolderSource(folder, None)
    expected = FolderSource(images, None)
    assert found.classes == expected.classes == ["blue", "green", "red"]
    assert [label for _, label in found.samples] == [label for _, label in expected.samples]
    said = capsys.readouterr().err
    assert "2 files (1 .heic, 1 hidden)" in said
    assert "folders that are hidden or without an image (.ipynb_checkpoints, __MACOSX, a empty)" in said
    picture(0, COLOURS["red"]).save(folder / "red" / "5.JFIF", format="JPEG")
    assert len(FolderSource(folder, None)) == 13


def test_disk_too_small(images, tmp_path, capsys, monkeypatch):
    usage = type("Usage", (), {"free": 1000})
    monkeypatch.setattr(output.shutil, "disk_usage", lambda _: usage)
    assert "GB are free there" in refused(capsys, "--image-folder", images, *MODEL, "--out", tmp_path)


def test_open_clip(images, tmp_path, capsys, monkeypatch):
    open_clip = pytest.importorskip("open_clip", reason="tests its backbones")
    command = ["--image-folder", images, "--device", "cpu", "--out", tmp_path, "--backbone"]
    assert "did you mean ViT-B-32" in refused(capsys, *command, "open_clip:ViT-B32", "--weights", "none")
    assert "did you mean openai" in refused(capsys, *command, "open_clip:RN50", "--weights", "openia")

    def offline(*_, **__):
        raise OSError("no network")

    monkeypatch.setattr(open_clip.factory, "download_pretrained", offline)
    error = refused(capsys, *command, "open_clip:RN50", "--weights", "openai")
    assert "weights openai of open_clip:RN50 could not be loaded" in error
    assert "no network" in error


@pytest.mark.slow
def test_open_clip_features(images, tmp_path):
    open_clip = pytest.importorskip("open_clip", reason="tests its backbones")
    command = ["--image-folder", images, "--device", "cpu", "--backbone", "open_clip:ViT-B-32", "--image-size", 32]
    run(*command, "--weights", "none", "--out", tmp_path / "random", "--dtype", "float32")
    torch.manual_seed(0)
    model, _, transform = open_clip.create_model_and_transforms("ViT-B-32", force_image_size=32)
    paths = sorted(images.glob("*/*.png"))
    with torch.inference_mode():
        expected = model.eval().encode_image(torch.stack([transform(Image.open(path)) for path in paths]))
    features, labels = read(tmp_path / "random" / "train")
    assert features.shape == (12, 512)
    assert labels.tolist() == [0] * 4 + [1] * 4 + [2] * 4
    np.testing.assert_allclose(features, expected.numpy(), rtol=1e-3, atol=1e-4)

    torch.save(model.state_dict(), tmp_path / "model.pt")
    run(*command, "--weights", tmp_path / "model.pt", "--out", tmp_path / "file", "--dtype", "float32")
    np.testing.assert_array_equal(read(tmp_path / "file" / "train")[0], features)
