"""Every script runs as its documentation says."""

import csv
import importlib
import json
import math
import sys

import numpy as np
import pytest
import torch
from PIL import Image

from scent_lightning.duals import BSGD, SCENT, SOX
from scent_lightning.errors import InputError
from tests.conftest import ROOT
from tests.data.test_image_text import write_table
from tests.forked import finished, start_script

EXAMPLES = ROOT / "examples"


def script(folder, name, *arguments, **environment) -> str:
    return finished(start_script(folder, EXAMPLES / name, *arguments, **environment), timeout=600).stdout


@pytest.mark.slow
def test_custom_task_and_its_figure(tmp_path):
    assert len((EXAMPLES / "custom_task.py").read_text().splitlines()) <= 60
    script(tmp_path, "custom_task.py")
    log = tmp_path / "lightning_logs" / "version_0"
    script(tmp_path, "plot_dual_statistics.py", log, "--out", tmp_path / "a.png")
    assert (tmp_path / "a.png").stat().st_size > 20_000
    assert (log / "checkpoints").is_dir()


def example(name, monkeypatch):
    monkeypatch.syspath_prepend(str(EXAMPLES))
    return importlib.import_module(name)


BATCH = {"mean", "weight", "guarded", "effective_samples"}


@pytest.mark.parametrize(
    ("tags", "panels", "labels"),
    [
        (BATCH | {"log_alpha", "effective_gamma"}, 4, {"ν", "−log α", "mean of the batch"}),  # one anchor
        (BATCH | {"weight_max", "gamma", "table_q01", "table_q50", "table_q99"}, 4, {"1 % to 99 %", "γ"}),
        ({"mean", "weight"}, 2, {"ν", "mean of the batch"}),
    ],
)
def test_figure_of_the_dual_statistics_draws_what_there_is(tags, panels, labels, tmp_path, monkeypatch):
    module = example("plot_dual_statistics", monkeypatch)
    drawn = {}
    monkeypatch.setattr(module, "save", lambda figure, path: drawn.update(figure=figure))
    module.draw({f"dual/nu/{tag}": ([1, 2], [0.5, 0.25]) for tag in tags}, ["nu"], tmp_path / "a.png")
    axes = [each for each in drawn["figure"].axes if each.get_visible()]
    assert len(axes) == panels
    assert labels <= {text.get_text() for each in axes for text in each.get_legend().get_texts()}
    assert all(each.get_ylabel() and each.get_xlabel() for each in axes)


def test_emoji_figure_from_a_table(tmp_path, monkeypatch):
    """The figure that is shown is drawn from the table beside it."""
    module = example("compare_clip", monkeypatch)
    found = module.read_table(EXAMPLES / "README.md")
    assert {(size, method) for size, method, _ in found} == {(s, m) for s in (64, 256) for m in module.NAMES}
    rows = [
        {"batch_size": 8, "method": "SOX", "seed": seed, "lr": 0.1, "arguments": "{}"}
        | {name: 0.1 * (seed + number) for number, name in enumerate(module.RECALLS)}
        for seed in range(2)
    ]
    (tmp_path / "a.md").write_text("Some text.\n\n" + module.table(rows) + "\n")
    read = module.read_table(tmp_path / "a.md")
    assert read.keys() == module.summarised(rows).keys()
    for key, pair in module.summarised(rows).items():
        assert read[key] == pytest.approx(pair, abs=0.05)
    module.plot(read, tmp_path / "a.png")
    assert (tmp_path / "a.png").stat().st_size > 10_000


@pytest.mark.slow
def test_comparison_on_pairs(tmp_path, monkeypatch):
    """Every method once, at a batch size that no settings were chosen for; a third of the pairs validates."""
    columns = {"category": ["noise"] * 96, "split": ["val", "train", "train"] * 32}
    table = write_table(tmp_path, rows=96, columns=columns)
    few = ["--batch-sizes", 32, "--epochs", 1, "--seeds", 0, "--out", tmp_path / "out"]
    output = script(tmp_path, "compare_clip.py", "--path", table, *few)
    rows = example("resumable", monkeypatch).read_rows(tmp_path / "out" / "runs.csv")
    assert [row["method"] for row in rows] == ["BSGD", "SOX", "SCENT", "SCENT auto"]
    for row in rows:
        for direction in ("image_to_text", "text_to_image"):
            found = [row[f"{direction}_R@{k}"] for k in (1, 5, 10)]
            assert 0 <= found[0] <= found[1] <= found[2] < 0.9  # of 32 pairs of noise
    assert output.count("| 32 | ") == 4
    assert (tmp_path / "out" / "recall.png").stat().st_size > 10_000


