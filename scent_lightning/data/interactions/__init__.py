"""Interactions of queries with items: who bought what, which word a definition is of."""

from scent_lightning.data.interactions.module import InteractionsDataModule
from scent_lightning.data.interactions.ngrams import hashed_ngrams
from scent_lightning.data.interactions.pairs import Interactions
from scent_lightning.data.interactions.ragged import Ragged

__all__ = ["Interactions", "InteractionsDataModule", "Ragged", "hashed_ngrams"]
