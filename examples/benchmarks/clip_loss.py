"""The contrastive loss with the SCENT update against open_clip's ClipLoss: forward and backward, time and memory.

The same normalised embeddings of 512 numbers, a learned temperature, two threads, both in turn in one run; ours moves
two tables of 1,000,000 anchors. The time is the median over turns. The memory is the largest resident size during a
step less that before it, in a process of its own (Linux). "chunked" is ours at 16,384 pairs with 256 rows of the matrix
of pairs at a time. With a GPU also 8,192 and 32,768 pairs in bfloat16, ours as it is and fused, 131,072 fused, and how
far the gradients of 4,096 are from those in float64.

The last line is JSON: {"time_ratio": {"1024": …, "4096": …}, "memory_ratio": {…}, "chunked_extra_mb": …}, with a GPU
also the "cuda …" ratios of both, and "gradient_error" of each loss.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
import warnings
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch
from fresh_process import in_a_process
from torch import Tensor

from scent_lightning.duals import SCENT, ContrastiveSamples, DualVariableMixin
from scent_lightning.functional import contrastive_log_means, contrastive_loss

FEATURES, ANCHORS, LOG_ALPHA, EPSILON, RHO = 512, 1_000_000, 10.0, 1e-6, 11.0
Step = Callable[[], None]


def embeddings(count: int, device: str, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(0)
    image = torch.randn(count, FEATURES, generator=generator)
    text = image + 2 * torch.randn(count, FEATURES, generator=generator)
    found = [torch.nn.functional.normalize(rows, dim=1).to(device, dtype).requires_grad_() for rows in (image, text)]
    return found[0], found[1]


def ours(
    count: int,
    device: str = "cpu",
    dtype: torch.dtype = torch.float32,
    chunk: int | None = None,
    fused: bool = False,
) -> Step:
    image, text = embeddings(count, device, dtype)
    tau = torch.tensor(0.07, device=device, requires_grad=True)
    module = DualVariableMixin()
    for name in ("image", "text"):
        module.add_dual(name, ANCHORS, SCENT(LOG_ALPHA))
    module.to(device)
    index = torch.randperm(ANCHORS, generator=torch.Generator().manual_seed(1))[:count].to(device)

    def step() -> None:
        samples = ContrastiveSamples(image, text, tau, RHO, EPSILON, chunk, fused=fused)
        loss = module.entropic_risk(("image", "text"), samples, index)
        image.grad = text.grad = tau.grad = None
        loss.backward()  # type: ignore[no-untyped-call]

    return step


def theirs(count: int, device: str = "cpu", dtype: torch.dtype = torch.float32) -> Step:
    from open_clip.loss import ClipLoss

    image, text = embeddings(count, device, dtype)
    scale = torch.tensor(1 / 0.07, device=device, dtype=dtype, requires_grad=True)
    loss_of = ClipLoss()

    def step() -> None:
        image.grad = text.grad = scale.grad = None
        loss_of(image, text, scale).backward()

    return step


def milliseconds(step: Step, steps: int, device: str = "cpu") -> list[float]:
    times = []
    for _ in range(steps):
        if device != "cpu":
            torch.cuda.synchronize()
        start = time.perf_counter()
        step()
        if device != "cpu":
            torch.cuda.synchronize()
        times.append(1e3 * (time.perf_counter() - start))
    return times


def in_turns(steps: dict[str, Step], turns: int, each: int, device: str) -> dict[str, float]:
    """Median milliseconds of each, in turns."""
    times: dict[str, list[float]] = {name: [] for name in steps}
    for step in steps.values():
        milliseconds(step, 2, device)
    for _ in range(turns):
        for name, step in steps.items():
            times[name] += milliseconds(step, each, device)
    return {name: statistics.median(found) for name, found in times.items()}


def time_ratio(count: int, turns: int, steps: int) -> float:
    found = in_turns({"ours": ours(count), "theirs": theirs(count)}, turns, steps, "cpu")
    ratio = found["ours"] / found["theirs"]
    print(f"{count:>6,} pairs: ours {found['ours']:8.1f} ms, ClipLoss {found['theirs']:8.1f} ms, ratio {ratio:.2f}")
    return round(ratio, 3)


def on_a_gpu(count: int, turns: int) -> tuple[dict[str, float], dict[str, float]]:
    """Time and peak memory of ours, fused or not, over those of ClipLoss, embeddings in bfloat16."""
    steps = {"ours": ours(count, "cuda", torch.bfloat16), "fused": ours(count, "cuda", torch.bfloat16, fused=True)}
    steps["ClipLoss"] = theirs(count, "cuda", torch.bfloat16)
    times = in_turns(steps, turns, 5, "cuda")
    memory = {}
    for name, step in steps.items():
        before = torch.cuda.memory_allocated()
        torch.cuda.reset_peak_memory_stats()
        step()
        memory[name] = (torch.cuda.max_memory_allocated() - before) / 2**20
    for name in steps:
        print(f"{count:>7,} pairs, bfloat16 on a GPU: {name:>8} {times[name]:8.2f} ms, {memory[name]:8.0f} MB")

    def over_theirs(found: dict[str, float]) -> dict[str, float]:
        shown = {f"cuda {count}": "ours", f"cuda {count} fused": "fused"}
        return {key: round(found[name] / found["ClipLoss"], 3) for key, name in shown.items()}

    return over_theirs(times), over_theirs(memory)


def gradient_errors(count: int, device: str) -> dict[str, float]:
    """Largest error of the gradient in bfloat16, of images, texts and temperature, relative to its norm in float64."""
    from open_clip.loss import ClipLoss

    def ours_of(image: Tensor, text: Tensor, tau: Tensor, fused: bool) -> Tensor:
        means = contrastive_log_means(image, text, tau, EPSILON, fused=fused)
        return contrastive_loss(image, text, tau, means, means.image - 0.1, means.text + 0.1, RHO, EPSILON)[0]

    def theirs_of(image: Tensor, text: Tensor, tau: Tensor) -> Tensor:
        loss: Tensor = ClipLoss()(image, text, 1 / tau)
        return loss

    losses: dict[str, tuple[Callable[..., Tensor], Callable[..., Tensor]]] = {
        "ours": (partial(ours_of, fused=False), partial(ours_of, fused=False)),
        "fused": (partial(ours_of, fused=True), partial(ours_of, fused=False)),
        "ClipLoss": (theirs_of, theirs_of),
    }
    given = (*embeddings(count, device, torch.bfloat16), torch.tensor(0.07, device=device, requires_grad=True))
    found = {}
    for name, (loss, in_float64) in losses.items():
        exact = [value.detach().double().requires_grad_() for value in given]
        kinds = given if name != "ClipLoss" else (*given[:2], given[2].detach().bfloat16().requires_grad_())
        errors = [
            ((mine.double() - right).norm() / right.norm()).item()
            for mine, right in zip(
                torch.autograd.grad(loss(*kinds), kinds), torch.autograd.grad(in_float64(*exact), exact), strict=True
            )
        ]
        print(
            f"{name:>8}: error of the gradient {errors[0]:.1e}, {errors[1]:.1e}, of the temperature's {errors[2]:.1e}"
        )
        found[name] = float(f"{max(errors[:2]):.2e}")
    return found


def resident_mb(field: str) -> float:
    """Resident memory of this process: "VmRSS" now, "VmHWM" at most since the mark was reset."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith(field)) / 1024