@pytest.mark.slow
def test_corrected_negatives_of_ones_own(tmp_path):
    lines = script(tmp_path, "softmax_by_hand.py").splitlines()
    plain, corrected = (float(line.split()[-1]) for line in lines if "cross-entropy" in line)
    assert corrected < 0.9 * plain


@pytest.mark.slow
def test_known_optimum_of_the_softmax(tmp_path):
    """Few rows and classes; a second call takes what the first has left."""
    few = ["--rows", 600, "--classes", 20, "--epochs", 20, "--lr", 100, "--out", tmp_path / "runs"]
    lasts = [script(tmp_path, "softmax_known_optimum.py", *few).strip().splitlines()[-1] for _ in range(2)]
    assert lasts[0] == lasts[1]
    found = json.loads(lasts[0])
    assert set(found["above"]) == {"BSGD", "SCENT", "BSGD corrected", "SCENT corrected"}
    assert 0 <= found["above"]["SCENT corrected"] < 0.1


@pytest.mark.slow
def test_trainer_overhead_prints_its_figures(tmp_path):
    """Runs without arguments on any machine; here with few epochs, and on random rows of the same size."""
    output = script(
        tmp_path, "benchmarks/trainer_overhead.py", "--epochs", 1, "--turns", 1, SCENT_LIGHTNING_DATA="none"
    )
    figures = json.loads(output.strip().splitlines()[-1])
    assert set(figures) == {"trainer_over_loop", "ms_per_step"}
    assert all(value > 0 for value in figures.values())


@pytest.mark.slow
def test_benchmark_of_the_table_prints_its_figures(tmp_path):
    few = ["--anchors", 10_000, 4_000_000, "--turns", 1, "--steps", 20]
    figures = json.loads(script(tmp_path, "benchmarks/dual_table.py", *few).strip().splitlines()[-1])
    assert set(figures) == {"step_ratio", "bytes_per_anchor", "save_extra_gb", "load_extra_gb"}
    assert figures["bytes_per_anchor"] == pytest.approx(5, abs=1)
    # A second copy would be 0.02.
    assert max(figures["save_extra_gb"], figures["load_extra_gb"]) < 0.01


@pytest.mark.slow
def test_extreme_classification_benchmarks_print_their_figures(tmp_path):
    few = ["--steps", 20, "--dense-steps", 4, "--classes", 1000, 3000]
    figures = json.loads(script(tmp_path, "benchmarks/xc_step.py", *few).strip().splitlines()[-1])
    assert set(figures) == {"dense_over_sparse", "flatness", "peak_extra_gb"}
    assert set(figures["dense_over_sparse"]) == {"1000", "3000"}
    output = script(tmp_path, "benchmarks/xc_memory_map.py", "--rows", 20_000, "--steps", 40)
    figures = json.loads(output.strip().splitlines()[-1])
    assert set(figures) == {"first_batch_s", "peak_extra_gb"}


def write_classes(folder):
    """A folder of 40 classes, as compare_xc.py reads it."""
    generator = np.random.default_rng(0)
    centres = generator.standard_normal((40, 8))
    for split in ("train", "val"):
        (folder / split).mkdir()
        labels = generator.integers(40, size=1000)
        rows = centres[labels] + 0.3 * generator.standard_normal((1000, 8))
        rows /= np.linalg.norm(rows, axis=1, keepdims=True)
        np.save(folder / split / "features.npy", rows.astype(np.float16))
        np.save(folder / split / "labels.npy", labels)


@pytest.mark.slow
def test_comparison_on_classes(tmp_path):
    write_classes(tmp_path)
    arguments = ["--path", tmp_path, "--epochs", 2, "--out", tmp_path / "out", "--methods"]
    script(tmp_path, "compare_xc.py", *arguments, "BSGD", "SCENT auto")
    output = script(tmp_path, "compare_xc.py", *arguments, "BSGD", "SCENT auto", "SOX momentum")
    assert len((tmp_path / "out" / "runs.csv").read_text().splitlines()) == 1 + 3 * 2
    assert "| SCENT auto |" in output
    assert (tmp_path / "out" / "cross_entropy.png").stat().st_size > 10_000


