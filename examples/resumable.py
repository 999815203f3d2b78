"""Many silent runs in a few processes, each written to a CSV file when it ends: shared by this folder's scripts."""

from __future__ import annotations

import csv
import logging
import statistics
import warnings
from collections.abc import Callable, Collection, Iterable
from concurrent.futures import ProcessPoolExecutor, as_completed
from pathlib import Path
from typing import Any

import lightning as L
import torch
from tqdm import tqdm

from scent_lightning.duals import DualUpdate


def silent_process(seed: int) -> None:
    """One thread, the seed, and no messages: many runs share the machine and the terminal."""
    warnings.simplefilter("ignore")
    logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)
    torch.set_num_threads(1)
    L.seed_everything(seed, verbose=False)


def bare_trainer(**arguments: Any) -> L.Trainer:
    """A Trainer that leaves nothing behind: no log, no checkpoint, no progress bar."""
    return L.Trainer(
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        **arguments,
    )


def dual_update(method: str, arguments: dict[str, Any]) -> DualUpdate:
    """The update of a row of a table: the first word of ``method`` is its class ("SCENT auto" is SCENT)."""
    return DualUpdate.from_config({"class_path": method.split()[0], "init_args": arguments})


def settings(lr: float | None, arguments: dict[str, Any]) -> str:
    """Learning rate and arguments of the dual update, as a table says them."""
    return ", ".join(
        ["nothing set" if lr is None else f"lr {lr:g}", *(f"{name} {value}" for name, value in arguments.items())]
    )


def spread(values: list[float]) -> tuple[float, float]:
    """Mean, and standard deviation over the seeds (0 of one)."""
    return statistics.mean(values), statistics.stdev(values) if len(values) > 1 else 0.0


def of_seeds(seeds: Collection[int], spread_is: str = "band: from the least to the largest") -> str:
    """What a figure says of its lines."""
    if len(seeds) == 1:
        return "one seed"
    return f"mean of {len(seeds)} seeds; {spread_is}"


def read_rows(path: Path) -> list[dict[str, Any]]:
    """Rows of the CSV file, numbers as numbers; none if there is no file."""
    if not path.exists():
        return []

    def number(text: str) -> Any:
        for kind in (int, float):
            try:
                return kind(text)
            except ValueError:
                continue
        return text

    with path.open(newline="") as file:
        return [{name: number(text) for name, text in row.items()} for row in csv.DictReader(file)]


def append_rows(path: Path, rows: list[dict[str, Any]]) -> None:
    """Add rows to the CSV file, with a header if it is new."""
    new = not path.exists()
    with path.open("a", newline="") as file:
        writer = csv.DictWriter(file, rows[0])
        if new:
            writer.writeheader()
        writer.writerows(rows)


def run_missing(
    run: Callable[..., list[dict[str, Any]]], jobs: Iterable[tuple[Any, ...]], path: Path, workers: int
) -> None:
    """Call ``run`` with each of ``jobs`` in ``workers`` processes and append the rows it gives, as they come."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with ProcessPoolExecutor(workers) as pool:
        running = [pool.submit(run, *job) for job in jobs]
        for job in tqdm(as_completed(running), total=len(running), desc="runs", disable=not running):
            append_rows(path, job.result())
