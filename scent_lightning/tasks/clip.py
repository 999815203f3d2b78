"""Contrastive training of image and text towers."""

from __future__ import annotations

import copy
import math
from typing import Any, Literal, cast, get_args

import torch
from lightning.pytorch.utilities import rank_zero_warn
from torch import Tensor, nn
from torch.optim import Optimizer

from scent_lightning import distributed
from scent_lightning.compiling import outside_graphs
from scent_lightning.duals import ContrastiveSamples, DualUpdate
from scent_lightning.duals.table import Placement
from scent_lightning.duals.weight_step import WeightStepRule
from scent_lightning.errors import InputError
from scent_lightning.metrics import RetrievalRecall
from scent_lightning.modules.open_clip_model import build_model, read_architecture
from scent_lightning.progress import ProgressLR, cosine, run_length
from scent_lightning.tasks.base import BaseTask
from scent_lightning.tasks.batches import three_parts
from scent_lightning.validation import checked_choice, checked_integer, checked_number

__all__ = ["CLIPTask"]

Batch = tuple[Tensor, Tensor, Tensor]
TauSchedule = Literal["cosine", "constant", "step_thresh"]
_IMAGE, _TEXT = "image", "text"


class CLIPTask(BaseTask):
    r"""CLIP by the robust global contrastive loss, with a dual variable for every image and every text.

    .. math:: \min_{w, \tau} \frac{\tau}{n} \sum_i \sum_{k = 1, 2}
              \log\Bigl(\epsilon + \operatorname{mean}_{j \neq i} e^{S^k_{ij}}\Bigr) + 2 \tau \rho

    with the scores of :mod:`scent_lightning.functional.contrastive` (Wei et al. 2026, CLIP training). ``--dual BSGD``
    is the mini-batch loss of OpenCLIP (over j ≠ i), ``SOX`` is FastCLIP, ``SCENT`` is the paper's. The model is
    open_clip's own, and goes back to it: ``scent-lightning export``.

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
        pretrained: weights to start from: a tag of open_clip's (downloaded) or a file; None: random ones.
        tau: temperature τ, above 0; where it starts if it is learned. None takes that of the pretrained weights, in the
            range of the two below, or 0.07 without any.
        learn_tau: learn τ, one for all pairs.
        min_tau: smallest τ that is allowed to be learned, above 0.
        max_tau: largest τ that is allowed to be learned, above ``min_tau``.
        rho: ρ, what a high temperature costs, at least 0; of use only with ``learn_tau``.
        epsilon: ε inside the logarithm, at least 0. ``SoftplusASGD`` does without.
        lr: learning rate of AdamW, above 0.
        tau_lr: learning rate of τ; None takes ``lr``.
        tau_lr_schedule: "cosine" is that of the other parameters; "constant"; or "step_thresh": constant, but
            ``tau_lr_factor`` times that while τ is at most ``tau_threshold`` (FastCLIP, Wei et al. 2024). The last two
            have no warm-up. They follow τ, and so does a run that is resumed.
        tau_threshold: τ at which "step_thresh" lowers the rate, from ``min_tau`` to ``max_tau``.
        tau_lr_factor: what it multiplies the rate by, above 0 and at most 1.
        weight_decay: of AdamW, at least 0; not on gains, biases and τ.
        beta1: AdamW's first coefficient, in [0, 1).
        beta2: AdamW's second coefficient, in [0, 1).
        adam_epsilon: AdamW's ε in the denominator, above 0.
        warmup_steps: steps over which the learning rates rise linearly from 0; then they fall to 0 by a cosine. That of
            τ has its own schedule.
        chunk: rows of the matrix of all pairs that exist at a time; None for all, which is faster.
        fused_loss: make the matrix of all pairs tile by tile in Triton kernels, and keep none of it: for a GPU, without
            ``chunk``.
        grad_checkpointing: trade time for memory in both towers.
        lock_image: freeze the image tower (open_clip's "locked-image tuning").
        lock_text: freeze the text tower.
        dual_placement: "module" keeps the tables of ν on the module's device, "cpu" in main memory.
        weight_step: "gradient", or "proximal" for an optimiser that is SGD; AdamW's gradients are left alone by both.

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

    way_to_train = "set lock_image or lock_text to false, or learn_tau to true"

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
        tau_lr_schedule: TauSchedule = "cosine",
        tau_threshold: float = 0.03,
        tau_lr_factor: float = 1 / 3,
        fused_loss: bool = False,
    ) -> None:
        super().__init__(lr, weight_decay=weight_decay, weight_step=weight_step)
        if tau is not None:
            checked_number("tau", tau, above=0)
        if not 0 < min_tau <= (min_tau if tau is None else tau) <= max_tau < math.inf:
            raise InputError(f"min_tau, tau and max_tau must rise from above 0, got {min_tau!r}, {tau!r}, {max_tau!r}")
        checked_number("epsilon", epsilon, least=0)
        checked_number("warmup_steps", warmup_steps, least=0)
        checked_number("tau_lr", tau_lr, above=0, or_none=True)
        checked_choice("tau_lr_schedule", tau_lr_schedule, get_args(TauSchedule))
        checked_number("tau_lr_factor", tau_lr_factor, above=0, most=1)
        if tau_lr_schedule == "step_thresh":
            hint = ": it must lie between min_tau and max_tau"
            checked_number("tau_threshold", tau_threshold, least=min_tau, most=max_tau, hint=hint)
        checked_number("adam_epsilon", adam_epsilon, above=0)
        self.betas = (
            checked_number("beta1", beta1, least=0, below=1),
            checked_number("beta2", beta2, least=0, below=1),
        )
        self.chunk: int | None = checked_integer("chunk", chunk, or_none=True)
        if fused_loss and chunk is not None:
            raise InputError(f"fused_loss keeps no rows of the matrix of pairs: leave chunk out, got {chunk}")
        self.fused_loss = fused_loss
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
        self.tau_lr = lr if tau_lr is None else tau_lr
        self.tau_lr_schedule, self.tau_threshold, self.tau_lr_factor = tau_lr_schedule, tau_threshold, tau_lr_factor
        self.adam_epsilon = adam_epsilon
        self.warmup_steps = warmup_steps
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
        self.main_metric = ("val/image_to_text_R@1", "max")

    def forward(self, images: Tensor, texts: Tensor) -> tuple[Tensor, Tensor]:
        """Normalised embeddings, shape ``(B, D)`` each, of images ``(B, 3, H, W)`` and token ids ``(B, T)``."""
        if len(images) == 0:
            # open_clip cannot reshape a batch without a row, which a process has where there are fewer than processes.
            image, text = self(images.new_zeros(1, *images.shape[1:]), texts.new_zeros(1, *texts.shape[1:]))
            return image[:0], text[:0]
        return self.model.encode_image(images, normalize=True), self.model.encode_text(texts, normalize=True)

    # ---------------------------------------------------------------- loss

    @outside_graphs
    def contrastive_risk(
        self,
        image: Tensor,
        text: Tensor,
        index: Tensor,
        previous: ContrastiveSamples | None = None,
        group: Tensor | None = None,
    ) -> Tensor:
        """The loss of a batch of embeddings; in training ν at ``index`` is updated first.

        Args:
            image: normalised embeddings, shape ``(B, D)``.
            text: those of their texts, shape ``(B, D)``.
            index: dataset indices of the pairs, shape ``(B,)``.
            previous: the pairs at the weights before the last optimiser step, for a dual update that needs them.
            group: number of each pair's group, shape ``(B,)``: those of one are not compared with each other.

        Returns:
            A scalar; in a distributed run this process's share, of which the mean over processes is the whole.

        Raises:
            TypeError, ValueError, IndexError: an index that does not fit; nothing is written.
            DualDivergenceError: something is not finite in training; nothing is written.
            InputError: there is but one pair, or there are not as many images as texts; or the table was loaded from a
                checkpoint of another size.
        """
        samples = self._samples(image, text, self.tau, group)
        return self.entropic_risk((_IMAGE, _TEXT), samples, index, previous_scores=previous)

    def _samples(self, image: Tensor, text: Tensor, tau: Tensor, group: Tensor | None) -> ContrastiveSamples:
        return ContrastiveSamples(image, text, tau, self.rho, self.epsilon, self.chunk, group, self.fused_loss)

    # ---------------------------------------------------------------- steps

    def training_step(self, batch: Batch, batch_idx: int) -> Tensor | None:
        """Update ν of the batch's pairs and return the loss; None for a batch with fewer than two pairs."""
        images, texts, group, index = _parts(batch)
        if not distributed.is_distributed() and len(index) < 2:
            self.skipped_batches += 1
            if self.skipped_batches == 1:
                rank_zero_warn(
                    f"a batch of {len(index)} pair(s) has no negatives and is skipped; further ones are counted in "
                    "skipped_batches"
                )
            return None
        previous = self.at_previous_weights(lambda: self._detached_samples(images, texts, group))
        image, text = self(images, texts)
        loss = self.contrastive_risk(image, text, index, previous, group)
        if self.log_loss(loss):
            self.log("train/tau", self.tau.detach())
        return loss

    def _detached_samples(self, images: Tensor, texts: Tensor, group: Tensor | None) -> ContrastiveSamples:
        """The samples of a batch, with a temperature that stays when τ moves."""
        image, text = self(images, texts)
        return self._samples(image, text, self.tau.clone(), group)

    def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
        """Keep τ in its range; the model's own temperature follows it."""
        if self.tau.requires_grad:
            self.tau.data.clamp_(self.min_tau, self.max_tau)
            self._follow_tau()

    def on_train_end(self) -> None:
        """Where the weights are averaged, the average of τ is not what its logarithms average to."""
        super().on_train_end()
        self._follow_tau()

    def on_save_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        """Likewise in a checkpoint."""
        super().on_save_checkpoint(checkpoint)
        state = checkpoint["state_dict"]
        if "tau" in state:
            state["model.logit_scale"] = -state["tau"].log()

    def _follow_tau(self) -> None:
        self.model.logit_scale.data.copy_(-self.tau.data.log())

    def evaluation_step(self, stage: str, batch: Batch) -> dict[str, Tensor]:
        """Embed the batch; recall is logged at the end.

        Returns:
            ``index``, ``image`` and ``text`` embeddings and ``group`` of each pair, for callbacks: those of one group,
            which is that of the data or one for each text, are right for each other.
        """
        images, texts, group, index = _parts(batch)
        image, text = self(images, texts)
        group = text_group(texts) if group is None else group
        cast(RetrievalRecall, self.recalls[stage]).update(image, text, group, index)
        return {"index": index, "image": image, "text": text, "group": group}

    def _log_recall(self, stage: str) -> None:
        metric = cast(RetrievalRecall, self.recalls[stage])
        for name, value in metric.compute().items():
            self.log(f"{stage}/{name}", value, prog_bar=name.endswith("R@1"))
        metric.reset()

    def on_validation_epoch_end(self) -> None:
        """Recall among all pairs."""
        self._log_recall("val")

    def on_test_epoch_end(self) -> None:
        """Recall among all pairs."""
        self._log_recall("test")

    def predict_step(self, batch: Batch, batch_idx: int) -> dict[str, Tensor]:
        """Embed a batch.

        Returns:
            ``index``, shape ``(B,)``; ``image`` and ``text``, normalised embeddings, shape ``(B, D)`` each.
        """
        images, texts, _, index = _parts(batch)
        image, text = self(images, texts)
        return {"index": index, "image": image, "text": text}

    # ---------------------------------------------------------------- optimiser

    def trained_parameters(self) -> list[Any]:
        """In groups, with open_clip's exclusions from weight decay and a learning rate of its own for τ.

        Each has a name, by which Lightning's ``LearningRateMonitor`` logs its rate: ``lr-AdamW/tau``.
        """
        plain: list[Tensor] = []
        decayed: list[Tensor] = []
        for name, parameter in self.model.named_parameters():
            if parameter.requires_grad:
                gain_or_bias = parameter.ndim < 2 or any(part in name for part in ("bn", "ln", "bias", "logit_scale"))
                (plain if gain_or_bias else decayed).append(parameter)
        groups: list[dict[str, Any]] = [
            {"name": "gains_and_biases", "params": plain, "weight_decay": 0.0},
            {"name": "weights", "params": decayed, "weight_decay": self.weight_decay},
        ]
        if self.tau.requires_grad:
            groups.append({"name": "tau", "params": [self.tau], "lr": self.tau_lr, "weight_decay": 0.0})
        return [group for group in groups if group["params"]]

    def configure_optimizer(self, parameters: list[Any]) -> Optimizer:
        """AdamW."""
        return torch.optim.AdamW(parameters, lr=self.lr, betas=self.betas, eps=self.adam_epsilon)

    def configure_schedule(self, optimizer: Optimizer) -> Any:
        """A linear rise of the learning rates over the warm-up, then a cosine to 0; τ's follows ``tau_lr_schedule``."""
        warmup = self.warmup_steps
        share = min(warmup / run_length(self.trainer, "the cosine of the learning rate"), 1.0)

        def factor(progress: float, step: int) -> float:
            if step < warmup:
                return (step + 1) / warmup
            return cosine(max(progress - share, 0.0) / max(1.0 - share, 1e-9))

        factors = [factor] * len(optimizer.param_groups)
        for place, group in enumerate(optimizer.param_groups):
            if self.tau_lr_schedule != "cosine" and any(parameter is self.tau for parameter in group["params"]):
                factors[place] = self._factor_of_tau
        return ProgressLR(optimizer, factors, self.trainer).each_step()

    def _factor_of_tau(self, progress: float, step: int) -> float:
        lowered = self.tau_lr_schedule == "step_thresh" and bool(self.tau <= self.tau_threshold)
        return self.tau_lr_factor if lowered else 1.0