def test_rates_without_momentum_go_as_far(monkeypatch):
    """A constant gradient moves the weights by lr/(1 − momentum) a step, in the end."""
    partial_auc = example("pauc_known_optimum", monkeypatch)
    weight = torch.zeros(2)
    for row, momentum in zip(weight, (0.0, 0.9), strict=True):
        row.requires_grad_()
        optimizer = torch.optim.SGD([row], lr=partial_auc.as_far(0.01, 6000, momentum), momentum=momentum)
        for _ in range(300):
            row.grad = torch.tensor(-1.0)
            optimizer.step()
    assert weight.detach()[0].item() == pytest.approx(weight.detach()[1].item(), rel=0.05)
    assert partial_auc.as_far(0.01, 12_000, 0.9) == pytest.approx(0.01)


def test_momentum_of_classes_moves_rows_that_are_in_no_batch(monkeypatch):
    """As SGD of a dense gradient, by its formula."""
    weight = torch.nn.Parameter(torch.zeros(3, 2))
    optimizer = example("compare_xc", monkeypatch).DenseSGD([weight], lr=1.0, momentum=0.5)

    def closure(row):
        optimizer.zero_grad()
        loss = torch.nn.functional.embedding(torch.tensor([row, row]), weight, sparse=True).sum()
        loss.backward()
        return loss.item()

    assert optimizer.step(lambda: closure(0)) == 0.0
    assert optimizer.step(lambda: closure(2)) == 0.0
    assert weight[:, 0].tolist() == [-2.0 - 1.0, 0.0, -2.0]


def write_faces(folder, classes=120, faces=3):
    """As the glyphs: the rows of a class are its typefaces, face by face; each is a turned copy of the class."""
    generator = np.random.default_rng(0)
    rows = generator.standard_normal((classes, 8)).astype(np.float32)
    turned = [rows @ np.linalg.qr(generator.standard_normal((8, 8)))[0].astype(np.float32) for _ in range(faces)]
    (folder / "train").mkdir()
    np.save(folder / "train" / "features.npy", np.concatenate(turned))
    np.save(folder / "train" / "labels.npy", np.tile(np.arange(classes), faces))
    return turned


@pytest.mark.slow
def test_comparison_on_typefaces(tmp_path):
    write_faces(tmp_path)
    methods = ["OpenCLIP", "SoftplusASGD", "SCENT auto"]
    arguments = ["--path", tmp_path, "--faces", 0, 2, "--seeds", 0, "--batch-sizes", 16, 64, "--epochs", 10]
    arguments += ["--tau", 0.5, "--lr", 0.05, "--out", tmp_path / "out", "--methods"]
    script(tmp_path, "compare_clip_glyphs.py", *arguments, *methods[:1])
    output = script(tmp_path, "compare_clip_glyphs.py", *arguments, *methods)
    assert len((tmp_path / "out" / "runs.csv").read_text().splitlines()) == 1 + 2 * len(methods)
    assert output.count("| SCENT auto |") == 2
    assert (tmp_path / "out" / "cross_entropy.png").stat().st_size > 10_000
    figures = json.loads(output.strip().splitlines()[-1])
    assert list(figures) == ["16", "64"]
    for by_method in figures.values():
        assert list(by_method) == methods
        for found in by_method.values():
            assert 0 < found["cross_entropy"] < math.log(102)  # less than by chance
            assert 0 <= found["R@1"] <= found["R@10"] <= 1


