"""The fused contrastive loss: its checks, where they can run, what it refuses, and that it compiles for a GPU."""

import os
import subprocess
import sys

import pytest
import torch

from scent_lightning.errors import InputError
from scent_lightning.functional import contrastive_log_means
from scent_lightning.functional.contrastive import fused
from tests.conftest import ROOT

triton = pytest.importorskip("triton", reason="Triton comes with torch for Linux")


@pytest.mark.slow
def test_checks():
    """In a process of its own: Triton decides at its import whether to interpret."""
    here = {} if torch.cuda.is_available() else {"TRITON_INTERPRET": "1"}
    done = subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "tests/functional/fused_checks.py"],
        cwd=ROOT,
        env={**os.environ, "PYTEST_ADDOPTS": "", **here},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stdout[-5000:]


@pytest.mark.parametrize(("dtype", "chunk", "message"), [
    (torch.float32, None, "the fused contrastive loss needs embeddings on a GPU, got cpu"),
    (torch.float64, None, "embeddings must be float32, bfloat16 or float16, got float64"),
    (torch.float32, 256, "the fused contrastive loss keeps no rows of the matrix of pairs: leave chunk out, got 256"),
])  # fmt: skip
def test_what_is_not_possible(dtype, chunk, message):
    embeddings = torch.eye(3, dtype=dtype)
    with pytest.raises(InputError, match=message):
        contrastive_log_means(embeddings, embeddings, 0.1, chunk=chunk, fused=True)


def test_without_triton(monkeypatch):
    monkeypatch.setitem(sys.modules, "triton", None)
    with pytest.raises(InputError, match="the fused contrastive loss needs triton; install it with pip install triton"):
        contrastive_log_means(torch.eye(3), torch.eye(3), 0.1, fused=True)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["log_sums", "weights"])
def test_compiles_for_a_gpu(name):
    """To machine code of Hopper, with its matrix instructions, by the compiler that Triton brings; no GPU is needed."""
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    from scent_lightning.functional.contrastive import kernels

    kernel = getattr(kernels, f"{name}_kernel")
    choices = {
        "GROUPS": True,
        "BOTH": True,
        "WIDEN": False,
        "ROWS": fused.ROWS,
        "ACROSS": fused.ACROSS,
        "DEPTH": fused.DEPTH_BYTES // 2,
        **({"TILES": fused.TILES} if name == "log_sums" else {}),
    }
    kinds = dict.fromkeys(choices, "constexpr")
    kinds |= dict.fromkeys(("count", "total", "width", "start"), "i32") | dict.fromkeys(("log2_e", "ln_2"), "fp32")
    kinds |= dict.fromkeys(("anchors", "others", "weights"), "*bf16")
    kinds |= dict.fromkeys(("anchor_group", "other_group"), "*i64")
    signature = {argument: kinds.get(argument, "*fp32") for argument in kernel.arg_names}
    # Addresses and sizes are multiples of 16, as those of embeddings of 512 numbers are.
    aligned = [i for i, kind in enumerate(signature.values()) if kind.startswith("*") or kind == "i32"]
    source = ASTSource(kernel, signature, choices, {(i,): [["tt.divisibility", 16]] for i in aligned})
    compiled = triton.compile(source, target=GPUTarget("cuda", 90, 32), options=dict(fused.LAUNCH))
    assert compiled.asm["cubin"]
    assert "wgmma.mma_async" in compiled.asm["ptx"]
    assert compiled.metadata.shared <= 227 * 1024
