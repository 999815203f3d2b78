"""The tutorials run to their end, draw their pictures and find what they say; each notebook has its script's cells."""

import re

import jupytext
import pytest

from tests.conftest import ROOT
from tests.forked import finished, start_script

FOLDER = ROOT / "examples" / "tutorials"
SCRIPTS = sorted(FOLDER.glob("*.py"))
KEPT = 400_000  # bytes of a notebook, its pictures included

# Pictures, data that are needed, and of what is printed: a pattern, and the range its numbers are in.
TUTORIALS = {
    "own_csv": (2, None, [(r"train: worst  +([\d.]+) .* ([\d.]+)", (115, 130), (155, 170))]),
    "own_module": (
        2,
        None,
        [
            (r"BSGD: exact loss ([\d.]+)", (3.6, 3.9)),
            (r"SCENT: exact loss ([\d.]+)", (3.4, 3.7)),
            (r"plain torch: exact loss ([\d.]+), (\d+) rows", (3.9, 4.3), (1400, 1400)),
            (r"Fabric: exact loss ([\d.]+), (\d+) rows", (3.9, 4.3), (1400, 1400)),
        ],
    ),
    "glyph_classifier": (
        2,
        "glyphs",
        [(r"test 0, classifier: ([\d.]+)", (36, 44)), (r"by ν: (\d+) .* (\d+) %", (44, 54), (65, 75))],
    ),
    "few_alarms": (3, None, [(r"balanced: ([\d.]+) %", (19, 23)), (r"partial AUC: ([\d.]+) %", (27, 30))]),
    "emoji_search": (2, "emoji", [(r"first ten: (\d+) %", (30, 45))]),
}


def cells(notebook):
    return [(cell.cell_type, cell.source) for cell in notebook.cells]


def test_there_is_a_notebook_for_each():
    assert {path.stem for path in SCRIPTS} == set(TUTORIALS) == {path.stem for path in FOLDER.glob("*.ipynb")}


@pytest.mark.parametrize("script", SCRIPTS, ids=lambda path: path.stem)
def test_a_notebook_has_the_cells_of_its_script(script):
    notebook = script.with_suffix(".ipynb")
    assert cells(jupytext.read(notebook)) == cells(jupytext.read(script))
    assert notebook.stat().st_size < KEPT
    text = script.read_text()
    assert text.count("# %% [markdown]") >= 6
    assert not re.search(r"^# *[%!]\w", text, re.MULTILINE)  # a magic command, which a script does not have


@pytest.mark.parametrize("script", SCRIPTS, ids=lambda path: path.stem)
def test_a_notebook_was_run_as_a_whole(script):
    code = [cell for cell in jupytext.read(script.with_suffix(".ipynb")).cells if cell.cell_type == "code"]
    outputs = [output for cell in code for output in cell.outputs]
    assert [cell.execution_count for cell in code] == list(range(1, len(code) + 1))
    assert sum("image/png" in output.get("data", {}) for output in outputs) >= TUTORIALS[script.stem][0]
    assert not any(output.output_type == "error" or output.get("name") == "stderr" for output in outputs)


@pytest.mark.slow
@pytest.mark.parametrize("name", TUTORIALS)
def test_a_tutorial_runs_and_finds_what_it_says(name, tmp_path, request):
    pictures, needed, findings = TUTORIALS[name]
    environment = {"OMP_NUM_THREADS": "1"}
    if needed is not None:
        folder = request.getfixturevalue("data_dir")
        if not (folder / needed).is_dir():
            pytest.skip(f"no {needed} in {folder}")
        environment["SCENT_LIGHTNING_DATA"] = str(folder)
    done = finished(start_script(tmp_path, FOLDER / f"{name}.py", **environment))
    assert len(list(tmp_path.glob("*.png"))) == pictures
    for pattern, *ranges in findings:
        numbers = [float(number) for number in re.search(pattern, done.stdout).groups()]
        for number, (least, most) in zip(numbers, ranges, strict=True):
            assert least <= number <= most, (pattern, number)