@pytest.mark.parametrize("faces", [(0, 1), (1, 0), (2, 2)])
def test_typefaces_are_paired_by_character_and_compared_exactly(tmp_path, monkeypatch, faces):
    turned = [torch.from_numpy(face) for face in write_faces(tmp_path)]
    monkeypatch.syspath_prepend(str(EXAMPLES))
    example = importlib.import_module("compare_clip_glyphs")
    train, held_out = example.read_pairs(str(tmp_path), faces)
    assert [len(rows) for rows in (*train, *held_out)] == [102, 102, 18, 18]
    place = torch.cdist(torch.cat([train[0], held_out[0]]), turned[faces[0]]).argmin(dim=1)
    assert sorted(place.tolist()) == list(range(120))
    torch.testing.assert_close(torch.cat([train[1], held_out[1]]), turned[faces[1]][place])
    task = example.TwoTowers(8, 102, BSGD(), tau=0.2, epsilon=0.1, lr=0.1)
    found = example.exact_figures(task, train, held_out)
    with torch.no_grad():
        images, texts = task(*train)
        scores, right = images @ texts.T / 0.2, torch.arange(102)
        both = [torch.nn.functional.cross_entropy(each, right).item() for each in (scores, scores.T)]
    assert found["cross_entropy"] == pytest.approx(sum(both) / 2, rel=1e-5)
    assert found["R@1"] <= found["R@10"]


@pytest.mark.parametrize("faces", [(0, 3), (-1, 0), (7, 9)])
def test_a_typeface_that_is_not_there(tmp_path, monkeypatch, faces):
    write_faces(tmp_path)
    monkeypatch.syspath_prepend(str(EXAMPLES))
    example = importlib.import_module("compare_clip_glyphs")
    with pytest.raises(InputError, match=r"faces must be from 0 to 2, the rows that every class has, got "):
        example.read_pairs(str(tmp_path), faces)


@pytest.mark.slow
def test_partial_auc_against_its_known_optimum(tmp_path):
    arguments = ["--epochs", 3, "--workers", 2, "--out", tmp_path / "out"]
    output = script(tmp_path, "pauc_known_optimum.py", *arguments, SCENT_LIGHTNING_DATA="none")
    gaps = json.loads(output.strip().splitlines()[-1])
    methods = {"BSGD", "ASGD", "SoftplusASGD", "UMax", "SOX", "SCENT", "SCENT auto", "SCENT default"}
    assert set(gaps) == {"0.05", "0.1"}
    for by_method in gaps.values():
        assert set(by_method) == methods
        assert all(gap >= 0 for gap in by_method.values())  # F* is the least
        assert max(by_method["SCENT"], by_method["SCENT auto"]) < 1
    assert "32 positives and 4 negatives a batch" in output
    # A line for each of three epochs.
    assert len((tmp_path / "out" / "runs.csv").read_text().splitlines()) == 1 + 4 * 8 * 3
    assert (tmp_path / "out" / "curves_momentum_0.9.png").stat().st_size > 10_000
    script(tmp_path, "pauc_known_optimum.py", *arguments, SCENT_LIGHTNING_DATA="none")
    assert len((tmp_path / "out" / "runs.csv").read_text().splitlines()) == 1 + 4 * 8 * 3


@pytest.mark.slow
def test_comparison_on_partial_auc(tmp_path):
    generator = np.random.default_rng(0)
    for split, images in (("train", 150), ("test", 30)):
        for number, name in enumerate(("cat", "dog")):
            (tmp_path / split / name).mkdir(parents=True)
            for image in range(images):
                pixels = generator.integers(0, 128, (8, 8, 3)) + 40 * number
                # 150 of each class, of which 30 positive ones stay: one batch needs 32.
                for copy in range(2):
                    Image.fromarray(pixels.astype(np.uint8)).save(tmp_path / split / name / f"{image}_{copy}.png")
    few = ["--path", tmp_path, "--seeds", 0, "--width", 2, "--pretrain-epochs", 1, "--epochs", 1, "--workers", 2]
    few += ["--positive-classes", "dog"]
    output = script(tmp_path, "compare_pauc.py", *few, "--out", tmp_path / "out")
    assert output.count("| cross-entropy |") == output.count("| SCENT |") == output.count("| nothing set |") == 2
    (runs,) = (tmp_path / "out").glob("*/runs.csv")
    lines = runs.read_text().splitlines()
    assert len(lines) == 1 + 2 * 8
    script(tmp_path, "compare_pauc.py", *few, "--out", tmp_path / "out")
    assert runs.read_text().splitlines() == lines
    script(tmp_path, "compare_pauc.py", *few, "--momentum", 0.9, "--out", tmp_path / "out")
    assert runs.read_text().splitlines() == lines
    plain, with_momentum = (
        {(row["tau"], row["method"]): row["lr"] for row in csv.DictReader(path.read_text().splitlines())}
        for path in (runs, runs.with_name("runs_momentum_0.9.csv"))
    )
    for tau in ("0.05", "0.1"):
        key = tau, "SCENT default"
        assert plain.pop(key) == with_momentum.pop(key) == "auto"
    assert {key: float(lr) for key, lr in with_momentum.items()} == pytest.approx(
        {key: float(lr) / 10 for key, lr in plain.items()}
    )


