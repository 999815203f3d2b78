"""A run that is killed over and over, and resumed from its last checkpoint, ends like one never killed, bit by bit."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.kill_and_resume import SETTINGS

KILLS = 10


@pytest.mark.slow
@pytest.mark.parametrize("name", SETTINGS)
def test_killed_anywhere(name, tmp_path):
    root = Path(__file__).parent.parent
    done = subprocess.run(
        [sys.executable, "-m", "tests.kill_and_resume", name, str(tmp_path), str(KILLS)],
        cwd=root,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=900,
    )
    assert done.returncode == 0, done.stdout + done.stderr[-5000:]
    assert done.stdout.count("killed at") == KILLS
    assert "resumed, killed" in done.stdout
    assert done.stdout.endswith("the same end\n")
