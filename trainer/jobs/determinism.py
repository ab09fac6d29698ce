"""Deterministic algorithms only (loop.deterministic): the same bits again on the same machine, or an error."""

from __future__ import annotations

import os

import torch

from trainer.launch.failure import error_chain


def be_deterministic() -> None:
    """Take deterministic algorithms alone from now on; an operation that has none is an error. Before CUDA starts.

    torch.use_deterministic_algorithms: cuDNN chooses among such algorithms too, and does not try which one is fastest.
    """
    os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")  # cuBLAS's own condition
    torch.backends.cudnn.benchmark = False  # what is fastest differs from start to start
    torch.use_deterministic_algorithms(True)


def way_out(error: BaseException) -> str:
    """What to do about an operation that has no deterministic algorithm; empty where that is not the error."""
    if not any("does not have a deterministic implementation" in str(one) for one in error_chain(error)):
        return ""
    return "loop.deterministic=true runs no operation whose bits may differ; do without this one, or set it to false."
