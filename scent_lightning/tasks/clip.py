"""Contrastive training of image and text towers."""

from __future__ import annotations

import copy
import difflib
import json
import logging
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any, cast

import lightning as L
import torch
from lightning.pytorch.utilities import rank_zero_warn
from torch import Tensor, nn

from scent_lightning.checkpoint import read_plain
from scent_lightning.compiling import outside_graphs
from scent_lightning.duals import DualUpdate, DualVariable, DualVariableMixin, exchange
from scent_lightning.duals.variable import Placement, verify_together
from scent_lightning.duals.weight_step import WeightStepRule, checked_weight_step
from scent_lightning.errors import InputError
from scent_lightning.functional import Everyone, contrastive_log_means, contrastive_loss, contrastive_scores
from scent_lightning.metrics import RetrievalRecall
from scent_lightning.metrics.entropic_risk import check_tau
from scent_lightning.optional import of_vision
from scent_lightning.progress import ProgressLR
from scent_lightning.tasks.batches import three_parts
from scent_lightning.tasks.training import TrainLossMixin, check_trains, cosine, run_length

__all__ = ["CLIPTask"]

Batch = tuple[Tensor, Tensor, Tensor]
_IMAGE, _TEXT = "image", "text"


class CLIPTask(TrainLossMixin, DualVariableMixin, L.LightningModule):
    r"""CLIP by the robust global contrastive loss, with a dual variable for every image and every text.

    .. math:: \min_{w, \tau} \frac{\tau}{n} \sum_i \sum_{k = 1, 2}
              \log\Bigl(\epsilon + \operatorname{mean}_{j \neq i} e^{S^k_{ij}}\Bigr) + 2 \tau \rho

    with the scores of :mod:`scent_lightning.functional.contrastive` (Wei et al. 2026, CLIP training). ``--dual BSGD``
    is the mini-batch loss of OpenCLIP (over j ≠ i), ``SOX`` is FastCLIP, ``SCENT`` is the paper's. The model is
    open_clip's own, and goes back to it: ``examples/export_open_clip.py``.

    Logs ``train/loss`` (dual objective) and ``train/tau``, and for validation and test the recall at 1, 5 and 10 of
    retrieval among all pairs of the split, ``…/image_to_text_R@1`` and so on; where pairs have the same text, each of
    their images is right. ``predict`` gives embeddings.

    In a distributed run the embeddings of all processes are each other's negatives, with gradient, and each process
    handles the ν of its own pairs.

    Args:
        num_anchors: number of training pairs n; the command line takes it from the data module.
        dual: the dual update of both tables; the command line's ``--dual``.
        architecture: a model of open_clip: its name, the path of its configuration (a .json file), or the configuration
            itself (``embed_dim``, ``vision_cfg``, ``text_cfg``).
        pretrained: weights to start from: a tag of open_clip's (downloaded) or a file.
        tau: temperature τ, above 0; where it starts if it is learned. None takes that of the pretrained weights, in the
            range of the two below, or 0.07 without any.
        learn_tau: learn τ, one for all pairs.
        min_tau: smallest τ that is allowed to be learned.
        max_tau: largest τ that is allowed to be learned.
        rho: ρ, what a high temperature costs; of use only with ``learn_tau``.
        epsilon: ε inside the logarithm, at least 0. ``SoftplusASGD`` does without.
        lr: learning rate of AdamW, above 0.
        tau_lr: learning rate of τ; None takes ``lr``.
        weight_decay: of AdamW, at least 0; not on gains, biases and τ.
        beta1: AdamW's first coefficient.
        beta2: AdamW's second coefficient.
        adam_epsilon: AdamW's ε.
        warmup_steps: steps over which the learning rates rise linearly from 0; then they fall to 0 by a cosine.
        chunk: rows of the matrix of all pairs that exist at a time; None for all, which is faster.
        grad_checkpointing: trade time for memory in both towers.
        lock_image: freeze the image tower (open_clip's "locked-image tuning").
        lock_text: freeze the text tower.
        dual_placement: "module" keeps the tables of ν on the module's device, "cpu" in main memory.
        weight_step: as of the other tasks; "proximal" leaves AdamW's gradients alone, whose size does not matter to it.

    Raises:
        InputError: an argument out of its range, an architecture that open_clip does not know (near names are listed),
            or weights that cannot be loaded.

    Example:
        >>> import torch
        >>> from scent_lightning.duals import SCENT
        >>> tower = {"layers": 1, "width": 16}
        >>> task = CLIPTask(
        ...     num_anchors=10,
        ...     dual=SCENT(log_alpha=0.0),
        ...     architecture={
        ...         "embed_dim": 8,
        ...         "vision_cfg": {**tower, "image_size": 8, "patch_size": 4, "head_width": 8},
        ...         "text_cfg": {**tower, "context_length": 4, "vocab_size": 20, "heads": 2},
        ...     },
        ... )
        >>> batch = (torch.randn(3, 3, 8, 8), torch.randint(1, 20, (3, 4)), torch.tensor([7, 0, 4]))
        >>> loss = task.training_step(batch, 0)
        >>> task.duals["image"].visited.nonzero().flatten().tolist()
        [0, 4, 7]
    """

    def __init__(
        self,
        num_anchors: int,
        dual: DualUpdate,
        architecture: str | dict[str, Any] = "ViT-B-32",
        pretrained: str | None = None,
        tau: float | None = None,
        learn_tau: bool = True,
        min_tau: float = 0.01,
        max_tau: float = 1.0,
        rho: float = 11.0,
        epsilon: float = 1e-6,
        lr: float = 5e-4,
        tau_lr: float | None = None,
        weight_decay: float = 0.2,
        beta1: float = 0.9,
        beta2: float = 0.98,
        adam_epsilon: float = 1e-6,
        warmup_steps: int = 0,
        chunk: int | None = None,
        grad_checkpointing: bool = False,
        lock_image: bool = False,
        lock_text: bool = False,
        dual_placement: Placement = "module",
        weight_step: WeightStepRule = "gradient",
    ) -> None:
        super().__init__()
        self.weight_step = checked_weight_step(weight_step)
        if tau is not None:
            check_tau(tau)
        if not 0 < min_tau <= (min_tau if tau is None else tau) <= max_tau < math.inf:
            raise InputError(f"min_tau, tau and max_tau must rise from above 0, got {min_tau!r}, {tau!r}, {max_tau!r}")
        for name, value in (("epsilon", epsilon), ("weight_decay", weight_decay), ("warmup_steps", warmup_steps)):
            if isinstance(value, bool) or not isinstance(value, (int, float)) or not 0 <= value < math.inf:
                raise InputError(f"{name} must be a finite number of at least 0, got {value!r}")
        for name, rate in (("lr", lr), ("tau_lr", lr if tau_lr is None else tau_lr), ("adam_epsilon", adam_epsilon)):
            if not rate > 0:
                raise InputError(f"{name} must be above 0, got {rate!r}")
        for name, beta in (("beta1", beta1), ("beta2", beta2)):
            if not 0 <= beta < 1:
                raise InputError(f"{name} must be in [0, 1), got {beta!r}")
        if chunk is not None and (isinstance(chunk, bool) or not isinstance(chunk, int) or chunk < 1):
            raise InputError(f"chunk must be a positive integer or null, got {chunk!r}")
        architecture = read_architecture(architecture)
        self.save_hyperparameters()
        # The command line hands over its own: of a JSON file the name, which means nothing once the file is gone.
        self.hparams["architecture"] = architecture
        self.model = build_model(architecture, pretrained)
        if tau is None:
            tau = _start_of_tau(self.model, pretrained, min_tau, max_tau)
        self.tau = nn.Parameter(torch.tensor(float(tau)), requires_grad=learn_tau)
        self.min_tau, self.max_tau = min_tau, max_tau
        self.rho = rho
        self.epsilon = epsilon
        self.lr = lr
        self.tau_lr = lr if tau_lr is None else tau_lr
        self.weight_decay = weight_decay
        self.betas = (beta1, beta2)
        self.adam_epsilon = adam_epsilon
        self.warmup_steps = warmup_steps
        self.chunk = chunk
        # The model's own temperature is not trained: it follows τ, so that the model can leave the task at any time.
        self.model.logit_scale.requires_grad_(False)
        if getattr(self.model, "logit_bias", None) is not None:
            # A bias of all logits, for sigmoid losses, drops out of the scores: it has no gradient, for which several
            # processes would wait.
            self.model.logit_bias.requires_grad_(False)
        self._follow_tau()
        if grad_checkpointing:
            self.model.set_grad_checkpointing()
        if lock_image:
            self.model.lock_image_tower()
        if lock_text:
            self.model.lock_text_tower()
        self.add_dual(_IMAGE, num_anchors, dual, placement=dual_placement)
        self.add_dual(_TEXT, num_anchors, copy.deepcopy(dual), placement=dual_placement)
        self.skipped_batches = 0
        self.recalls = nn.ModuleDict({stage: RetrievalRecall() for stage in ("val", "test")})

    def forward(self, images: Tensor, texts: Tensor) -> tuple[Tensor, Tensor]:
        """Normalised embeddings, shape ``(B, D)`` each, of images ``(B, 3, H, W)`` and token ids ``(B, T)``."""
        if len(images) == 0:
            # open_clip cannot reshape a batch without a row, which a process has where there are fewer than processes.
            image, text = self(images.new_zeros(1, *images.shape[1:]), texts.new_zeros(1, *texts.shape[1:]))
            return image[:0], text[:0]
        return self.model.encode_image(images, normalize=True), self.model.encode_text(texts, normalize=True)

    # ---------------------------------------------------------------- loss

    @outside_graphs
    def contrastive_risk(self, image: Tensor, text: Tensor, index: Tensor) -> Tensor:
        """The loss of a batch of embeddings; in training ν at ``index`` is updated first.

        Args:
            image: normalised embeddings, shape ``(B, D)``.
            text: those of their texts, shape ``(B, D)``.
            index: dataset indices of the pairs, shape ``(B,)``.

        Returns:
            A scalar; in a distributed run this process's share, of which the mean over processes is the whole.

        Raises:
            TypeError, ValueError, IndexError: an index that does not fit; nothing is written.
            DualDivergenceError: something is not finite in training; nothing is written.
            InputError: there is but one pair, or there are not as many images as texts; or the table was loaded from a
                checkpoint of another size.
        """
        if image.shape != text.shape:
            raise InputError(
                f"images and texts must be pairs: got embeddings of shapes {tuple(image.shape)} and {tuple(text.shape)}"
            )
        duals = [cast(DualVariable, self.duals[name]) for name in (_IMAGE, _TEXT)]
        many = exchange.distributed()
        check: Callable[..., Tensor] = duals[0].check_index
        rows = exchange.checked(check, index, len(image)) if many else check(index, len(image))
        everyone = None
        if many:
            images, start = exchange.gather_with_gradient(image)
            everyone = Everyone(images, exchange.gather_with_gradient(text)[0], start, exchange.processes())
        if not duals[0].takes_exponentials:
            return self._risk_from_scores(image, text, index, everyone)
        tau = self.tau
        means = contrastive_log_means(image, text, tau, self.epsilon, everyone, self.chunk)
        if not self.updates_duals():
            nu = [dual.read(rows, log_mean) for dual, log_mean in zip(duals, (means.image, means.text), strict=True)]
            return contrastive_loss(image, text, tau, means, nu[0], nu[1], self.rho, self.epsilon, everyone)[0]
        progress = self.dual_progress()
        for dual in duals:
            dual.check_trainable()
        with torch.no_grad():
            steps = [
                dual.propose(rows, log_mean, means.negatives, progress)
                for dual, log_mean in zip(duals, (means.image, means.text), strict=True)
            ]
        loss, *objectives = contrastive_loss(
            image, text, tau, means, steps[0].nu, steps[1].nu, self.rho, self.epsilon, everyone
        )
        verify_together(list(zip(duals, steps, objectives, strict=True)), loss)
        for dual, step in zip(duals, steps, strict=True):
            dual.write(step)
        return loss

    def _risk_from_scores(self, image: Tensor, text: Tensor, index: Tensor, everyone: Everyone | None) -> Tensor:
        """The plain way, for an update that needs the scores themselves."""
        *scores, mask = contrastive_scores(image, text, self.tau, everyone)
        duals = [cast(DualVariable, self.duals[name]) for name in (_IMAGE, _TEXT)]
        if not self.updates_duals():
            risks = [dual.evaluate(side, index, mask) for dual, side in zip(duals, scores, strict=True)]
            return self.tau * (risks[0] + risks[1] + 2 * self.rho)
        progress = self.dual_progress()
        prepared = [dual.prepare(side, index, mask, progress) for dual, side in zip(duals, scores, strict=True)]
        for dual, (_, evidence) in zip(duals, prepared, strict=True):
            dual.verify(*evidence)
        for dual, (_, evidence) in zip(duals, prepared, strict=True):
            dual.write(evidence[0])
        return self.tau * (prepared[0][0] + prepared[1][0] + 2 * self.rho)

    # ---------------------------------------------------------------- steps

    def training_step(self, batch: Batch, batch_idx: int) -> Tensor | None:
        """Update ν of the batch's pairs and return the loss; None for a batch with fewer than two pairs."""
        images, texts, index = three_parts(batch, "images, texts")
        if not exchange.distributed() and len(index) < 2:
            self.skipped_batches += 1
            if self.skipped_batches == 1:
                rank_zero_warn(
                    f"a batch of {len(index)} pair(s) has no negatives and is skipped; further ones are counted in "
                    "skipped_batches"
                )
            return None
        image, text = self(images, texts)
        loss = self.contrastive_risk(image, text, index)
        if self.log_loss(loss):
            self.log("train/tau", self.tau.detach())
        return loss

    def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
        """Keep τ in its range; the model's own temperature follows it."""
        if self.tau.requires_grad:
            self.tau.data.clamp_(self.min_tau, self.max_tau)
            self._follow_tau()

    def _follow_tau(self) -> None:
        self.model.logit_scale.data.copy_(-self.tau.data.log())

    def _evaluate(self, stage: str, batch: Batch) -> dict[str, Tensor]:
        images, texts, index = three_parts(batch, "images, texts")
        image, text = self(images, texts)
        cast(RetrievalRecall, self.recalls[stage]).update(image, text, text_group(texts), index)
        return {"index": index, "image": image, "text": text}

    def _log_recall(self, stage: str) -> None:
        metric = cast(RetrievalRecall, self.recalls[stage])
        for name, value in metric.compute().items():
            self.log(f"{stage}/{name}", value, prog_bar=name.endswith("R@1"))
        metric.reset()

    def validation_step(self, batch: Batch, batch_idx: int) -> dict[str, Tensor]:
        """Embed the batch; recall is logged at the end.

        Returns:
            ``index``, ``image`` and ``text`` embeddings of each pair, for callbacks.
        """
        return self._evaluate("val", batch)

    def on_validation_epoch_end(self) -> None:
        """Recall among all pairs."""
        self._log_recall("val")

    def test_step(self, batch: Batch, batch_idx: int) -> dict[str, Tensor]:
        """Embed the batch; returns what the validation step does."""
        return self._evaluate("test", batch)

    def on_test_epoch_end(self) -> None:
        """Recall among all pairs."""
        self._log_recall("test")

    def predict_step(self, batch: Batch, batch_idx: int) -> dict[str, Tensor]:
        """Embed a batch.

        Returns:
            ``index``, shape ``(B,)``; ``image`` and ``text``, normalised embeddings, shape ``(B, D)`` each.
        """
        images, texts, index = batch
        image, text = self(images, texts)
        return {"index": index, "image": image, "text": text}

    # ---------------------------------------------------------------- optimiser

    def configure_optimizers(self) -> Any:
        """AdamW with open_clip's exclusions from weight decay and a learning rate of its own for τ."""
        plain: list[Tensor] = []
        decayed: list[Tensor] = []
        for name, parameter in self.model.named_parameters():
            if parameter.requires_grad:
                gain_or_bias = parameter.ndim < 2 or any(part in name for part in ("bn", "ln", "bias", "logit_scale"))
                (plain if gain_or_bias else decayed).append(parameter)
        groups: list[dict[str, Any]] = [
            {"params": plain, "weight_decay": 0.0},
            {"params": decayed, "weight_decay": self.weight_decay},
        ]
        if self.tau.requires_grad:
            groups.append({"params": [self.tau], "lr": self.tau_lr, "weight_decay": 0.0})
        groups = [group for group in groups if group["params"]]
        check_trains(groups, "set lock_image or lock_text to false, or learn_tau to true")
        optimizer = torch.optim.AdamW(groups, lr=self.lr, betas=self.betas, eps=self.adam_epsilon)
        warmup = self.warmup_steps
        share = min(warmup / run_length(self.trainer, "the cosine of the learning rate"), 1.0)

        def factor(progress: float, step: int) -> float:
            if step < warmup:
                return (step + 1) / warmup
            return cosine(max(progress - share, 0.0) / max(1.0 - share, 1e-9))

        scheduler = ProgressLR(optimizer, factor, self.trainer)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": scheduler, "interval": "step"}}


