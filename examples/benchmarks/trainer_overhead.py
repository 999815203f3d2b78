"""What the Trainer costs: a whole ``Trainer.fit`` of robust regression against a bare loop over the same batches.

Both do the same work a step: a batch of 100 rows of California housing, a linear model, the SCENT update of the dual
variable, SGD with Nesterov momentum and a cosine learning rate. The Trainer has all that the command line switches on:
dual-variable monitor, learning-rate monitor, TensorBoard, a checkpoint every epoch, progress bar, with the settings of
``configs/dro_california_tau1.0.yaml``. One thread; the two take turns, and the medians of their times per step are
compared.
"""

from __future__ import annotations

import argparse
import contextlib
import io
import json
import math
import statistics
import tempfile
import time
import warnings

import lightning as L
import numpy as np
import pandas as pd
import torch
from lightning.pytorch.loggers import TensorBoardLogger
from torch.nn.functional import softplus

from scent_lightning.data import TabularRegressionDataModule
from scent_lightning.duals import SCENT
from scent_lightning.errors import InputError
from scent_lightning.lightning_cli import NoProfiler, default_callbacks
from scent_lightning.tasks import DRORegressionTask

TAU, LOG_ALPHA, LEARNING_RATE = 1.0, -6.0, 6e-6


def california(folder: str) -> TabularRegressionDataModule:
    """California housing, or where it is not at hand a random table of its size, which takes the same time."""
    try:
        data = TabularRegressionDataModule("california_housing")
        data.setup("fit")
    except InputError as error:
        print(f"random rows instead of California housing: {error}")
        table = pd.DataFrame(np.random.default_rng(0).standard_normal((20640, 9)), columns=list("abcdefghy"))
        table.to_parquet(f"{folder}/random.parquet")
        data = TabularRegressionDataModule(f"{folder}/random.parquet", target="y")
    return data


def bare_loop(data: TabularRegressionDataModule, epochs: int) -> float:
    """Seconds a step of the plain loop."""
    model = torch.nn.Linear(data.num_features, 1)
    loader = data.train_dataloader()
    optimizer = torch.optim.SGD(model.parameters(), lr=LEARNING_RATE, momentum=0.9, nesterov=True)
    scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, T_max=epochs * len(loader))
    nu = None
    start = time.perf_counter()
    for epoch in range(epochs):
        loader.sampler.set_epoch(epoch)  # type: ignore[attr-defined]
        for features, target, _ in loader:
            scores = (model(features).squeeze(-1) - target).square() / TAU
            with torch.no_grad():
                log_mean = torch.logsumexp(scores, dim=0) - math.log(len(scores))
                nu = log_mean if nu is None else nu
                nu = nu + softplus(log_mean + LOG_ALPHA) - softplus(nu + LOG_ALPHA)
            loss = TAU * (torch.exp(scores - nu).mean() + nu - 1)
            optimizer.zero_grad()
            loss.backward()  # type: ignore[no-untyped-call]
            optimizer.step()
            scheduler.step()
    return (time.perf_counter() - start) / (epochs * len(loader))


def trainer_fit(data: TabularRegressionDataModule, epochs: int, folder: str) -> float:
    """Seconds a step of ``Trainer.fit``, from its call to its return."""
    task = DRORegressionTask(
        data.num_features, SCENT(LOG_ALPHA, max_log_weight=5.0), tau=TAU, lr=LEARNING_RATE, weight_step="gradient"
    )
    trainer = L.Trainer(
        accelerator="cpu",
        max_epochs=epochs,
        check_val_every_n_epoch=10,
        logger=TensorBoardLogger(folder),
        callbacks=default_callbacks({}),
        profiler=NoProfiler(),
        enable_model_summary=False,
    )
    start = time.perf_counter()
    trainer.fit(task, datamodule=data)
    return (time.perf_counter() - start) / trainer.global_step


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--epochs", type=int, default=40, help="epochs of a turn (207 steps each)")
    parser.add_argument("--turns", type=int, default=3, help="turns of each")
    arguments = parser.parse_args()
    print(__doc__)
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    loop, fit = [], []
    with tempfile.TemporaryDirectory() as folder:
        data = california(folder)
        bare_loop(data, 1)
        with contextlib.redirect_stdout(io.StringIO()), contextlib.redirect_stderr(io.StringIO()):
            trainer_fit(data, 1, folder)
        for turn in range(arguments.turns):
            loop.append(bare_loop(data, arguments.epochs))
            with contextlib.redirect_stdout(io.StringIO()), contextlib.redirect_stderr(io.StringIO()):
                fit.append(trainer_fit(data, arguments.epochs, folder))
            print(f"turn {turn + 1}: bare loop {1e3 * loop[-1]:.3f} ms a step, Trainer.fit {1e3 * fit[-1]:.3f} ms")
    ratio = statistics.median(fit) / statistics.median(loop)
    print(json.dumps({"trainer_over_loop": round(ratio, 3), "ms_per_step": round(1e3 * statistics.median(fit), 4)}))


if __name__ == "__main__":
    main()
