"""The decoder of images: every depth that Pillow opens is scaled or refused, and no other format is opened."""

import io
import struct
import zlib

import numpy as np
import pandas as pd
import pytest
import torch
from PIL import Image

from scent_lightning.data import ImageTextDataModule
from scent_lightning.data.images import UnreadableImageError, decode_image, read_rgb, to_rgb
from scent_lightning.data.imbalanced import ImbalancedImageDataModule
from scent_lightning.errors import InputError

SIDE = 8
GREY = np.linspace(0, 65535, SIDE * SIDE).astype(np.uint16).reshape(SIDE, SIDE)


def grey_png(values, depth=16, colour=0):
    """A PNG written by hand; values: (H, W) or (H, W, channels)."""

    def chunk(kind, content):
        return struct.pack(">I", len(content)) + kind + content + struct.pack(">I", zlib.crc32(kind + content))

    rows = b"".join(b"\0" + row.astype(">u2").tobytes() for row in values)
    header = struct.pack(">IIBBBBB", values.shape[1], values.shape[0], depth, colour, 0, 0, 0)
    return b"\x89PNG\r\n\x1a\n" + chunk(b"IHDR", header) + chunk(b"IDAT", zlib.compress(rows)) + chunk(b"IEND", b"")


def grey_tiff(content, bits, white_is_zero=False, sample_format=1, endian="<"):
    """An uncompressed TIFF of SIDE × SIDE, written by hand."""
    tags = {256: SIDE, 257: SIDE, 258: bits, 259: 1, 262: 0 if white_is_zero else 1, 273: 8, 277: 1, 278: SIDE}
    tags |= {279: len(content), 339: sample_format}
    entries = b"".join(
        struct.pack(f"{endian}HHI", tag, 4, 1) + struct.pack(f"{endian}I", value)
        if tag in (273, 279)
        else struct.pack(f"{endian}HHI", tag, 3, 1) + struct.pack(f"{endian}HH", value, 0)
        for tag, value in sorted(tags.items())
    )
    mark = b"II" if endian == "<" else b"MM"
    start = mark + struct.pack(f"{endian}HI", 42, 8 + len(content)) + content
    return start + struct.pack(f"{endian}H", len(tags)) + entries + struct.pack(f"{endian}I", 0)


def in_12_bits(values):
    pairs = values.reshape(-1, 2).astype(int)
    return b"".join(bytes([a >> 4, (a & 15) << 4 | b >> 8, b & 255]) for a, b in pairs.tolist())


def saved(image, form, **arguments):
    file = io.BytesIO()
    image.save(file, form, **arguments)
    return file.getvalue()


PICTURE = Image.fromarray(GREY)
SCALED = {
    "png": grey_png(GREY),
    "tiff": saved(PICTURE, "TIFF"),
    "compressed tiff": saved(PICTURE, "TIFF", compression="tiff_lzw"),
    "big-endian tiff": grey_tiff(GREY.astype(">u2").tobytes(), 16, endian=">"),
    "inverted tiff": grey_tiff((65535 - GREY).astype("<u2").tobytes(), 16, white_is_zero=True),
    "12-bit tiff": grey_tiff(in_12_bits(GREY >> 4), 12),
    "pgm": b"P5 8 8 65535\n" + GREY.astype(">u2").tobytes(),
    "12-bit pgm": b"P5 8 8 4095\n" + (GREY >> 4).astype(">u2").tobytes(),
    "text pgm": b"P2 8 8 1000\n" + " ".join(str(round(value / 65.535)) for value in GREY.ravel().tolist()).encode(),
    "colour png": grey_png(np.repeat(GREY[..., None], 3, axis=2), colour=2),
    "transparent png": grey_png(np.stack([GREY, np.full_like(GREY, 65535)], axis=2), colour=4),
    "ppm": b"P6 8 8 65535\n" + np.repeat(GREY[..., None], 3, axis=2).astype(">u2").tobytes(),
}
REFUSED = {
    "32-bit tiff": (saved(Image.fromarray(GREY.astype(np.int32)), "TIFF"), "integers"),
    "unsigned 32-bit tiff": (grey_tiff((GREY.astype("<u4") * 65537).tobytes(), 32), "integers of 32 bits or with a"),
    "signed 16-bit tiff": (grey_tiff((GREY.astype(int) - 32768).astype("<i2").tobytes(), 16, False, 2), "with a sign"),
    "signed 8-bit tiff": (grey_tiff(np.arange(-32, 32, dtype=np.int8).tobytes(), 8, False, 2), "integers with a sign"),
    "float tiff": (saved(Image.fromarray(GREY.astype(np.float32)), "TIFF"), "floating-point numbers"),
    "float pgm": (b"Pf 8 8 -1.0\n" + GREY.astype("<f4").tobytes(), "floating-point numbers"),
}


@pytest.mark.parametrize("name", SCALED)
def test_more_than_8_bits_are_scaled(name):
    pixels = decode_image(io.BytesIO(SCALED[name]))
    assert (pixels.dtype, pixels.shape) == (torch.uint8, (3, SIDE, SIDE))
    exact = torch.from_numpy(GREY / 257).expand(3, SIDE, SIDE)
    # Of colour Pillow takes the upper 8 bits.
    assert (pixels - exact).abs().max() <= (1 if name in ("colour png", "transparent png", "ppm") else 0.6)
    assert (pixels.min(), pixels.max()) == (0, 255)