def _start_of_tau(model: Any, pretrained: str | None, min_tau: float, max_tau: float) -> float:
    """The temperature that pretrained weights were trained to, in the range allowed; or what CLIP starts from."""
    tau = 0.07 if pretrained is None else math.exp(-float(model.logit_scale))
    allowed = min(max(tau, min_tau), max_tau)
    if not math.isclose(tau, allowed, rel_tol=1e-4):
        what = "the default" if pretrained is None else f"that of {pretrained}"
        rank_zero_warn(f"tau starts at {allowed:.4g}, the nearest to {what} ({tau:.4g}) from min_tau to max_tau")
    return allowed


def text_group(tokens: Tensor) -> Tensor:
    """A number for each text, equal for equal ones: shape ``(B,)``, int64, of tokens ``(B, T)``."""
    generator = torch.Generator().manual_seed(0)
    # A linear hash modulo 2^64 with random coefficients: any two texts of a million collide with probability 1e-7.
    least, most = torch.iinfo(torch.int64).min, torch.iinfo(torch.int64).max
    coefficients = torch.randint(least, most, (tokens.shape[1],), generator=generator)
    return (tokens.to(torch.int64) * coefficients.to(tokens.device)).sum(dim=1)


def read_architecture(architecture: str | dict[str, Any]) -> str | dict[str, Any]:
    """A name of open_clip's as it is; a configuration file as its content.

    Raises:
        InputError: a file that is missing or no configuration, or a name that open_clip does not know.
    """
    if isinstance(architecture, dict):
        config = architecture
    elif architecture.endswith(".json"):
        try:
            config = json.loads(Path(architecture).read_text(encoding="utf-8-sig"))
        except (OSError, ValueError) as error:
            raise InputError(f"architecture {architecture} cannot be read as JSON: {error}") from error
    else:
        if architecture not in (known := of_vision("open_clip", "CLIPTask").list_models()):
            near = difflib.get_close_matches(architecture, known, n=5, cutoff=0.4) or known[:5]
            raise InputError(f"architecture {architecture!r} is not known to open_clip; near are {', '.join(near)}")
        return architecture
    lacking = [
        key for key in ("embed_dim", "vision_cfg", "text_cfg") if not isinstance(config, dict) or key not in config
    ]
    if lacking:
        raise InputError(f"architecture must have embed_dim, vision_cfg and text_cfg, it lacks {', '.join(lacking)}")
    return dict(config)