@pytest.mark.slow
def test_partial_auc_step_prints_its_figures(tmp_path):
    output = script(tmp_path, "benchmarks/pauc_step.py", "--steps", 5, "--turns", 1)
    (figures,) = json.loads(output.strip().splitlines()[-1]).values()
    assert set(figures) == {"network", "frozen", "linear"}
    assert all(value > 0 for value in figures.values())


@pytest.mark.slow
def test_softmax_over_all_classes_prints_its_figures(tmp_path):
    output = script(tmp_path, "benchmarks/full_softmax.py", "--turns", 1, "--size", 8, 9000, 4)
    ratios = json.loads(output.strip().splitlines()[-1])["time_ratio"]
    assert set(ratios) == {"8 x 9000 x 4, near", "8 x 9000 x 4, far"}
    assert all(ratio > 0 for ratio in ratios.values())


@pytest.mark.slow
def test_contrastive_loss_prints_its_figures(tmp_path):
    few = ["--pairs", 128, "--turns", 1, "--chunked-pairs", 512]
    figures = json.loads(script(tmp_path, "benchmarks/clip_loss.py", *few).strip().splitlines()[-1])
    assert {"time_ratio", "memory_ratio", "chunked_extra_mb"} == set(figures)
    assert figures["time_ratio"]["128"] > 0


@pytest.mark.slow
def test_trials_of_step_sizes_and_their_figure(tmp_path, data_dir):
    write_classes(tmp_path)
    common = ["--data-dir", data_dir, "--glyphs", tmp_path, "--epochs", 3, "--seeds", 0, 1, "--problems"]
    output = script(tmp_path, "benchmarks/step_size_trials.py", *common, "abalone_tau1.0", "glyphs")
    found = json.loads(output.strip().splitlines()[-1])
    for problem in ("abalone_tau1.0", "glyphs"):
        assert 0 < found[problem]["auto"] < found[problem]["BSGD"] * 1.5
        assert "by hand" in found[problem]
    arguments = [*common, "glyphs", "--out", tmp_path / "out"]
    summary = json.loads(script(tmp_path, "step_size_sensitivity.py", *arguments).strip().splitlines()[-1])
    assert summary["glyphs"]["best"] <= summary["glyphs"]["worst with the guard"]
    assert len((tmp_path / "out" / "runs.csv").read_text().splitlines()) == 1 + 2 * (2 * 21 + 1)
    assert (tmp_path / "out" / "step_size_sensitivity.png").stat().st_size > 10_000
    again = script(tmp_path, "step_size_sensitivity.py", *arguments)
    assert json.loads(again.strip().splitlines()[-1]) == summary


@pytest.mark.slow
def test_auto_on_new_problems_goes_on_where_it_stopped(tmp_path):
    """One problem of each kind; a second seed is run beside the first, which is not run again."""
    problems = ["diabetes, τ 0.2", "breast cancer, 2 negatives", "digits"]
    arguments = ["--epochs", 3, "--workers", 2, "--out", tmp_path]

    def results(problems, *seeds):
        output = script(tmp_path, "auto_on_new_problems.py", "--problems", *problems, "--seeds", *seeds, *arguments)
        lines = (tmp_path / "runs.csv").read_text().splitlines()
        return json.loads(output.strip().splitlines()[-1]), sum(line.startswith(f'"{problems[0]}"') for line in lines)

    (first, count), (again, both) = results(problems, 0), results(problems[:2], 0, 1)
    assert both == 2 * count > 0
    assert (list(first), list(again)) == (problems, problems[:2])
    for values in (*first.values(), *again.values()):
        # After three epochs, of steps to be compared only where the bias is large.
        assert 0 < values["by hand, either step"] <= values["by hand"] <= values["BSGD"]
        assert 0 < values["auto"] < 3 * values["BSGD"]
        assert 0 < values["nothing set"] < 10 * values["BSGD"]
    assert first["digits"]["by hand"] < first["digits"]["auto"] < 0.8 * first["digits"]["BSGD"]


