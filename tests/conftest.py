"""What holds for every test: the order, and the reason of a skip."""

import os

# Before torch is imported anywhere: with more threads than cores, waiting costs more than computing.
os.environ.setdefault("OMP_NUM_THREADS", "1")

import pytest


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Cheap tests first, so that a plain mistake shows in seconds."""
    items.sort(key=lambda item: item.get_closest_marker("slow") is not None)


def pytest_runtest_setup(item: pytest.Item) -> None:
    """Skip what needs more GPUs than there are, and say how many."""
    mark = item.get_closest_marker("gpu")
    if mark is None:
        return
    import torch

    wanted = mark.args[0] if mark.args else mark.kwargs.get("count", 1)
    seen = torch.cuda.device_count()
    if seen < wanted:
        pytest.skip(f"needs {wanted} GPU{'s' if wanted > 1 else ''}, this machine has {seen}")
