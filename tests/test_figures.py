"""The look of the pictures: one colour a method, a vector file beside each PNG, the same bytes each time."""

import math

import matplotlib
import pytest

from scent_lightning.figures import (
    COLOURS,
    METHOD_COLOURS,
    METHOD_MARKERS,
    colour_of,
    look_of,
    mean_and_range,
    new_figure,
    note,
    save,
    style,
)
from scent_lightning.updates import __all__ as updates


def drawn(**more):
    figure, panels = new_figure(1, 2, **more)
    for method in ("SCENT", "BSGD"):
        panels[0, 0].plot([0, 1, 2], [3.0, 2.0, 1.5], label=method, color=colour_of(method))
    panels[0, 0].legend()
    return figure


def _linear(channel):
    return channel / 12.92 if channel <= 0.04045 else ((channel + 0.055) / 1.055) ** 2.4


# Machado, Oliveira & Fernandes (2009), severity 1: what linear RGB becomes for eyes without red, and without green.
BLIND = {
    "protanopia": ((0.152286, 1.052583, -0.204868), (0.114503, 0.786281, 0.099216), (-0.003882, -0.048116, 1.051998)),
    "deuteranopia": ((0.367322, 0.860646, -0.227968), (0.280085, 0.672501, 0.047413), (-0.01182, 0.04294, 0.968881)),
}


SIGHTED = ((1, 0, 0), (0, 1, 0), (0, 0, 1))


def _lab(colour, matrix=SIGHTED):
    linear = [_linear(int(colour[i : i + 2], 16) / 255) for i in (1, 3, 5)]
    red, green, blue = (min(max(sum(a * b for a, b in zip(row, linear, strict=True)), 0), 1) for row in matrix)
    xyz = (
        (0.4124564 * red + 0.3575761 * green + 0.1804375 * blue) / 0.95047,
        0.2126729 * red + 0.7151522 * green + 0.0721750 * blue,
        (0.0193339 * red + 0.1191920 * green + 0.9503041 * blue) / 1.08883,
    )
    x, y, z = (v ** (1 / 3) if v > 0.008856 else 7.787 * v + 16 / 116 for v in xyz)
    return 116 * y - 16, 500 * (x - y), 200 * (y - z)


def _least_difference(colours, matrix):
    seen = [_lab(colour, matrix) for colour in colours]
    return min(math.dist(a, b) for i, a in enumerate(seen) for b in seen[:i])


@pytest.mark.parametrize("kind", BLIND)
def test_the_colour_blind_tell_the_colours_apart(kind):
    matplotlibs = [matplotlib.colors.to_hex(colour) for colour in matplotlib.colormaps["tab10"].colors]
    least = _least_difference(COLOURS, BLIND[kind])
    assert least > 15  # CIELAB; 2.3 is just noticeable
    assert least > _least_difference(matplotlibs[: len(COLOURS)], BLIND[kind])


def test_no_colour_fades_into_the_paper():
    assert min(math.dist(_lab(colour), _lab("#ffffff")) for colour in COLOURS) > 30


def test_every_update_has_a_colour_of_its_own():
    named = {name for name in METHOD_COLOURS if name in updates}
    assert named == set(METHOD_COLOURS)
    assert len(set(METHOD_COLOURS.values())) == len(METHOD_COLOURS)


def test_a_vector_file_lies_beside_each_png_and_is_the_same_each_time(tmp_path):
    first, second = save(drawn(), tmp_path / "new" / "a.png"), save(drawn(), tmp_path / "b.png")
    assert first.read_bytes()[:4] == b"\x89PNG"
    vector = first.with_suffix(".svg").read_text(encoding="utf-8")
    assert vector == second.with_suffix(".svg").read_text(encoding="utf-8")
    assert ">SCENT<" in vector  # text stays text: it can be searched and selected


@pytest.mark.parametrize(
    ("name", "vector", "files"),
    [
        ("a.pdf", True, {"a.pdf"}),
        ("a.svg", True, {"a.svg"}),
        ("a.png", False, {"a.png"}),
    ],
)
def test_what_is_written(tmp_path, name, vector, files):
    save(drawn(), tmp_path / name, vector=vector)
    assert {path.name for path in tmp_path.iterdir()} == files


def test_nothing_global_changes(tmp_path):
    before = dict(matplotlib.rcParams)
    save(drawn(sharey=True), tmp_path / "a.png")
    assert dict(matplotlib.rcParams) == before


def test_a_series_without_a_method_takes_the_colour_of_its_place():
    assert colour_of("mine", ["other", "mine"]) == COLOURS[1]
    assert colour_of("mine") == COLOURS[0]
    assert colour_of("SOX", ["SOX"]) == METHOD_COLOURS["SOX"]


def test_series_of_no_method_take_colours_that_are_left():
    among = ["OpenCLIP", "SOX", "SCENT auto", "mine", "SCENT"]
    colours = [colour_of(each, among) for each in among]
    assert colours[1:3] == [METHOD_COLOURS["SOX"], METHOD_COLOURS["SCENT"]]
    assert colours[4] == colours[2]
    assert len(set(colours)) == 4


@pytest.mark.parametrize("names", [[*METHOD_COLOURS], [f"series {i}" for i in range(20)], ["", " ", "SCENT"]])
def test_any_number_of_series_has_a_look(names):
    looks = [look_of(name, names) for name in names]
    assert all(look["color"] in COLOURS for look in looks)


def test_variants_of_a_method_differ_by_their_lines():
    looks = [look_of(name) for name in ("SCENT", "SCENT auto", "SCENT default", "SCENT guard")]
    assert {look["color"] for look in looks} == {METHOD_COLOURS["SCENT"]}
    assert {look["marker"] for look in looks} == {METHOD_MARKERS["SCENT"]}
    assert len({look["linestyle"] for look in looks}) == 4
    assert len(set(METHOD_MARKERS.values())) == len(METHOD_MARKERS)


@pytest.mark.parametrize(
    ("values", "mean", "bands"),
    [
        ([[1.0, 3.0], [2.0, 6.0], [5.0, 5.0]], [2.0, 4.0, 5.0], 1),
        ([[1.0], [2.0], [4.0]], [1.0, 2.0, 4.0], 0),  # of one seed there is no range
        ([[1.0], [2.0, 4.0], [4.0]], [1.0, 3.0, 4.0], 1),
    ],
)
def test_mean_and_range(values, mean, bands):
    _, panels = new_figure()
    axes = panels[0, 0]
    mean_and_range(axes, [1, 2, 3], values, "mine", color=COLOURS[2])
    assert axes.lines[0].get_ydata().tolist() == mean
    assert len(axes.collections) == bands
    if bands:
        heights = axes.collections[0].get_paths()[0].vertices[:, 1]
        assert (heights.min(), heights.max()) == (min(map(min, values)), max(map(max, values)))


def test_a_note_stands_below_the_picture(tmp_path):
    figure = drawn()
    note(figure, "band: from the least to the largest of three seeds")
    vector = save(figure, tmp_path / "a.png").with_suffix(".svg").read_text(encoding="utf-8")
    assert "three seeds" in vector


def test_a_function_that_draws_has_the_look():
    @style()
    def draw():
        return matplotlib.rcParams["legend.frameon"]

    before = matplotlib.rcParams["legend.frameon"]
    assert draw() is False
    assert draw() is False  # more than once
    assert matplotlib.rcParams["legend.frameon"] == before
