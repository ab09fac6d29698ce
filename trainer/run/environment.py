"""environment.json: with what, where and on how many devices a run was made."""

from __future__ import annotations

import os
import platform
import socket
import subprocess
import sys
from importlib.metadata import PackageNotFoundError, version
from typing import Any

import torch

PACKAGES = ("trainer", "torch", "torchvision", "numpy", "hydra-core", "omegaconf", "safetensors", "tensorboard", "rich")


def surroundings(strategy: str, world_size: int, precision: str, devices: str) -> dict[str, Any]:
    """Versions, hardware, git revision and what was resolved; the host names of all ranks follow once they joined."""
    return {
        "python": sys.version.split()[0],
        "platform": platform.platform(),
        "packages": {name: _version(name) for name in PACKAGES},
        "cuda": torch.version.cuda,
        "gpus": [torch.cuda.get_device_name(index) for index in range(torch.cuda.device_count())],
        "cpus": os.cpu_count(),
        "git": _revision(),
        "strategy": strategy,
        "world_size": world_size,
        "precision": precision,
        "devices": devices,
        "hosts": [socket.gethostname()],
    }


def _version(package: str) -> str | None:
    try:
        return version(package)
    except PackageNotFoundError:
        return None


def _revision() -> str | None:
    """The revision of the checkout that the run was started in, with a plus sign where files had been changed."""
    try:
        commit = _git("rev-parse", "HEAD")
        return commit + ("+" if _git("status", "--porcelain", "--untracked-files=no") else "")
    except (OSError, subprocess.SubprocessError):
        return None


def _git(*words: str) -> str:
    return subprocess.run(["git", *words], capture_output=True, text=True, check=True, timeout=5).stdout.strip()
