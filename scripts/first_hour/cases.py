"""What is trained in the first hour: networks, precisions, and strategies on so many processes."""

from __future__ import annotations

import re
from dataclasses import dataclass

PRECISIONS = {"fp32": 1e-5, "fp16": 1e-3, "bf16": 1e-2}  # the largest difference of a loss from one CPU process in fp32
MUST = ("single", "ddp", "zero1", "fsdp")  # in fp32 these may not even be refused

OFTEN = "log=[] loop.log_every=1 schedule=constant loop.max_norm=1 optimizer.lr=1e-3 loop.global_batch=24"
TOKENS = f"model=gpt_nano data=synthetic_tokens data.length=64 {OFTEN} loop.steps=40"
IMAGES = f"model=resnet18 data=synthetic_images data.size=960 data.evaluation_size=96 {OFTEN} loop.steps=40"
SMALL_TOKENS = (
    "model=gpt_nano model.width=32 model.depth=2 data=synthetic_tokens data.length=16 data.size=480"
    f" data.evaluation_size=24 {OFTEN} loop.steps=6"
)
SMALL_IMAGES = f"model=mlp model.width=32 model.depth=2 {OFTEN} loop.steps=6"
DROPOUT = "model.dropout=0.1"  # the same places are hidden on every device and under every strategy


@dataclass(frozen=True)
class Case:
    """A strategy on so many processes."""

    strategy: str
    processes: int = 1
    more: str = ""  # words beside strategy=
    network: str = DROPOUT  # words of the network, of the reference too
    shared: bool = False  # do the processes share one GPU, over gloo?

    @property
    def words(self) -> str:
        """Of the command line."""
        several = f"processes={self.processes}" if self.processes > 1 else ""
        gloo = "distributed.backend=gloo" if self.shared else ""
        return " ".join(f"strategy={self.strategy} {self.more} {several} {gloo}".split())

    @property
    def name(self) -> str:
        """Of a run's folder."""
        return re.sub(r"\W+", "-", str(self))

    def __str__(self) -> str:
        over = ", gloo" if self.shared else ""
        return f"{self.strategy} {self.more}".strip() + f" on {self.processes}{over}"


def cases(gpus: int) -> list[Case]:
    """Every strategy on all GPUs of the machine. With one GPU or none, several processes share the device."""
    alone = [Case("single"), Case("ddp"), Case("fsdp"), Case("zero1"), Case("tp")]
    if gpus <= 1:
        pairs = [Case(name, 2, shared=True) for name in ("ddp", "zero1", "fsdp", "tp", "cp", "pp")]
        offload = Case("fsdp", 2, "strategy.cpu_offload=true", shared=True)
        return [*alone, Case("dp"), *pairs, offload, Case("hsdp", 4, "strategy.replicate=2", shared=True)]
    # nn.DataParallel on several GPUs draws dropout as torch does, so it trains without, and so does its reference
    alone.append(Case("dp", network="model.dropout=0"))
    whole = [Case(name, gpus) for name in ("ddp", "zero1", "fsdp", "tp", "cp", "pp")]
    whole.append(Case("fsdp", gpus, "strategy.cpu_offload=true"))
    if gpus % 4:  # meshes of two axes need four processes
        return alone + whole
    meshes = {
        "hsdp": "strategy.replicate=2",
        "ddp_tp": "strategy.tensor=2",
        "fsdp_tp": "strategy.tensor=2",
        "ddp_cp": "strategy.context=2",
        "fsdp_cp": "strategy.context=2",
        "ddp_pp": "strategy.pipe=2",
        "fsdp_pp": "strategy.pipe=2",
        "mesh": f"strategy.replicate={gpus // 4} strategy.shard=2 strategy.tensor=2",
    }
    return [*alone, *whole, *(Case(name, gpus, more) for name, more in meshes.items())]


def quick_cases(gpus: int) -> list[Case]:
    """Two strategies, for the smoke test."""
    return [Case("single"), Case("ddp", 2, shared=gpus <= 1)]
