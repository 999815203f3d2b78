"""Compare dual updates on recommendation, with in-batch negatives as they come and corrected for how frequent they are.

Which package needs which, of Debian 12: 32,542 users, 29,012 items, 174,700 training interactions, where 1 % of the
items have 45 % of them. Embeddings of 64, batches of 512, 15 epochs of Adam, cosine learning rate. BSGD, SOX (γ 0.5)
and SCENT with its step size found, each plain (the published in-batch negatives) and corrected (scores less the
log-probability of the item to be in a batch); "full" is the softmax over all items, what all of them aim at. Each is
run at three learning rates; the best one is that with the highest recall of validation on the first seed, which alone
has all three. Figures are of the test split: recall and NDCG of the first 20 among all items, those of the user's
training interactions left out, and the exact softmax cross-entropy over all items, also of 8,000 training interactions.
--data wordnet is words by their definitions (recall of the first 10 of all 147,306 words), wordnet_hypernyms what nouns
and verbs are kinds of (of 20,472 synsets), with towers that read hashed n-grams.

Results go to a CSV file as the runs end; runs that are in it are not run again. At the end a table is printed and a
figure drawn; the last line is a JSON object with the recall by method.

    SCENT_LIGHTNING_DATA=data python examples/compare_retrieval.py --seeds 0 1 2
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from collections.abc import Iterable
from pathlib import Path
from typing import Any, NamedTuple

import torch
from resumable import bare_trainer, dual_update, read_rows, run_missing, silent_process, spread

from scent_lightning.data import InteractionsDataModule
from scent_lightning.errors import DualDivergenceError
from scent_lightning.figures import look_of, mean_and_range, new_figure, note, save, style
from scent_lightning.modules import HashedTextTower
from scent_lightning.tasks import RetrievalTask

METHODS: dict[str, dict[str, Any]] = {"BSGD": {}, "SOX": {"gamma": 0.5}, "SCENT": {}}
KINDS: dict[str, dict[str, Any]] = {
    "plain": {"correction": "none"},
    "corrected": {"correction": "frequency"},
    "full": {"negatives": "all"},
}
TRAINING_ROWS = 8000
FIGURES = ("recall", "ndcg", "train_cross_entropy", "test_cross_entropy")


class Problem(NamedTuple):
    """A data set: learning rates to try, epochs, and the k of recall and NDCG."""

    rates: tuple[float, ...]
    epochs: int
    k: int


PROBLEMS = {
    "debian_dependencies": Problem((0.003, 0.01, 0.03), 15, 20),
    "wordnet": Problem((0.01, 0.03, 0.05), 5, 10),
    "wordnet_hypernyms": Problem((0.01, 0.03, 0.05), 5, 10),
}


def task_of(data: InteractionsDataModule, kind: str, method: str, lr: float, k: int, options: str) -> RetrievalTask:
    """The task of a row; what is in ``options``, a JSON object, replaces the task's arguments."""
    towers: dict[str, Any] = {}
    if data.item_texts is not None:
        towers = {"query_tower": HashedTextTower(2**18), "item_tower": HashedTextTower(2**18)}
    arguments = {**towers, **KINDS[kind], **json.loads(options)}
    dual = dual_update("BSGD" if method == "full" else method, METHODS.get(method, {}))
    return RetrievalTask(data.num_queries, data.num_items, data.num_anchors, dual, lr=lr, ks=(k,), **arguments)


@torch.no_grad()
def training_cross_entropy(task: RetrievalTask, data: InteractionsDataModule) -> float:
    """The exact cross-entropy of the same random training interactions every time."""
    rows = torch.randperm(data.num_anchors, generator=torch.Generator().manual_seed(0))[:TRAINING_ROWS]
    queries, items, _ = data.existing("train").__getitems__(rows.tolist())
    numbers = data.interactions.queries[rows]
    return task.rank_items(numbers, task(queries), items.unsqueeze(1))[1].mean().item()