def test_learning_rates_go_on_where_they_stopped(tmp_path, data_dir):
    """A cell of regression and a new problem of each kind; a second seed is run beside the first."""
    problems = ["abalone_tau1.0", "diabetes, τ 0.2", "breast cancer, 2 negatives", "digits"]
    arguments = ["--problems", *problems, "--data-dir", data_dir, "--epochs", 2, "--out", tmp_path, "--seeds"]
    for seeds in ([0], [0, 1]):
        found = json.loads(script(tmp_path, "learning_rates.py", *arguments, *seeds).strip().splitlines()[-1])
        assert found["runs"] == len(seeds) * len(problems) * 13
        assert len((tmp_path / "runs.csv").read_text().splitlines()) == 1 + 2 * found["runs"]
        assert found["not finite"] == 0
        for name in problems:
            gradient, proximal = (found[name][step] for step in ("gradient", "proximal"))
            assert gradient["0.001"] == pytest.approx(proximal["0.001"], rel=1e-3)
            assert proximal["1000"] < 0.1 * gradient["1000"]
    assert (tmp_path / "learning_rates.png").stat().st_size > 10_000


@pytest.mark.parametrize("anchors", [1, 500, 2000])
def test_trials_step_as_the_package_does(anchors, monkeypatch):
    monkeypatch.syspath_prepend(str(EXAMPLES / "benchmarks"))
    from step_size_trials import Rule, StepSizes

    from scent_lightning.duals import SCENT, DualVariable

    rules = {"auto": Rule(), "hand": Rule(-1.5, cosine=True, guard=2.0), "plain": Rule(-3.0, guard=math.inf)}
    updates = [SCENT(), SCENT(-1.5, schedule="cosine", max_log_weight=2.0), SCENT(-3.0)]
    rows, epochs = (1, 40) if anchors == 1 else (100, 40)
    per_epoch = 5 if anchors == 500 else 20
    steps = epochs * per_epoch
    sizes = StepSizes(list(rules.values()), anchors, 1 / epochs, "cpu")
    tables = [DualVariable(anchors, update) for update in updates]
    if tables[0].auto is not None:
        tables[0].auto.epoch = 1 / epochs
    nu = torch.full((3, anchors), math.nan, dtype=torch.float64)
    generator = torch.Generator().manual_seed(0)
    for step in range(steps):
        if step % per_epoch == 0:
            order = torch.randperm(anchors, generator=generator)
        start = step % per_epoch * rows
        index = order[start : start + rows] if anchors > 1 else torch.tensor([0])
        scores = 2.0 * torch.randn(rows, 8, generator=generator, dtype=torch.float64) - 6.0 * step / steps
        log_mean = (torch.logsumexp(scores, dim=1) - math.log(8)).expand(3, rows)
        nu[:, index] = sizes.step(nu[:, index], log_mean, index.expand(3, rows), step / steps)
        for table in tables:
            table.entropic_risk(scores, index, progress=step / steps)
    for i, table in enumerate(tables):
        assert (table.nu - nu[i]).abs().max() < 1e-4
    assert tables[0].auto.reference == pytest.approx(sizes.found[0].reference, abs=1e-5)
    assert tables[0].auto.variance == pytest.approx(sizes.found[0].variance, rel=1e-5)


@pytest.mark.slow
def test_table_is_resumable_and_its_optimum_exact(tmp_path, data_dir):
    arguments = ["--cells", "abalone_tau5.0", "--methods", "BSGD", "SCENT", "--epochs", 2, "--out", tmp_path]
    arguments += ["--data-dir", data_dir, "--seeds"]
    first = script(tmp_path, "reproduce_dro_table.py", *arguments, 0)
    again = script(tmp_path, "reproduce_dro_table.py", *arguments, 0, 1)
    lines = (tmp_path / "runs.csv").read_text().splitlines()
    assert len(lines) == 5  # the two runs of the first call were not run again
    assert "0.95529" in first  # the optimum, solved by Newton's method
    assert "| abalone τ 5.0 | 0.95529 |" in again
    assert (tmp_path / "gaps.png").stat().st_size > 10_000


