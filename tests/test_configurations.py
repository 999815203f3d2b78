"""The package's own configurations: found by name, listed, and in the wheel."""

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import yaml

from scent_lightning.cli import main
from scent_lightning.configurations import configuration_folder, list_configurations, with_configurations
from scent_lightning.errors import InputError
from tests.conftest import ROOT
from tests.forked import finished, start_command


def test_every_file_is_listed_with_a_sentence():
    found = list_configurations()
    assert set(found) == {
        path.relative_to(ROOT / "configs").with_suffix("").as_posix() for path in (ROOT / "configs").rglob("*.yaml")
    }
    assert all(10 < len(sentence) < 200 and not sentence.endswith(".") for sentence in found.values())
    names = list(found)
    assert names.index("xc_synthetic") < names.index("published/clip_dfn14m/asgd")


def test_the_command_prints_the_list(capsys):
    main(["configs"])
    lines = capsys.readouterr().out.splitlines()
    assert len(lines) == len(list_configurations())
    assert any(line.startswith("dro_diabetes ") and "quick start" in line for line in lines)


def test_the_version_is_the_packages(capsys):
    from importlib.metadata import version

    with pytest.raises(SystemExit) as stopped:
        main(["--version"])
    assert stopped.value.code == 0
    assert capsys.readouterr().out == f"scent-lightning {version('scent-lightning')}\n"


@pytest.mark.parametrize("name", ["dro_diabetes", "dro_diabetes.yaml", "configs/dro_diabetes.yaml"])
@pytest.mark.parametrize("option", ["--config", "-c"])
def test_a_name_stands_for_its_file(name, option, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    path = str(configuration_folder() / "dro_diabetes.yaml")
    assert with_configurations(["fit", option, name, "--x", "1"]) == ["fit", option, path, "--x", "1"]
    assert with_configurations(["fit", f"{option}={name}"]) == ["fit", f"{option}={path}"]
    assert yaml.safe_load(Path(path).read_text())["model"]


def test_several_are_found_and_other_arguments_left_alone(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    arguments = [
        "fit",
        "--config",
        "dro_abalone_tau0.2",
        "--config",
        "published/dro_abalone_tau0.2/sox",
        "dro_diabetes",
    ]
    *_, first, option, second, last = with_configurations(arguments)
    assert (Path(first).stem, option, Path(second).stem, last) == (
        "dro_abalone_tau0.2",
        "--config",
        "sox",
        "dro_diabetes",
    )


def test_a_file_of_the_working_folder_goes_first(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "dro_diabetes").write_text("seed_everything: 1\n")
    assert with_configurations(["--config", "dro_diabetes"]) == ["--config", "dro_diabetes"]
    for given in ('{"seed_everything": 1}', "seed_everything: 1", str(tmp_path / "nowhere.yaml")):
        assert with_configurations(["--config", given]) == ["--config", given]


def test_an_unknown_name_is_told_with_those_that_are_like_it(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(InputError, match=r"dro_diabetis is neither a file nor .*did you mean dro_diabetes"):
        with_configurations(["--config", "dro_diabetis"])
    with pytest.raises(SystemExit) as stopped:
        main(["fit", "--config", "nothing_like_it_at_all"])
    assert stopped.value.code == 2
    error = capsys.readouterr().err
    assert error.startswith("scent-lightning: error: config nothing_like_it_at_all")
    assert error.count("\n") == 1


@pytest.mark.slow
def test_the_quick_start_runs_by_name_in_an_empty_folder(tmp_path):
    done = finished(start_command(tmp_path, "fit", "--config", "dro_diabetes", "--trainer.max_epochs", "2"))
    assert "Last checkpoint" in done.stdout + done.stderr
    assert (tmp_path / "lightning_logs" / "version_0" / "config.yaml").is_file()


@pytest.mark.slow
def test_the_wheel_runs_the_quick_start_without_a_clone(tmp_path):
    pytest.importorskip("setuptools", minversion="77")
    names = subprocess.run(["git", "ls-files", "-z"], cwd=ROOT, capture_output=True, text=True).stdout.split("\0")
    if not names[0]:
        pytest.skip("no checkout of git: which files the wheel is made of is not known")
    copy = tmp_path / "source"
    for name in names:
        if (ROOT / name).is_file():
            (copy / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy(ROOT / name, copy / name)
    (copy / "scent_lightning" / "configs").symlink_to("../configs")
    pip = [sys.executable, "-m", "pip", "--quiet", "--disable-pip-version-check"]
    subprocess.run([*pip, "wheel", "--no-deps", "--no-build-isolation", "-w", tmp_path, copy], check=True)
    (wheel,) = tmp_path.glob("*.whl")
    site = tmp_path / "site"
    subprocess.run([*pip, "install", "--no-deps", "--no-index", "--target", site, wheel], check=True)
    (tmp_path / "empty").mkdir()
    done = subprocess.run(
        [sys.executable, "-m", "scent_lightning", "fit", "--config", "dro_diabetes", "--trainer.max_epochs", "1"],
        cwd=tmp_path / "empty",
        env={**os.environ, "PYTHONPATH": str(site)},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr
    used = subprocess.run(
        [sys.executable, "-c", "import scent_lightning; print(scent_lightning.__file__)"],
        cwd=tmp_path / "empty",
        env={**os.environ, "PYTHONPATH": str(site)},
        capture_output=True,
        text=True,
    ).stdout
    assert str(site) in used
