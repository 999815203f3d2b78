"""Zero-shot evaluation on a folder of sets in CLIP benchmark's layout, and the averages of the published runs."""

from __future__ import annotations

import hashlib
import re
from collections.abc import Iterator
from statistics import fmean
from typing import Any

import lightning as L
import torch
from lightning_utilities.core.rank_zero import rank_zero_info
from torch import Tensor
from torch.utils.data import DataLoader, Subset

from scent_lightning.callbacks.evaluation import EvaluationCallback, Stage
from scent_lightning.callbacks.zero_shot import (
    check_validates,
    checked_data,
    checked_templates,
    encoded_images,
    encoded_texts,
    zero_shot_classifier,
)
from scent_lightning.data.evaluation_sets import EvaluationRows, EvaluationSet, find_evaluation_sets
from scent_lightning.metrics import CaptionRecall, ZeroShotAccuracy
from scent_lightning.validation import checked_integer
from scent_lightning.words import listed

__all__ = ["ZeroShotBenchmark"]

# ImageNet and its six shifts, as CLIP benchmark and DataComp call them, without what separates the words.
_IMAGENET_AND_SHIFTS = {
    "imagenet1k",
    "imagenetv2",
    "imagenetsketch",
    "imageneta",
    "imageneto",
    "imagenetr",
    "objectnet",
}
_WAYS = ("image_to_text_R@1", "text_to_image_R@1")