def build_model(architecture: str | dict[str, Any], pretrained: str | None) -> Any:
    """The model of open_clip.

    Raises:
        InputError: the configuration does not make a model, or the weights cannot be loaded.
    """
    open_clip = of_vision("open_clip", "CLIPTask")
    file = Path(pretrained or "")
    if file.is_file() and file.suffix not in (".safetensors", ".npz", ".npy"):
        read_plain(file, f"pretrained {pretrained}", mmap=True)  # says what is wrong with it, if something is
    logging.getLogger().disabled, before = True, logging.getLogger().disabled
    try:
        if isinstance(architecture, str):
            try:
                return open_clip.create_model(architecture, pretrained=pretrained)
            except (RuntimeError, OSError, ValueError) as error:
                raise InputError(_weights_message(open_clip, architecture, pretrained, error)) from error
        config = copy.deepcopy(architecture)
        custom = config.pop("custom_text", False) or "hf_model_name" in config["text_cfg"]
        try:
            model = (open_clip.CustomTextCLIP if custom else open_clip.CLIP)(**config)
        except (TypeError, ValueError, AssertionError, RuntimeError) as error:
            raise InputError(f"architecture makes no model of open_clip: {error}") from error
        if pretrained is not None:
            if not Path(pretrained).is_file():
                raise InputError(f"pretrained {pretrained} must be a file where the architecture is a configuration")
            try:
                open_clip.load_checkpoint(model, pretrained, weights_only=True)
            except Exception as error:
                raise InputError(f"pretrained {pretrained} does not fit the architecture: {_first(error)}") from error
        return model
    finally:
        logging.getLogger().disabled = before


def _weights_message(open_clip: Any, architecture: str, pretrained: str | None, error: Exception) -> str:
    if pretrained is None:
        return f"architecture {architecture!r} cannot be built: {_first(error)}"
    tags = open_clip.list_pretrained_tags_by_model(architecture)
    if Path(pretrained).is_file():
        return f"pretrained {pretrained} does not fit architecture {architecture!r}: {_first(error)}"
    if pretrained in tags:
        return f"pretrained {pretrained!r} could not be downloaded for {architecture!r}: {_first(error)}"
    return f"pretrained {pretrained!r} is no file and no tag of {architecture!r}; tags are {', '.join(tags) or 'none'}"


def _first(error: Exception) -> str:
    return str(error).strip().splitlines()[0].rstrip(".:") if str(error).strip() else type(error).__name__
