"""Compare OpenCLIP's mini-batch loss (BSGD), FastCLIP's (SOX) and SCENT on image-text pairs: emoji of two vendors.

The same small model from scratch, its architecture and everything not named here from configs/clip_emoji.yaml, at two
batch sizes and for equally many epochs; each method has its SETTINGS. Reported: recall at 1, 5 and 10 of both
directions on the validation split, mean and deviation over the seeds, as a table and a figure.

What is done is kept in the folder --out, a CSV file of the runs, and not done again.

    python examples/compare_clip.py --path data/emoji/emoji.tsv --workers 2

A table that was printed is drawn again with --draw FILE.md.

On a GPU several runs at a time (--workers 8) are faster: each is too small for it.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any, cast

import torch
import yaml
from resumable import bare_trainer, dual_update, read_rows, run_missing, settings, silent_process, spread

from scent_lightning.data import ImageTextDataModule
from scent_lightning.duals import DualVariable
from scent_lightning.errors import DualDivergenceError
from scent_lightning.figures import colour_of, new_figure, note, save, style
from scent_lightning.tasks import CLIPTask

CONFIG = Path(__file__).parent.parent / "configs" / "clip_emoji.yaml"
DIRECTIONS, KS = ("image_to_text", "text_to_image"), (1, 5, 10)
RECALLS = [f"{direction}_R@{k}" for direction in DIRECTIONS for k in KS]
HATCHES = ("", "", "", "///")  # SCENT auto has SCENT's colour
Summary = dict[tuple[int, str, str], tuple[float, float]]  # by batch size, method and recall: mean, deviation
NAMES = {"BSGD": "BSGD (OpenCLIP)", "SOX": "SOX (FastCLIP)", "SCENT": "SCENT", "SCENT auto": "SCENT auto"}

# Learning rate and arguments of the dual update for each batch size, the best mean recall of what was tried with a seed
# that is not reported: learning rates 5e-4, 1e-3, 2e-3 and 4e-3, γ 0.2, 0.4 and 0.8, log α 5, 8 and 11. Auto has
# SCENT's learning rate.
COSINE = {"schedule": "cosine"}
SETTINGS: dict[int, dict[str, tuple[float, dict[str, Any]]]] = {
    64: {
        "BSGD": (5e-4, {}),
        "SOX": (5e-4, {"gamma": 0.4, **COSINE}),
        "SCENT": (5e-4, {"log_alpha": 8.0}),
        "SCENT auto": (5e-4, {"log_alpha": "auto"}),
    },
    256: {
        "BSGD": (1e-3, {}),
        "SOX": (1e-3, {"gamma": 0.4, **COSINE}),
        "SCENT": (1e-3, {"log_alpha": 11.0}),
        "SCENT auto": (1e-3, {"log_alpha": "auto"}),
    },
}


def settings_at(batch_size: int, method: str) -> tuple[float, dict[str, Any]]:
    """What SETTINGS has for the method at the batch size nearest to this one."""
    nearest = min(SETTINGS, key=lambda size: abs(size - batch_size))
    return SETTINGS[nearest][method]


def run(path: str, batch_size: int, method: str, seed: int, epochs: int) -> list[dict[str, Any]]:
    """Train once; the recalls of the validation split at the end, τ, and the mean ν of the images."""
    silent_process(seed)
    config = yaml.safe_load(CONFIG.read_text())
    lr, arguments = settings_at(batch_size, method)
    data = ImageTextDataModule(**{**config["data"]["init_args"], "path": path, "batch_size": batch_size})
    data.setup("fit")
    dual = dual_update(method, arguments)
    given = config["model"]["init_args"]
    warmup = given["warmup_steps"] * config["data"]["init_args"]["batch_size"] // batch_size
    task = CLIPTask(data.num_anchors, dual, **{**given, "lr": lr, "warmup_steps": warmup})
    trainer = bare_trainer(max_epochs=epochs, limit_val_batches=0)
    row = {"batch_size": batch_size, "method": method, "seed": seed, "epochs": epochs, "lr": lr}
    row["arguments"] = json.dumps(arguments)
    try:
        trainer.fit(task, datamodule=data)
    except DualDivergenceError:
        return [{**row, **dict.fromkeys(("tau", "nu", *RECALLS), float("nan"))}]
    trainer = bare_trainer(limit_val_batches=1.0)
    found = trainer.validate(task, datamodule=data, verbose=False)[0]
    nu = cast(DualVariable, task.duals["image"]).nu.mean().item()
    return [{**row, "tau": task.tau.item(), "nu": nu, **{name: found[f"val/{name}"] for name in RECALLS}}]


def summarised(rows: list[dict[str, Any]]) -> Summary:
    """Mean and deviation over the seeds in percent."""
    return {
        (size, method, name): spread([100 * row[name] for row in mine])
        for size in sorted({row["batch_size"] for row in rows})
        for method in NAMES
        if (mine := [row for row in rows if (row["batch_size"], row["method"]) == (size, method)])
        for name in RECALLS
    }


def table(rows: list[dict[str, Any]]) -> str:
    """Mean and deviation over the seeds in percent, as a Markdown table."""
    head = ["batch", "method", *(name.replace("_", " ") for name in RECALLS), "settings"]
    lines = [f"| {' | '.join(head)} |", "|" + " --- |" * len(head)]
    found = summarised(rows)
    for size, method in dict.fromkeys((size, method) for size, method, _ in found):
        first = next(row for row in rows if (row["batch_size"], row["method"]) == (size, method))
        cells = ["{:.1f} ± {:.1f}".format(*found[size, method, name]) for name in RECALLS]
        cells.append(settings(first["lr"], json.loads(first["arguments"])))
        lines.append(f"| {size} | {NAMES[method]} | {' | '.join(cells)} |")
    return "\n".join(lines)


def read_table(path: Path) -> Summary:
    """Mean and deviation of a table as :func:`table` writes it, the first of a Markdown file with its last column."""
    methods = {name: method for method, name in NAMES.items()}
    found: Summary = {}
    for line in path.read_text(encoding="utf-8").splitlines():
        cells = [cell.strip(" *") for cell in line.strip("|").split("|")]
        if len(cells) == len(RECALLS) + 3 and cells[1] in methods and cells[0].isdigit():
            for name, cell in zip(RECALLS, cells[2:], strict=False):
                mean, deviation = map(float, cell.replace("*", "").split("±"))
                found.setdefault((int(cells[0]), methods[cells[1]], name), (mean, deviation))
    return found


@style()
def plot(found: Summary, path: Path) -> None:
    """Recall of each method as bars: a row of panels for each direction, a column for each batch size."""
    sizes = sorted({size for size, _, _ in found})
    figure, panels = new_figure(len(DIRECTIONS), len(sizes), size=(4.4, 2.5), sharex=True, sharey=True)
    methods = [method for method in NAMES if any(method == other for _, other, _ in found)]
    for row, direction in enumerate(DIRECTIONS):
        for panel, size in zip(panels[row], sizes, strict=True):
            for number, method in enumerate(methods):
                bars = [found.get((size, method, f"{direction}_R@{k}"), (0.0, 0.0)) for k in KS]
                width = 0.8 / len(methods)
                places = [place + width * (number - (len(methods) - 1) / 2) for place in range(len(KS))]
                means, deviations = zip(*bars, strict=True)
                panel.bar(
                    places,
                    means,
                    0.9 * width,
                    yerr=deviations,
                    color=colour_of(method, methods),
                    hatch=HATCHES[number % len(HATCHES)],
                    edgecolor="white",
                    linewidth=0,
                    error_kw={"capsize": 2, "elinewidth": 1, "ecolor": "#333333"},
                    label=NAMES[method],
                )
            panel.set_title(f"{direction.replace('_', ' ')}, batches of {size}")
            panel.set_xticks(range(len(KS)), [f"recall at {k}" for k in KS])
            panel.grid(visible=False, axis="x")
        panels[row, 0].set_ylabel("found (%)")
    figure.legend(*panels[0, 0].get_legend_handles_labels(), loc="outside upper center", ncols=len(methods))
    note(figure, "emoji that training has not seen; bars: mean over the seeds, lines: a standard deviation either way")
    save(figure, path)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--path", help="the table emoji.tsv, with its images beside it")
    parser.add_argument("--draw", type=Path, help="run nothing: draw the table in this Markdown file")
    parser.add_argument("--seeds", nargs="+", type=int, default=[0, 1, 2], help="seeds of model and batches (0 1 2)")
    sizes = "pairs a step (64 256); the settings are those of the nearest of the two"
    parser.add_argument("--batch-sizes", nargs="+", type=int, default=list(SETTINGS), help=sizes)
    parser.add_argument("--epochs", type=int, default=30, help="epochs of every run (30)")
    parser.add_argument("--workers", type=int, default=1, help="runs at a time, one thread each (1)")
    parser.add_argument("--out", type=Path, default=Path("runs/compare_clip"), help="folder of what is kept")
    arguments = parser.parse_args()
    if arguments.draw is not None:
        plot(read_table(arguments.draw), arguments.out / "recall.png")
        print(f"figure: {arguments.out / 'recall.png'}")
        return
    if arguments.path is None:
        parser.error("--path is needed: the table emoji.tsv")
    done = {
        (row["batch_size"], row["method"], row["seed"], row["epochs"]) for row in read_rows(arguments.out / "runs.csv")
    }
    todo = [
        (arguments.path, batch_size, method, seed, arguments.epochs)
        for batch_size in arguments.batch_sizes
        for seed in arguments.seeds
        for method in NAMES
        if (batch_size, method, seed, arguments.epochs) not in done
    ]
    run_missing(run, todo, arguments.out / "runs.csv", arguments.workers)
    rows = [
        row
        for row in read_rows(arguments.out / "runs.csv")
        if row["seed"] in arguments.seeds
        and row["epochs"] == arguments.epochs
        and row["batch_size"] in arguments.batch_sizes
    ]
    print(table(rows))
    plot(summarised(rows), arguments.out / "recall.png")
    print(f"figure: {arguments.out / 'recall.png'}")


if __name__ == "__main__":
    if torch.cuda.is_available():  # a GPU cannot be used in a forked process; elsewhere a fork spares the imports
        torch.multiprocessing.set_start_method("spawn")
    main()