def extra_mb(which: str, count: int, chunk: int | None) -> float:
    """Peak memory of a step beyond what was there before, in MB, in this process."""
    make = {"ours": ours, "theirs": theirs}[which]
    make(64)()  # what libraries set up at their first use
    step = ours(count, chunk=chunk) if which == "ours" else theirs(count)
    Path("/proc/self/clear_refs").write_text("5")
    before = resident_mb("VmRSS")
    step()
    return resident_mb("VmHWM") - before


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--pairs", type=int, nargs="+", default=[1024, 4096], help="sizes of a batch (1024 4096)")
    parser.add_argument("--turns", type=int, default=5, help="turns of each kind (5)")
    parser.add_argument("--chunked-pairs", type=int, default=16_384, help="pairs of the chunked measurement (16384)")
    arguments = parser.parse_args()
    warnings.simplefilter("ignore")
    torch.set_num_threads(2)
    print(__doc__)
    times: dict[str, float] = {}
    memory: dict[str, float] = {}
    for count in arguments.pairs:
        mine, other = (in_a_process(extra_mb, which, count, None) for which in ("ours", "theirs"))
        print(f"{count:>6,} pairs: ours {mine:.0f} MB beyond the embeddings, ClipLoss {other:.0f} MB")
        memory[str(count)] = round(mine / max(other, 0.1), 3)
    chunked = in_a_process(extra_mb, "ours", arguments.chunked_pairs, 256)
    print(f"{arguments.chunked_pairs:>6,} pairs, 256 rows at a time: {chunked:.0f} MB")
    for count in arguments.pairs:
        times[str(count)] = time_ratio(count, arguments.turns, max(1, 8192 // count))
    figures: dict[str, Any] = {"time_ratio": times, "memory_ratio": memory, "chunked_extra_mb": round(chunked)}
    if torch.cuda.is_available():
        for count in (8192, 32_768):
            for ratios, found in zip((times, memory), on_a_gpu(count, arguments.turns), strict=True):
                ratios |= found
        many = ours(131_072, "cuda", torch.bfloat16, fused=True)
        milliseconds(many, 1, "cuda")
        print(f"131,072 pairs, fused: {statistics.median(milliseconds(many, 3, 'cuda')):.0f} ms")
        figures["gradient_error"] = gradient_errors(4096, "cuda")
    print(json.dumps(figures))


if __name__ == "__main__":
    main()
