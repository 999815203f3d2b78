"""A run that is killed over and over, and resumed from its last checkpoint, ends like one never killed, bit by bit."""

import pytest

from tests.conftest import ROOT
from tests.forked import finished, start_module
from tests.kill_and_resume import SETTINGS

KILLS = 10


@pytest.mark.slow
@pytest.mark.parametrize("name", SETTINGS)
def test_killed_anywhere(name, tmp_path):
    done = finished(start_module(ROOT, "tests.kill_and_resume", name, tmp_path, KILLS))
    assert done.stdout.count("killed at") == KILLS
    assert "resumed, killed" in done.stdout
    assert done.stdout.endswith("the same end\n")