@pytest.mark.slow
def test_two_scripts_agree_on_what_nothing_set_ends_with(tmp_path, data_dir, monkeypatch):
    """Both train the same run, in folders of their own; the gaps are those of the objectives that they keep."""
    (tmp_path / "classes").mkdir()
    write_classes(tmp_path / "classes")
    few = ["--data-dir", data_dir, "--epochs", 2, "--seeds", 0, 1, "--out", tmp_path]
    cell = "abalone_tau5.0"
    output = script(tmp_path, "auto_step_size.py", "--cells", cell, *few)
    gaps = json.loads(output.strip().splitlines()[-1])[cell]
    few += ["--glyphs", tmp_path / "classes"]
    output = script(tmp_path, "nothing_set.py", "--problems", cell, "glyphs", *few)
    found = json.loads(output.strip().splitlines()[-1])
    assert set(gaps) == {"SCENT tuned", "SCENT auto", "SCENT default"}
    assert set(found) == {cell, "glyphs"}
    read_rows = example("resumable", monkeypatch).read_rows
    kept = {name: read_rows(tmp_path / f"{name}.csv") for name in ("runs", "cells", "glyphs")}
    assert [len(rows) for rows in kept.values()] == [6, 2, 2]

    def objectives(name):
        return {row["seed"]: row["objective"] for row in kept[name] if row["method"] == "SCENT default"}

    assert objectives("runs") == objectives("cells")
    # The optimum with six digits, as README has it.
    mean = sum(100 * (value / 0.955292 - 1) for value in objectives("cells").values()) / 2
    assert found[cell] == pytest.approx(mean, abs=2e-4)
    assert gaps["SCENT default"] == pytest.approx(mean, abs=2e-4)
    entropies = [row["train_cross_entropy"] for row in kept["glyphs"]]
    assert found["glyphs"] == pytest.approx(sum(entropies) / 2, abs=1e-5)
    assert max(entropies) < math.log(40)  # that of classes that are alike, where training begins


def test_optimum_has_no_gradient(data_dir):
    """The Newton solver's value is the least: no point around its own least-squares start or the origin is below."""
    sys.path.insert(0, str(EXAMPLES))
    try:
        import reproduce_dro_table
    finally:
        sys.path.remove(str(EXAMPLES))
    from scipy.optimize import minimize

    data = reproduce_dro_table.data_module("abalone_tau1.0", str(data_dir))
    batch = [part.double().numpy() for part in next(iter(data.predict_dataloader()))[:2]]
    rows = np.hstack([batch[0], np.ones((len(batch[1]), 1))])

    def risk(weights):
        residual = rows @ weights - batch[1]
        scores = residual**2
        weight = np.exp(scores - scores.max())
        return scores.max() + np.log(weight.mean()), rows.T @ (weight / weight.sum() * 2 * residual)

    start = np.linalg.lstsq(rows, batch[1], rcond=None)[0]
    found = minimize(risk, start, jac=True, method="BFGS", options={"gtol": 1e-9, "maxiter": 5000})
    assert reproduce_dro_table.optimum("abalone_tau1.0", str(data_dir)) == pytest.approx(found.fun, abs=1e-6)


@pytest.mark.slow
def test_gaussian_study_of_the_dual_variable(tmp_path):
    """In small: 1/S falls as 1/T, no bound is broken, and SCENT's error over SGD's falls with σ."""
    few = ["--steps", 2000, "--ratio-steps", 2000, "--seeds", 4, "--longest", 1500, "--runs", 200]
    output = script(tmp_path, "spmd_versus_sgd.py", *few, "--out", tmp_path / "a.png")
    found = json.loads(output.strip().splitlines()[-1])
    assert found["bounds_hold"]
    assert found["ratio"]["0.1"] > found["ratio"]["0.3"] > found["ratio"]["1.0"]
    assert found["slope"]["1/S"] == pytest.approx(-1, abs=0.15)
    assert found["slope"]["SCENT"] == pytest.approx(-0.5, abs=0.1)
    assert (tmp_path / "a.png").stat().st_size > 50_000


