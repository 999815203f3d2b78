"""A softmax of one's own with dual variables, by hand: in-batch negatives that stand for all items.

Each row is a user with an item, and some items are far more frequent than others. The scores of the other items of the
batch are taken less the logarithm of how probable it is that an item is in a batch: three lines. Run it:

    python examples/softmax_by_hand.py

It prints the exact cross-entropy over all items with the three lines and without.
"""

import lightning as L
import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

from scent_lightning.data import IndexedTensorDataset, batch_loader
from scent_lightning.duals import SCENT, DualUpdate, DualVariableMixin
from scent_lightning.functional import correct_scores, log_expected_occurrences

USERS, ITEMS, ROWS, BATCH = 300, 500, 6000, 64


class Retrieval(DualVariableMixin, L.LightningModule):
    """Embeddings of users and items; each row of a batch is a negative of the others."""

    weight_step = "proximal"

    def __init__(self, counts: Tensor, dual: DualUpdate, is_corrected: bool = True):
        super().__init__()
        self.counts, self.is_corrected = counts, is_corrected
        self.users, self.items = nn.Embedding(USERS, 16), nn.Embedding(ITEMS, 16)
        self.add_dual("nu", int(counts.sum()), dual)

    def training_step(self, batch: tuple[Tensor, Tensor, Tensor], batch_idx: int) -> Tensor:
        users, items, index = batch
        logits = self.users(users) @ self.items(items).T
        scores = logits - logits.diagonal().unsqueeze(1)
        negatives = items != items.unsqueeze(1)
        if self.is_corrected:
            # The other rows of the batch are len(items) − 1 of the other rows of the training set. Where each item of
            # the batch counts once, however often it occurs, this is log_inclusion_probability.
            rows = int(self.counts.sum())
            log_q = log_expected_occurrences(self.counts, rows - 1, len(items) - 1)[items]
            scores = correct_scores(scores, log_q, ITEMS - 1, negatives)
        return self.entropic_risk("nu", scores, index, negatives)

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=30.0)


def interactions() -> tuple[Tensor, Tensor]:
    """Users and items of all rows, drawn from a softmax in which items have frequencies by Zipf's law."""
    tastes, items = torch.randn(USERS, 4), torch.randn(ITEMS, 4)
    logits = tastes @ items.T - torch.arange(1, ITEMS + 1).log()
    users = torch.randint(USERS, (ROWS,))
    return users, torch.multinomial(logits[users].softmax(dim=1), 1).squeeze(1)


if __name__ == "__main__":
    L.seed_everything(0)
    users, items = interactions()
    for is_corrected in (False, True):
        task = Retrieval(torch.bincount(items, minlength=ITEMS), SCENT(), is_corrected)
        trainer = L.Trainer(accelerator="cpu", max_epochs=10, logger=False, enable_checkpointing=False)
        trainer.fit(task, batch_loader(IndexedTensorDataset(users, items), BATCH, shuffle=True))
        exact = cross_entropy(task.users.weight[users] @ task.items.weight.T, items)
        print(f"{'corrected' if is_corrected else 'plain'}: cross-entropy {exact.item():.3f}")
