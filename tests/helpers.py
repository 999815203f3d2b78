"""A small softmax problem with one dual per row, for tests under the Trainer; and several processes."""

import multiprocessing
import os
import re
import socket
import tarfile
from pathlib import Path

import lightning as L
import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from lightning.fabric.plugins.environments import LightningEnvironment
from lightning.pytorch.callbacks import ModelCheckpoint
from torch.utils.data import DataLoader

from scent_lightning.data import IndexedTensorDataset, batch_loader
from scent_lightning.duals import SCENT, DualVariableMixin

CLASSES = 5


class SoftmaxTask(DualVariableMixin, L.LightningModule):
    def __init__(self, num_anchors: int, dual=None, lr: float = 0.1):
        super().__init__()
        self.save_hyperparameters()
        self.lr = lr
        self.linear = torch.nn.Linear(4, CLASSES)
        self.add_dual("nu", num_anchors, dual if dual is not None else SCENT(0.0))

    def loss(self, batch):
        features, labels, index = batch
        logits = self.linear(features)
        return self.entropic_risk("nu", logits - logits.gather(1, labels.unsqueeze(1)), index)

    def training_step(self, batch, batch_idx):
        return self.loss(batch)

    def validation_step(self, batch, batch_idx):
        self.log("val_loss", self.loss(batch))

    def test_step(self, batch, batch_idx):
        self.log("test_loss", self.loss(batch))

    def predict_step(self, batch, batch_idx):
        return self.loss(batch)

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=self.lr, momentum=0.9)


class SoftmaxData(L.LightningDataModule):
    def __init__(self, rows: int = 24, batch_size: int = 8):
        super().__init__()
        generator = torch.Generator().manual_seed(0)
        labels = torch.arange(rows) % CLASSES
        features = torch.randn(rows, 4, generator=generator) + labels.unsqueeze(1)
        self.dataset = IndexedTensorDataset(features, labels)
        self.batch_size = batch_size

    @property
    def num_anchors(self) -> int:
        return len(self.dataset)

    def train_dataloader(self) -> DataLoader:
        replicas = (1, 0) if self.trainer is None else (self.trainer.world_size, self.trainer.global_rank)
        return batch_loader(self.dataset, self.batch_size, True, *replicas)

    def val_dataloader(self) -> DataLoader:
        return batch_loader(self.dataset, self.batch_size, False)

    test_dataloader = predict_dataloader = val_dataloader


class Steps(L.LightningModule):
    """Keeps the dataset indices of each kind of step, those of training a list for each batch."""

    def __init__(self):
        super().__init__()
        self.weight = torch.nn.Parameter(torch.zeros(()))
        self.seen = {"train": [], "val": [], "test": [], "predict": []}

    def training_step(self, batch, batch_idx):
        self.seen["train"].append(batch[2].tolist())
        return self.weight * batch[0].sum()

    def validation_step(self, batch, batch_idx):
        self.seen["val"] += batch[2].tolist()

    def test_step(self, batch, batch_idx):
        self.seen["test"] += batch[2].tolist()

    def predict_step(self, batch, batch_idx):
        self.seen["predict"] += batch[2].tolist()
        return batch[1]

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.1)


def quiet_trainer(**arguments) -> L.Trainer:
    defaults = {
        "accelerator": "cpu",
        "logger": False,
        "enable_checkpointing": False,
        "enable_progress_bar": False,
        "enable_model_summary": False,
    }
    return L.Trainer(**{**defaults, **arguments})


def assert_resumed_is_the_same(make, folder, step, max_epochs):
    """A run resumed from the checkpoint of a step ends with the state of one that went straight on.

    Args:
        make: gives a task and its data module, anew for each run.
        folder: for the checkpoints.
        step: within an epoch.
        max_epochs: of the run.

    Returns:
        The state dict at the end.
    """

    def run(name, checkpoint=None):
        L.seed_everything(0, verbose=False)
        task, data = make()
        keep = ModelCheckpoint(folder / name, "{step}", every_n_train_steps=step, save_top_k=-1)
        trainer = quiet_trainer(max_epochs=max_epochs, enable_checkpointing=True, callbacks=[keep], limit_val_batches=0)
        trainer.fit(task, datamodule=data, ckpt_path=checkpoint)
        return task.state_dict()

    straight = run("straight")
    resumed = run("resumed", folder / "straight" / f"step={step}.ckpt")
    assert set(straight) == set(resumed)
    for name, value in straight.items():
        if torch.is_tensor(value):
            assert torch.equal(value, resumed[name]), name
    return straight


def unpack(archive, folder):
    """Write what an archive of ours holds to a folder."""
    with tarfile.open(archive) as file:
        # Python 3.10 and 3.11 know the argument from a later patch on; newer ones warn without it.
        file.extractall(folder, **({"filter": "data"} if hasattr(tarfile, "data_filter") else {}))


WORLD = 2

# Processes are forked from one that has imported all this and has no threads: importing it takes seconds.
FORKSERVER = multiprocessing.get_context("forkserver")
FORKSERVER.set_forkserver_preload(
    [
        "lightning.pytorch.cli",
        "open_clip",
        "pytest",
        "scent_lightning.lightning_cli",
        "scipy.optimize",
        "torch.utils.tensorboard",
        "tests.settings",
    ]
)


def _start(work, arguments, processes):
    mp.start_processes(work, arguments, processes, start_method="forkserver")


def _in_group(rank, rendezvous, work, results):
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{rendezvous}", rank=rank, world_size=WORLD)
    try:
        results[rank] = work(rank)
    finally:
        dist.destroy_process_group()


def in_two_processes(work, tmp_path):
    """What ``work(rank)`` gives in each of two processes of a gloo group."""
    with mp.Manager() as manager:
        results = manager.dict()
        _start(_in_group, (tmp_path / "rendezvous", work, results), WORLD)
        return [results[rank] for rank in range(WORLD)]


def _as_node(rank, port, work, results):
    node = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "NODE_RANK": str(rank), "LOCAL_RANK": "0"}
    os.environ.update(node)
    torch.set_num_threads(1)
    results[rank] = work(rank)


def under_two_trainers(work):
    """What ``work(rank)`` gives in each of two processes whose Trainers (``ddp_trainer``) form one run."""
    return under_trainers(work, WORLD)


def under_trainers(work, world):
    """What ``work(rank)`` gives in each of ``world`` processes whose Trainers (``ddp_trainer``) form one run."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    with mp.Manager() as manager:
        results = manager.dict()
        _start(_as_node, (port, work, results), world)
        return [results[rank] for rank in range(world)]


def ddp_trainer(world=WORLD, **arguments) -> L.Trainer:
    return quiet_trainer(strategy="ddp", num_nodes=world, devices=1, plugins=[LightningEnvironment()], **arguments)


def example_of_the_guide(name):
    """The Python file of that name in the contributors' guide."""
    guide = (Path(__file__).parent.parent / ".github" / "CONTRIBUTING.md").read_text()
    (text,) = re.findall(rf"```python\n# {name}\.py\n(.*?)```", guide, flags=re.DOTALL)
    return text
