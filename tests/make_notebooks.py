"""Run tutorials, and write each one's notebook with its output beside it.

    pip install nbclient ipykernel
    SCENT_LIGHTNING_DATA=FOLDER python tests/make_notebooks.py examples/tutorials/*.py

Cells are executed in a folder of their own, pictures get a palette (a third of the size), and what a cell says of the
environment that it ran in (stderr) is left out.
"""

import base64
import io
import sys
import tempfile
from pathlib import Path

import jupytext
from PIL import Image

COLOURS = 128


def with_palette(png):
    """A picture with few colours, in base64 as it came."""
    picture = Image.open(io.BytesIO(base64.b64decode(png))).convert("RGB").quantize(COLOURS)
    small = io.BytesIO()
    picture.save(small, "PNG", optimize=True)
    return base64.b64encode(small.getvalue()).decode()


def make(script):
    from nbclient import NotebookClient

    notebook = jupytext.read(script)
    with tempfile.TemporaryDirectory() as folder:
        place = {"metadata": {"path": folder}}
        NotebookClient(notebook, timeout=900, kernel_name="python3", resources=place, record_timing=False).execute()
    notebook.metadata.pop("language_info", None)
    for number, cell in enumerate(notebook.cells):
        cell["id"] = f"cell-{number}"
        if cell.cell_type == "code":
            cell.outputs = [output for output in cell.outputs if output.get("name") != "stderr"]
            for output in cell.outputs:
                if "image/png" in output.get("data", {}):
                    output["data"]["image/png"] = with_palette(output["data"]["image/png"])
    jupytext.write(notebook, script.with_suffix(".ipynb"))


if __name__ == "__main__":
    for name in sys.argv[1:]:
        make(Path(name).resolve())