@pytest.mark.parametrize("name", REFUSED)
def test_other_depths_are_refused(name):
    content, message = REFUSED[name]
    with pytest.raises(UnreadableImageError, match=message) as caught:
        decode_image(io.BytesIO(content))
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("mode", ["1", "L", "LA", "P", "RGB", "RGBA", "CMYK", "YCbCr"])
def test_8_bits_are_what_pillow_makes_of_them(mode):
    noise = np.random.default_rng(0).integers(0, 256, (9, 7, 4), dtype=np.uint8)
    image = Image.fromarray(noise).convert("RGB").convert(mode)
    form = "TIFF" if mode in ("CMYK", "YCbCr") else "PNG"
    content = saved(image, form)
    expected = np.array(Image.open(io.BytesIO(content)).convert("RGB"))
    assert np.array_equal(decode_image(io.BytesIO(content)).permute(1, 2, 0).numpy(), expected)
    assert np.array_equal(np.array(to_rgb(image)), np.array(image.convert("RGB")))


@pytest.mark.parametrize("form", ["JPEG", "PNG", "WEBP", "GIF", "BMP", "TIFF", "PPM"])
def test_formats(form, tmp_path):
    """Whatever the file is called."""
    image = Image.fromarray(np.full((6, 5, 3), 90, np.uint8))
    (tmp_path / "a.png").write_bytes(saved(image, form))
    assert np.abs(np.array(read_rgb(tmp_path / "a.png")).astype(int) - 90).max() <= 2


POSTSCRIPT = b"%!PS-Adobe-3.0 EPSF-3.0\n%%BoundingBox: 0 0 8 8\n%%EndComments\n0 0 8 8 rectfill\nshowpage\n%%EOF\n"
OTHERS = {
    "postscript": POSTSCRIPT,
    "encapsulated with a preview": b"\xc5\xd0\xd3\xc6"
    + struct.pack("<IIIIIIHH", 32, len(POSTSCRIPT), 0, 0, 0, 0, 0, 0)
    + POSTSCRIPT,
    "tga": saved(Image.fromarray(np.zeros((8, 8, 3), np.uint8)), "TGA"),
    "avif magic": b"\0\0\0\x1cftypavif\0\0\0\0avifmif1miaf",
}


@pytest.fixture
def no_programs(monkeypatch):
    """Fails where a file would reach Ghostscript, or any other program."""

    def run(*arguments, **settings):
        raise AssertionError(f"ran {arguments}")

    for name in ("Popen", "run", "check_call", "call", "check_output"):
        monkeypatch.setattr(f"subprocess.{name}", run)
    monkeypatch.setattr("PIL.EpsImagePlugin.Ghostscript", run)


@pytest.mark.parametrize("name", OTHERS)
def test_other_formats_are_not_opened(name, tmp_path, no_programs):
    (tmp_path / "x.png").write_bytes(OTHERS[name])
    with pytest.raises(UnreadableImageError, match="cannot identify image file"):
        read_rgb(tmp_path / "x.png")
    with pytest.raises(UnreadableImageError, match="no image can be decoded from it"):
        read_rgb(io.BytesIO(OTHERS[name]))


def folder_of(tmp_path, content):
    for name in ("pos", "neg"):
        (tmp_path / "train" / name).mkdir(parents=True)
        for number in range(2):
            (tmp_path / "train" / name / f"{number}.png").write_bytes(content)
    return ImbalancedImageDataModule(str(tmp_path), batch_size=2, augment=False, mean=[0.0] * 3, std=[1.0] * 3)


def table_of(tmp_path, content):
    for number in range(2):
        (tmp_path / f"{number}.png").write_bytes(content)
    pd.DataFrame({"filepath": ["0.png", "1.png"], "title": ["a", "b"]}).to_csv(tmp_path / "t.csv", index=False)
    return ImageTextDataModule(
        path=str(tmp_path / "t.csv"),
        tokenizer=lambda captions: torch.zeros(len(captions), 2, dtype=torch.int64),
        image_size=SIDE,
        batch_size=2,
        mean=[0.0] * 3,
        std=[1.0] * 3,
    )


@pytest.mark.parametrize("make", [folder_of, table_of])
def test_data_modules_read_alike(make, tmp_path, no_programs):
    data = make(tmp_path, SCALED["png"])
    loader = data.predict_dataloader() if make is table_of else data.train_eval_dataloader()
    images = next(iter(loader))[0]
    expected = torch.from_numpy(GREY / 65535).float().expand(len(images), 3, SIDE, SIDE)
    torch.testing.assert_close(images, expected, atol=0.6 / 255, rtol=0)


@pytest.mark.parametrize("content", [REFUSED["float tiff"][0], POSTSCRIPT])
def test_data_modules_refuse_alike(content, tmp_path, no_programs):
    (tmp_path / "a").mkdir()
    with pytest.raises(
        InputError, match=r"cannot read .*0\.png as an image: (its pixels are floating|cannot identify)"
    ):
        list(folder_of(tmp_path / "a", content).train_eval_dataloader())
    data = table_of(tmp_path, content)
    with (
        pytest.warns(UserWarning, match=r"pair 0 .* skipped: cannot read .*0\.png as an image: (its|cannot identify)"),
        pytest.raises(InputError, match="has no pair that can be used, of 2"),
    ):
        list(data.predict_dataloader())