@pytest.mark.slow
def test_independent_sample_prints_its_figures(tmp_path):
    few = ["--epochs", 1, "--seeds", 2, "--samples", 8, "--turns", 3]
    found = json.loads(script(tmp_path, "independent_sample.py", *few).strip().splitlines()[-1])
    assert set(found["gap"]) == {"BSGD", "SOX", "SCENT"}
    assert all(0 < value < 100 for by_m in found["gap"].values() for value in by_m["8"].values())
    assert len(found["step"]) == 5


def test_the_study_of_the_independent_sample_steps_as_the_updates_do(monkeypatch):
    monkeypatch.syspath_prepend(str(EXAMPLES))
    from independent_sample import moved, objective, optimum, problem

    nu, log_mean = torch.randn(2, 5, dtype=torch.float64), torch.randn(2, 5, dtype=torch.float64)
    for name, sizes, updates in (
        ("SOX", torch.tensor([0.2, 0.7]), [SOX(0.2), SOX(0.7)]),
        ("SCENT", torch.tensor([-1.0, 2.0]), [SCENT(-1.0), SCENT(2.0)]),
        ("BSGD", torch.zeros(2), [BSGD(), BSGD()]),
    ):
        expected = [update.step_from_log_mean(nu[i], log_mean[i]) for i, update in enumerate(updates)]
        torch.testing.assert_close(moved(name, nu, log_mean, sizes), torch.stack(expected), rtol=1e-6, atol=1e-6)
    features, labels = problem()
    least = optimum(features, labels)
    assert least == pytest.approx(optimum(features, labels), abs=1e-9)
    assert objective(torch.zeros(50, 10), features, labels).item() == pytest.approx(0.0, abs=1e-5)
    assert least < objective(torch.randn(50, 10, dtype=torch.float64), features, labels).item()


@pytest.mark.slow
def test_implicit_steps_print_their_figures(tmp_path):
    output = script(tmp_path, "benchmarks/implicit_sgd.py", "--turns", 1, "--largest", 512)
    found = json.loads(output.strip().splitlines()[-1])
    counts = list(found["products"].values())
    assert counts == sorted(counts)
    # Each factor of 100 in ε costs about as many products more.
    assert counts[-1] < 5 * counts[0]
    assert all(ratio > 3 for ratio in found["implicit_over_scent"].values())


def test_moments_of_the_cut_gaussian(monkeypatch):
    monkeypatch.syspath_prepend(str(EXAMPLES))
    from spmd_versus_sgd import CUT, Law

    law = Law.of(-1.0, 0.5)
    scores = torch.randn(4_000_000, generator=torch.Generator().manual_seed(0), dtype=torch.float64).clamp(-CUT, CUT)
    z = (-1.0 + 0.5 * scores).exp()
    assert law.mean == pytest.approx(z.mean().item(), rel=2e-3)
    assert law.variance == pytest.approx(z.var().item(), rel=1e-2)
    assert law.excess == pytest.approx(math.exp(0.25) - 1, rel=1e-2)


@pytest.mark.slow
def test_comparison_on_recommendation(tmp_path, data_dir):
    arguments = ["--epochs", 1, "--rates", 0.03, "--methods", "SCENT", "--kinds", "corrected", "--out", tmp_path]
    output = script(tmp_path, "compare_retrieval.py", *arguments, SCENT_LIGHTNING_DATA=str(data_dir))
    found = json.loads(output.strip().splitlines()[-1])
    assert found["full"] is None
    assert found["corrected"]["SCENT"] > 0.3  # as much as the most popular items have
    assert "the most popular items: recall@20 0.320" in output
    assert (tmp_path / "debian_dependencies.png").is_file()


@pytest.mark.slow
def test_benchmark_of_retrieval_prints_its_figures(tmp_path):
    few = ["--items", 1000, 100_000, "--steps", 10]
    figures = json.loads(script(tmp_path, "benchmarks/retrieval_step.py", *few).strip().splitlines()[-1])
    assert set(figures) == {"step_ratio", "ms_per_step"}
    assert figures["step_ratio"] > 0  # a wall time, which other work on the machine changes
    assert len(figures["ms_per_step"]) == 2
    assert all(value > 0 for value in figures["ms_per_step"].values())