def run(
    dataset: str, kind: str, method: str, lr: float, seed: int, epochs: int, options: str = "{}"
) -> list[dict[str, Any]]:
    """Train once; one row."""
    silent_process(seed)
    data = InteractionsDataModule(dataset)
    k = PROBLEMS[dataset].k
    task = task_of(data, kind, method, lr, k, options)
    row = {"data": dataset, "kind": kind, "method": method, "lr": lr, "seed": seed, "epochs": epochs}
    row |= {"options": options, "val_recall": float("nan"), **dict.fromkeys(FIGURES, float("nan")), "seconds": 0.0}
    start = time.process_time()
    try:
        trainer = bare_trainer(accelerator="cpu", max_epochs=epochs, limit_val_batches=0)
        trainer.fit(task, datamodule=data)
    except DualDivergenceError:
        return [row]
    row["seconds"] = round(time.process_time() - start, 1)
    evaluate = bare_trainer(accelerator="cpu", limit_val_batches=16)
    row["val_recall"] = evaluate.validate(task, datamodule=data, verbose=False)[0][f"val/recall@{k}"]
    test = evaluate.test(task, datamodule=data, verbose=False)[0]
    row |= {"recall": test[f"test/recall@{k}"], "ndcg": test[f"test/ndcg@{k}"]}
    row |= {
        "test_cross_entropy": test["test/cross_entropy"],
        "train_cross_entropy": training_cross_entropy(task.eval(), data),
    }
    return [row]


def popularity(dataset: str) -> float:
    """Recall of recommending the items of the most training interactions that the query does not have."""
    data = InteractionsDataModule(dataset)
    pairs, k, hits, queries = data.interactions, PROBLEMS[dataset].k, 0.0, 0
    for _, right, numbers in data.test_dataloader():
        scores = pairs.counts.float().repeat(len(numbers), 1)
        scores[pairs.of_query.entries(numbers)] = -1.0
        found = (scores.topk(k, dim=1).indices.unsqueeze(2) == right.unsqueeze(1)).any(dim=1)
        hits += float((found.sum(dim=1) / (right >= 0).sum(dim=1)).sum())
        queries += len(numbers)
    return hits / queries


def best_rate(rows: list[dict[str, Any]], kind: str, method: str, seed: int) -> float | None:
    """The learning rate of the highest recall of validation; None where nothing was run."""
    mine = [row for row in rows if (row["kind"], row["method"], row["seed"]) == (kind, method, seed)]
    mine = [row for row in mine if row["val_recall"] == row["val_recall"]]
    return max(mine, key=lambda row: row["val_recall"])["lr"] if mine else None


def chosen(rows: list[dict[str, Any]], methods: Iterable[tuple[str, str]], first: int) -> dict[tuple[str, str], Any]:
    """Rows of each method at its best learning rate."""
    found = {}
    for kind, method in methods:
        rate = best_rate(rows, kind, method, first)
        mine = [row for row in rows if (row["kind"], row["method"], row["lr"]) == (kind, method, rate)]
        if mine:
            found[kind, method] = mine
    return found


def table(found: dict[tuple[str, str], list[dict[str, Any]]], k: int) -> str:
    """Means and standard deviations over the seeds, as a Markdown table."""
    lines = [
        f"| negatives | method | lr | recall@{k} | NDCG@{k} | training cross-entropy | test cross-entropy | seeds |"
    ]
    lines.append("| --- |" + " --- |" * 7)
    for (kind, method), rows in found.items():
        cells = ["{:.3f} ± {:.3f}".format(*spread([row[name] for row in rows])) for name in FIGURES]
        lines.append(f"| {kind} | {method} | {rows[0]['lr']:g} | {' | '.join(cells)} | {len(rows)} |")
    return "\n".join(lines)


