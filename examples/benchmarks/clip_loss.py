"""The contrastive loss with the SCENT update against open_clip's ClipLoss: forward and backward, time and memory.

The same normalised embeddings of 512 numbers, a learned temperature, two threads, both in turn in one run; ours moves
two tables of 1,000,000 anchors. The time is the median over turns. The memory is the largest resident size during a
step less that before it, in a process of its own (Linux). "chunked" is ours at 16,384 pairs with 256 rows of the matrix
of pairs at a time. With a GPU also 8,192 and 32,768 pairs in bfloat16.

The last line is JSON: {"time_ratio": {"1024": …, "4096": …}, "memory_ratio": {…}, "chunked_extra_mb": …}.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
import warnings
from collections.abc import Callable
from pathlib import Path

import torch
from fresh_process import in_a_process
from torch import Tensor

from scent_lightning.duals import SCENT, ContrastiveSamples, DualVariableMixin

FEATURES, ANCHORS, LOG_ALPHA, EPSILON, RHO = 512, 1_000_000, 10.0, 1e-6, 11.0
Step = Callable[[], None]


def embeddings(count: int, device: str, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(0)
    image = torch.randn(count, FEATURES, generator=generator)
    text = image + 2 * torch.randn(count, FEATURES, generator=generator)
    found = [torch.nn.functional.normalize(rows, dim=1).to(device, dtype).requires_grad_() for rows in (image, text)]
    return found[0], found[1]


def ours(count: int, device: str = "cpu", dtype: torch.dtype = torch.float32, chunk: int | None = None) -> Step:
    image, text = embeddings(count, device, dtype)
    tau = torch.tensor(0.07, device=device, requires_grad=True)
    module = DualVariableMixin()
    for name in ("image", "text"):
        module.add_dual(name, ANCHORS, SCENT(LOG_ALPHA))
    module.to(device)
    index = torch.randperm(ANCHORS, generator=torch.Generator().manual_seed(1))[:count].to(device)

    def step() -> None:
        samples = ContrastiveSamples(image, text, tau, RHO, EPSILON, chunk)
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


def time_ratio(count: int, turns: int, steps: int, device: str = "cpu", dtype: torch.dtype = torch.float32) -> float:
    mine, other = ours(count, device, dtype), theirs(count, device, dtype)
    times: tuple[list[float], list[float]] = ([], [])
    for step in (mine, other):
        milliseconds(step, 2, device)
    for _ in range(turns):
        for step, found in zip((mine, other), times, strict=True):
            found += milliseconds(step, steps, device)
    ours_ms, theirs_ms = (statistics.median(found) for found in times)
    print(f"{count:>6,} pairs: ours {ours_ms:8.1f} ms, ClipLoss {theirs_ms:8.1f} ms, ratio {ours_ms / theirs_ms:.2f}")
    return round(ours_ms / theirs_ms, 3)


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
    times, memory = {}, {}
    for count in arguments.pairs:
        mine, other = (in_a_process(extra_mb, which, count, None) for which in ("ours", "theirs"))
        print(f"{count:>6,} pairs: ours {mine:.0f} MB beyond the embeddings, ClipLoss {other:.0f} MB")
        memory[str(count)] = round(mine / max(other, 0.1), 3)
    chunked = in_a_process(extra_mb, "ours", arguments.chunked_pairs, 256)
    print(f"{arguments.chunked_pairs:>6,} pairs, 256 rows at a time: {chunked:.0f} MB")
    for count in arguments.pairs:
        times[str(count)] = time_ratio(count, arguments.turns, max(1, 8192 // count))
    figures = {"time_ratio": times, "memory_ratio": memory, "chunked_extra_mb": round(chunked)}
    if torch.cuda.is_available():
        for count in (8192, 32_768):
            times[f"cuda {count}"] = time_ratio(count, arguments.turns, 5, "cuda", torch.bfloat16)
    print(json.dumps(figures))


if __name__ == "__main__":
    main()
