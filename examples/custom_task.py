"""A LightningModule of one's own with two dual variables: contrastive learning of two noisy views.

Each row of the data is an anchor twice: view 1 against the batch's view 2, and the other way round. Run it:

    python examples/custom_task.py
"""

import lightning as L
import torch
from torch import Tensor, nn

from scent_lightning.callbacks import DualVariableMonitor
from scent_lightning.data import IndexedTensorDataset, batch_loader
from scent_lightning.duals import SCENT, DualUpdate, DualVariableMixin


class TwoViews(DualVariableMixin, L.LightningModule):
    """Encoders of two views, trained by the two-way global contrastive loss."""

    def __init__(self, num_anchors: int, dual: DualUpdate, tau: float = 0.1):
        super().__init__()
        self.save_hyperparameters()
        self.tau = tau
        self.encoders = nn.ModuleList([nn.Linear(20, 8), nn.Linear(20, 8)])
        self.add_dual("first", num_anchors, dual)
        self.add_dual("second", num_anchors, dual)

    def similarity(self, first: Tensor, second: Tensor) -> Tensor:
        one, two = (nn.functional.normalize(e(x), dim=1) for e, x in zip(self.encoders, (first, second), strict=True))
        return one @ two.T / self.tau

    def training_step(self, batch: tuple[Tensor, Tensor, Tensor], batch_idx: int) -> Tensor:
        first, second, index = batch
        scores = self.similarity(first, second)
        positive = scores.diagonal().unsqueeze(1)
        others = ~torch.eye(len(index), dtype=torch.bool, device=self.device)
        return self.tau * (
            self.entropic_risk("first", scores - positive, index, others)
            + self.entropic_risk("second", scores.T - positive, index, others)
        )

    def validation_step(self, batch: tuple[Tensor, Tensor, Tensor], batch_idx: int) -> None:
        first, second, index = batch
        found = self.similarity(first, second).argmax(dim=1).cpu()
        self.log("val/recall_at_1", (found == torch.arange(len(index))).float().mean(), prog_bar=True)

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.Adam(self.parameters(), lr=1e-2)


if __name__ == "__main__":
    L.seed_everything(0)
    shared, noise = torch.randn(1000, 6) @ torch.randn(6, 20), 0.5
    views = IndexedTensorDataset(*(shared + noise * torch.randn(1000, 20) for _ in range(2)))
    task = TwoViews(len(views), SCENT(log_alpha=2.0, max_log_weight=2.0))
    monitor = DualVariableMonitor()
    trainer = L.Trainer(accelerator="cpu", max_epochs=40, callbacks=[monitor], log_every_n_steps=10)
    trainer.fit(task, batch_loader(views, 100, shuffle=True), batch_loader(views, 1000, shuffle=False))
