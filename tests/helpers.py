"""A small softmax problem with one dual per row, for tests under the Trainer."""

import lightning as L
import torch
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


def quiet_trainer(**arguments) -> L.Trainer:
    defaults = {
        "accelerator": "cpu",
        "logger": False,
        "enable_checkpointing": False,
        "enable_progress_bar": False,
        "enable_model_summary": False,
    }
    return L.Trainer(**{**defaults, **arguments})