@style()
def figure(rows: list[dict[str, Any]], seeds: list[int], k: int, path: Path) -> None:
    """Recall and training cross-entropy against the learning rate."""
    from matplotlib.ticker import LogLocator, NullFormatter, ScalarFormatter

    figure, panels = new_figure(1, 2, size=(4.6, 3.6))
    rates = sorted({row["lr"] for row in rows})
    for panel, name in zip(panels[0], ("recall", "train_cross_entropy"), strict=True):
        for method in [*METHODS, "full"]:
            for kind, line in (("plain", ":"), ("corrected", "-"), ("full", "--")):
                mine = [r for r in rows if (r["kind"], r["method"]) == (kind, method) and r["seed"] in seeds]
                found = {rate: [row[name] for row in mine if row["lr"] == rate] for rate in rates}
                found = {rate: values for rate, values in found.items() if values}
                if found:
                    label = method if kind == "full" else f"{method}, {kind}"
                    look = {**look_of(method, [*METHODS, "full"]), "linestyle": line}
                    mean_and_range(panel, list(found), list(found.values()), label, **look)
        panel.set_xscale("log")
        panel.minorticks_off()
        panel.set_xticks(rates, [f"{rate:g}" for rate in rates])
        panel.set_xlabel("learning rate of Adam")
    panels[0, 0].set(ylabel=f"recall@{k}", title="test split, among all items")
    panels[0, 1].set(yscale="log")
    panels[0, 1].yaxis.set_major_locator(LogLocator(subs=(1, 2, 3, 5)))
    panels[0, 1].yaxis.set_major_formatter(ScalarFormatter())
    panels[0, 1].yaxis.set_minor_formatter(NullFormatter())
    panels[0, 1].set(ylabel="softmax cross-entropy (nats)", title="training interactions, over all items")
    figure.legend(*panels[0, 0].get_legend_handles_labels(), loc="outside right center")
    note(figure, _which_seeds(rows, seeds))
    save(figure, path)


def _which_seeds(rows: list[dict[str, Any]], seeds: list[int]) -> str:
    """How many seeds there are at each learning rate: all of them only at the best one of a method."""
    if len(seeds) == 1:
        return "one seed"
    return f"one seed, and {len(seeds)} at the best rate of each method, mean and band from the least to the largest"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", default="debian_dependencies", choices=list(PROBLEMS), help="which data set")
    parser.add_argument("--kinds", nargs="+", default=["plain", "corrected"], choices=list(KINDS), help="of negatives")
    parser.add_argument("--methods", nargs="+", default=list(METHODS), choices=list(METHODS), help="which (all)")
    parser.add_argument("--rates", nargs="+", type=float, help="learning rates (those of the data set)")
    parser.add_argument("--seeds", nargs="+", type=int, default=[0], help="seeds (0)")
    parser.add_argument("--epochs", type=int, help="epochs of a run (those of the data set)")
    parser.add_argument("--options", default="{}", help="arguments of the task, as JSON; its rows are kept apart")
    parser.add_argument("--workers", type=int, default=1, help="runs at a time, one thread each (1)")
    parser.add_argument(
        "--out", type=Path, default=Path("runs/compare_retrieval"), help="folder of the CSV file and the figure"
    )
    arguments = parser.parse_args()
    problem = PROBLEMS[arguments.data]
    epochs, rates = arguments.epochs or problem.epochs, arguments.rates or problem.rates
    kinds = [kind for kind in arguments.kinds if kind != "full"]
    methods = [(kind, method) for kind in kinds for method in arguments.methods]
    methods += [("full", "full")] * ("full" in arguments.kinds)
    path = arguments.out / "runs.csv"

    def rows() -> list[dict[str, Any]]:
        wanted = (arguments.data, epochs, arguments.options)
        return [row for row in read_rows(path) if (row["data"], row["epochs"], row["options"]) == wanted]

    def run_all(jobs: list[tuple[str, str, float, int]]) -> None:
        done = {(row["kind"], row["method"], row["lr"], row["seed"]) for row in rows()}
        todo = [(arguments.data, *job, epochs, arguments.options) for job in jobs if job not in done]
        run_missing(run, todo, path, arguments.workers)

    first, *others = arguments.seeds
    run_all([(*method, lr, first) for lr in rates for method in methods])
    best = {method: best_rate(rows(), *method, first) for method in methods}
    run_all([(*method, lr, seed) for seed in others for method, lr in best.items() if lr is not None])
    found = chosen([row for row in rows() if row["seed"] in arguments.seeds], methods, first)
    print(table(found, problem.k))
    print(f"the most popular items: recall@{problem.k} {popularity(arguments.data):.3f}")
    figure(rows(), arguments.seeds, problem.k, arguments.out / f"{arguments.data}.png")
    print(f"runs: {path}\nfigure: {arguments.out / f'{arguments.data}.png'}")
    recalls = {method: round(statistics.mean(row["recall"] for row in mine), 4) for method, mine in found.items()}
    summary: dict[str, Any] = {kind: {m: r for (of, m), r in recalls.items() if of == kind} for kind in kinds}
    print(json.dumps({**summary, "full": recalls.get(("full", "full"))}))


if __name__ == "__main__":
    main()