class ZeroShotBenchmark(EvaluationCallback):
    """Zero-shot evaluation of a CLIP model on a folder of sets, after every validation and test run.

    The sets are in the layout of CLIP benchmark's webdatasets, which DataComp has as well: see
    :class:`~scent_lightning.data.evaluation_sets.EvaluationSet`. A set called NAME (the folder's name without ``wds_``
    and ``_test``) gives

    * classification: ``val/NAME-zeroshot-test-top1``, for more than five classes ``-top5``, and
      ``-mean_per_class_recall``, with the set's own class names and templates;
    * retrieval: ``val/NAME-zeroshot-test-image_to_text_R@1`` and ``-text_to_image_R@1``, and at 5 and 10. An image may
      have several captions: it is right where any of them is the nearest, and each caption is a query of its own.

    The averages are those of the paper (Wei et al. 2026, CLIP training), of top-1 accuracy, and for retrieval of the
    mean of the two recalls at 1: ``val/zeroshot-imagenet_and_6_shifts``, where all seven sets are there
    (``imagenet1k``, ``imagenetv2``, ``imagenet_sketch``, ``imagenet-a``, ``imagenet-o``, ``imagenet-r``,
    ``objectnet``); ``val/zeroshot-retrieval``, over all retrieval sets; and ``val/zeroshot-all``.

    Where ``test`` runs, all begin with ``test/``. The sanity check logs nothing. Images are transformed as the data
    module's ``evaluation_transform`` does, and captions tokenised by its ``tokenize``; each process encodes its share,
    in the Trainer's precision. The module needs an open_clip model as its ``model``: ``CLIPTask`` has it.

    Args:
        path: folder of the sets, or of one; one that is not there is looked for in the folder that the environment
            variable SCENT_LIGHTNING_DATA names.
        sets: names of those to evaluate; None takes all.
        templates: of the sets that bring none: texts with ``{}`` for the name of the class, one or a list.
        every_n_epochs: during a fit, evaluate in every n-th epoch only.
        batch_size: images, and texts, at a time, in each process.
        num_workers: processes that load the images; 0 loads in the training process.

    Raises:
        InputError: an argument is not as above. Before a run: a folder, set, file or shard that is missing or not as it
            should be, or a module or data module that lacks something. At the end of the first epoch: a sample without
            an image that can be read, or without a class or caption.

    Example:
        >>> import lightning as L
        >>> callback = ZeroShotBenchmark("evaluation_sets", every_n_epochs=2)
        >>> trainer = L.Trainer(callbacks=[callback], logger=False, accelerator="cpu")
    """

    def __init__(
        self,
        path: str,
        sets: list[str] | None = None,
        templates: list[str] | str = "a photo of a {}.",
        every_n_epochs: int = 1,
        batch_size: int = 256,
        num_workers: int = 0,
    ) -> None:
        super().__init__(every_n_epochs)
        self.path = path
        self.sets = sets
        self.templates = checked_templates(templates, "templates must be texts")
        self.batch_size: int = checked_integer("batch_size", batch_size)
        self.num_workers: int = checked_integer("num_workers", num_workers, least=0)
        self._rows: list[EvaluationRows] = []

    def setup(self, trainer: L.Trainer, pl_module: L.LightningModule, stage: str) -> None:
        """Find the sets and read the headers of their shards."""
        if stage == "predict":
            return
        data = checked_data(self, trainer, pl_module, "tokenize", "evaluation_transform")
        found = find_evaluation_sets(self.path, self.sets)
        for each in found:
            if each.templates:
                checked_templates(each.templates, f"templates of evaluation set {each.name!r} must be texts")
        self._rows = [each.rows(data.evaluation_transform) for each in found]
        names = [each.name for each in found]
        rank_zero_info(f"Zero-shot evaluation on {len(names)} sets of {self.path}: {listed(names)}")
        lacking = sorted(_IMAGENET_AND_SHIFTS - set(map(_bare, names)))
        if 0 < len(lacking) < len(_IMAGENET_AND_SHIFTS):
            rank_zero_info(f"The average over ImageNet and its 6 shifts is not logged: there is no {listed(lacking)}")

    def on_train_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        """Refuse a run in which the sets would never be looked at."""
        check_validates(self, trainer, "evaluates")

    def start(self, pl_module: L.LightningModule) -> None:
        """Nothing: the batches of the run do not matter."""

    def collect(self, trainer: L.Trainer, step: str, outputs: Any, batch: Any, dataloader_idx: int) -> None:
        """Likewise."""

    @torch.no_grad()
    def finish(self, trainer: L.Trainer, pl_module: L.LightningModule, stage: Stage) -> None:
        """Evaluate every set and log."""
        scores: dict[str, float] = {}
        retrieval: list[float] = []
        for rows in self._rows:
            of = rows.of
            evaluate = self._classify if of.kind == "classification" else self._retrieve
            found = evaluate(trainer, pl_module, rows)
            for result, value in found.items():
                pl_module.log(f"{stage}/{of.name}-zeroshot-test-{result}", value, sync_dist=True)
            if of.kind == "retrieval":
                retrieval.append(fmean(float(found[way]) for way in _WAYS))
            scores[of.name] = retrieval[-1] if of.kind == "retrieval" else float(found["top1"])
        shifts = {_bare(name): score for name, score in scores.items() if _bare(name) in _IMAGENET_AND_SHIFTS}
        averages = {"all": list(scores.values()), "retrieval": retrieval}
        if len(shifts) == len(_IMAGENET_AND_SHIFTS):
            averages["imagenet_and_6_shifts"] = list(shifts.values())
        for name, values in averages.items():
            if values:
                pl_module.log(f"{stage}/zeroshot-{name}", fmean(values), sync_dist=True, prog_bar=name == "all")

    def _batches(self, trainer: L.Trainer, rows: EvaluationRows) -> Iterator[tuple[Tensor, Tensor, list[Any]]]:
        """Rows, images and classes or captions of this process's share."""
        mine = range(trainer.global_rank, len(rows), trainer.world_size)
        # A loader draws a seed: from a generator of its own, or training would continue with other random numbers.
        loader = DataLoader(
            Subset(rows, mine),
            self.batch_size,
            num_workers=self.num_workers,
            generator=torch.Generator(),
            collate_fn=EvaluationRows.batch,
        )
        for start, (images, targets) in zip(range(0, len(mine), self.batch_size), loader, strict=True):
            yield torch.tensor(mine[start : start + len(targets)]), images, targets

    def _classify(self, trainer: L.Trainer, module: L.LightningModule, rows: EvaluationRows) -> dict[str, Tensor]:
        of: EvaluationSet = rows.of
        classifier = zero_shot_classifier(trainer, module, of.class_names, of.templates or self.templates)
        metric = ZeroShotAccuracy(len(of.class_names)).to(classifier.device)
        for _, images, labels in self._batches(trainer, rows):
            features = encoded_images(trainer, module, images)
            metric.update(features @ classifier, torch.tensor(labels, device=features.device))
        found: dict[str, Tensor] = metric.compute()
        return found

    def _retrieve(self, trainer: L.Trainer, module: L.LightningModule, rows: EvaluationRows) -> dict[str, Tensor]:
        metric = CaptionRecall().to(module.device)
        # Without an image a process still takes part, with no rows.
        nothing, none = encoded_texts(trainer, module, ["a"], 1)[:0], torch.empty(0, dtype=torch.int64)
        metric.update(nothing, none, nothing, none, none)
        for numbers, images, targets in self._batches(trainer, rows):
            owners = torch.tensor([int(row) for row, texts in zip(numbers, targets, strict=True) for _ in texts])
            captions = [caption for texts in targets for caption in texts]
            metric.update(
                encoded_images(trainer, module, images),
                numbers,
                encoded_texts(trainer, module, captions, self.batch_size),
                owners,
                torch.tensor([_number(caption) for caption in captions]),
            )
        found: dict[str, Tensor] = metric.compute()
        return found


def _bare(name: str) -> str:
    bare = re.sub(r"[^a-z0-9]", "", name.lower())
    return "imagenet1k" if bare == "imagenet" else bare


def _number(text: str) -> int:
    """A number for each text, equal for equal ones, in every process."""
    return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=7).digest(), "big")
