"""A step of retrieval as the number of items grows: of 10,000 and of 10 million, in turns.

Embeddings of 64 for 100,000 queries and the items, a million interactions, in-batch negatives corrected for their
frequency, SCENT, row-sparse Adam, batches of 512, one thread: the task's training step, the backward pass and the
optimiser's step. Needs 9 GB at 10 million items. ``step_ratio`` is the median step at the most items over the one at
the fewest.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time

import torch
from torch.optim import Optimizer

from scent_lightning.data import Interactions
from scent_lightning.duals import SCENT
from scent_lightning.optim import RowSparseAdam
from scent_lightning.tasks import RetrievalTask

ITEMS = (10_000, 10_000_000)
QUERIES, ROWS, BATCH, DIM, TURN = 100_000, 1_000_000, 512, 64, 10


def made(num_items: int) -> tuple[RetrievalTask, Interactions, Optimizer]:
    """A task, its interactions and its optimiser."""
    generator = torch.Generator().manual_seed(0)
    queries = torch.randint(QUERIES, (ROWS,), generator=generator)
    pairs = Interactions(queries, torch.randint(num_items, (ROWS,), generator=generator), QUERIES, num_items)
    task = RetrievalTask(QUERIES, num_items, ROWS, SCENT(log_alpha=2.0), dim=DIM)
    task.use_interactions(pairs)
    return task, pairs, RowSparseAdam(task.trained_parameters(), lr=0.01)


def turn(task: RetrievalTask, pairs: Interactions, optimizer: Optimizer, steps: int) -> list[float]:
    """Milliseconds of some steps on random batches."""
    times = []
    for _ in range(steps):
        index = torch.randint(ROWS, (BATCH,))
        start = time.perf_counter()
        loss = task.training_step((pairs.queries[index], pairs.items[index], index), 0)
        loss.backward()  # type: ignore[no-untyped-call]
        optimizer.step()
        optimizer.zero_grad()
        times.append(1e3 * (time.perf_counter() - start))
    return times


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=400, help="steps for each number of items (400)")
    parser.add_argument("--items", type=int, nargs="+", default=ITEMS, help="numbers of items, rising")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    torch.manual_seed(0)
    print(__doc__)
    tasks = {num_items: made(num_items) for num_items in arguments.items}
    times: dict[int, list[float]] = {num_items: [] for num_items in tasks}
    for parts in tasks.values():
        turn(*parts, TURN)  # the optimiser's state is made at the first
    for _ in range(max(arguments.steps // TURN, 1)):
        for num_items, parts in tasks.items():
            times[num_items] += turn(*parts, TURN)
    steps = {num_items: statistics.median(taken) for num_items, taken in times.items()}
    for num_items, step in steps.items():
        print(f"{num_items:>12,} items: {step:.2f} ms a step")
    ratio = steps[arguments.items[-1]] / steps[arguments.items[0]]
    print(json.dumps({"step_ratio": round(ratio, 3), "ms_per_step": {str(k): round(v, 3) for k, v in steps.items()}}))


if __name__ == "__main__":
    main()