def _start_of_tau(model: Any, pretrained: str | None, min_tau: float, max_tau: float) -> float:
    """The temperature that pretrained weights were trained to, in the range allowed; or what CLIP starts from."""
    tau = 0.07 if pretrained is None else math.exp(-float(model.logit_scale))
    allowed = min(max(tau, min_tau), max_tau)
    if not math.isclose(tau, allowed, rel_tol=1e-4):
        what = "the default" if pretrained is None else f"that of {pretrained}"
        rank_zero_warn(f"tau starts at {allowed:.4g}, the nearest to {what} ({tau:.4g}) from min_tau to max_tau")
    return allowed


def _parts(batch: Any) -> tuple[Tensor, Tensor, Tensor | None, Tensor]:
    """Images, texts, their groups where there are any, and the index."""
    if isinstance(batch, list | tuple) and len(batch) == 4:
        images, texts, group, index = batch
        return images, texts, group, index
    images, texts, index = three_parts(batch, "images, texts")
    return images, texts, None, index


def text_group(tokens: Tensor) -> Tensor:
    """A number for each text, equal for equal ones: shape ``(B,)``, int64, of tokens ``(B, T)``."""
    generator = torch.Generator().manual_seed(0)
    # A linear hash modulo 2^64 with random coefficients: any two texts of a million collide with probability 1e-7.
    least, most = torch.iinfo(torch.int64).min, torch.iinfo(torch.int64).max
    coefficients = torch.randint(least, most, (tokens.shape[1],), generator=generator)
    return (tokens.to(torch.int64) * coefficients.to(tokens.device)).sum(dim=1)
