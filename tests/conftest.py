import gc
import os
from pathlib import Path

if "PYTEST_XDIST_WORKER" in os.environ:
    # One thread for each worker, and for what it starts: with more, the workers wait for each other.
    os.environ.setdefault("OMP_NUM_THREADS", "1")

if Path("/proc/cpuinfo").is_file() and "avx512f" not in Path("/proc/cpuinfo").read_text():
    # The AVX2 kernels of oneDNN in torch 2.14 write past their memory in the gradient of small convolutions, and the
    # process is aborted, or later.
    os.environ.setdefault("ONEDNN_MAX_CPU_ISA", "SSE41")

import pytest
from hypothesis import settings

settings.register_profile("thorough", max_examples=950)

ROOT = Path(__file__).parent.parent


@pytest.fixture(autouse=True)
def _no_seed_of_another_test(monkeypatch):
    """Lightning keeps the seed of seed_everything in the environment, and runs of several processes begin with it."""
    for name in ("PL_GLOBAL_SEED", "PL_SEED_WORKERS"):
        monkeypatch.delenv(name, raising=False)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """The long tests first: at the end of the run no worker waits for another's."""
    items.sort(key=lambda item: item.get_closest_marker("slow") is None)


def pytest_collection_finish() -> None:
    """All that is imported stays: the garbage collection, which Lightning's search calls often, need not look at it."""
    gc.collect()
    gc.freeze()


@pytest.fixture(scope="session")
def thorough(request: pytest.FixtureRequest) -> bool:
    """Whether runs have their full lengths, and not only drawn batches their full number."""
    return request.config.getoption("--hypothesis-profile") == "thorough"


@pytest.fixture(scope="session")
def data_dir() -> Path:
    """Folder of the real data sets; tests that need it are skipped where it is not."""
    folder = Path(os.environ.get("SCENT_LIGHTNING_DATA") or ROOT.parent / "shared" / "data")
    if not folder.is_dir():
        pytest.skip(f"no data sets at {folder} (set SCENT_LIGHTNING_DATA)")
    return folder.resolve()
