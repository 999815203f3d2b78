"""What the package imports is declared."""

import ast
import re
import sys
from pathlib import Path

import pytest

import scent_lightning

ROOT = Path(__file__).parents[1]
# Modules whose distribution has another name.
NAMES = {"PIL": "pillow", "open_clip": "open_clip_torch", "sklearn": "scikit-learn", "yaml": "pyyaml"}

# Comes with torch where there are GPUs; its one user asks for it first, and says so where it is not.
WITH_TORCH = {"triton"}


def imported(path: Path) -> set[str]:
    """Distributions of the modules that a file imports at its top or within a function."""
    modules = set()
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            modules |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module and not node.level:
            modules.add(node.module)
    tops = {module.partition(".")[0] for module in modules} - sys.stdlib_module_names - {"scent_lightning"}
    return {NAMES.get(top, top).lower().replace("_", "-") for top in tops}


@pytest.fixture(scope="module")
def declared() -> set[str]:
    """The names under ``dependencies`` of the project."""
    text = (ROOT / "pyproject.toml").read_text(encoding="utf-8")
    listed = re.search(r"^dependencies = \[(.*?)^\]", text, re.MULTILINE | re.DOTALL)
    assert listed is not None
    return {name.lower().replace("_", "-") for name in re.findall(r'^\s*"([\w-]+)', listed[1], re.MULTILINE)}


def test_every_import_is_declared(declared):
    files = Path(scent_lightning.__file__).parent.rglob("*.py")
    assert set().union(*map(imported, files)) <= declared | WITH_TORCH


def test_an_import_of_any_form_is_seen(tmp_path):
    file = tmp_path / "module.py"
    file.write_text("import os, yaml\ndef f():\n    from PIL.Image import open\n    import typing_extensions as t\n")
    assert imported(file) == {"pillow", "pyyaml", "typing-extensions"}
