"""The loop that people write by hand, over the networks of this program on any device: what our loop is measured by.

    python -m scripts.benchmarks.bare_loop resnet50 cuda --steps 40 [--compile]

Its batches lie on the device already and nothing is logged, so it is the least that a step can take. Prints one line
of JSON: seconds of a step, and the bytes that tensors took at most.
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

BATCHES = 4  # different ones, in turn


@dataclass(frozen=True)
class Workload:
    """A network and its batches. `words` are the same for `python -m trainer`."""

    words: str
    network: Callable[[], nn.Module]
    batch: int
    pixels: int = 0  # of images of 1,000 classes; 0: tokens
    length: int = 0  # tokens of a sample
    vocabulary: int = 0

    def draw(self, device: torch.device) -> tuple[Tensor, Tensor]:
        """(inputs, targets) of one step, on the device."""
        if not self.pixels:
            text = torch.randint(self.vocabulary, (self.batch, self.length + 1), device=device)
            return text[:, :-1].contiguous(), text[:, 1:].contiguous()  # (B, length) each
        shape = (self.batch, 3, self.pixels, self.pixels)
        images = torch.randint(256, shape, dtype=torch.uint8, device=device)
        return images.to(memory_format=torch.channels_last), torch.randint(1000, (self.batch,), device=device)

    def optimizer(self, network: nn.Module) -> torch.optim.Optimizer:
        """That of conf/, with torch's fused step."""
        if self.pixels:
            return torch.optim.SGD(network.parameters(), 0.05, 0.9, weight_decay=5e-4, nesterov=True, fused=True)
        return torch.optim.AdamW(network.parameters(), 1e-3, weight_decay=0.05, fused=True)


def _images(model: str, pixels: int, batch: int) -> str:
    data = f"data=synthetic_images data.image_size={pixels} data.num_classes=1000 data.size={20 * batch}"
    return f"model={model} {data} data.evaluation_size={batch} optimizer=sgd loop.global_batch={batch}"


def _tokens(model: str, length: int, vocabulary: int, batch: int) -> str:
    data = f"data=synthetic_tokens data.length={length} data.vocab_size={vocabulary} data.evaluation_size={batch}"
    return f"model={model} {data} loop.global_batch={batch}"


def _resnet50() -> nn.Module:
    from recipes.vision.resnet import resnet50

    return resnet50(1000, 3, 224)


def _mlp() -> nn.Module:
    from recipes.vision.mlp import MLP

    return MLP(1000, 3, 32)


def _gpt2() -> nn.Module:
    from recipes.language.decoder import Decoder

    return Decoder(50304, 1024, width=768, depth=12, heads=12, mlp="gelu_tanh", tied=True)


def _gpt_nano() -> nn.Module:
    from recipes.language.decoder import Decoder

    return Decoder(256, 64, width=128, depth=4, heads=4, tied=False)


WORKLOADS = {
    "resnet50": Workload(_images("resnet50", 224, 256), _resnet50, 256, pixels=224),
    "gpt2": Workload(_tokens("gpt2", 1024, 50304, 16), _gpt2, 16, length=1024, vocabulary=50304),
    "mlp": Workload(_images("mlp", 32, 32), _mlp, 32, pixels=32),
    "gpt_nano": Workload(_tokens("gpt_nano", 64, 256, 8), _gpt_nano, 8, length=64, vocabulary=256),
}


def measure(work: Workload, device: torch.device, steps: int, compiled: bool) -> dict[str, Any]:
    """The time of a step of the second half, and the peak of the device's memory."""
    torch.manual_seed(0)
    layout = torch.channels_last if work.pixels else torch.contiguous_format
    network = work.network().to(device).to(memory_format=layout)
    optimizer, forward = work.optimizer(network), torch.compile(network) if compiled else network
    batches = [work.draw(device) for _ in range(BATCHES)]
    accelerated = device.type != "cpu"
    started = 0.0
    for step in range(steps):
        if step == steps // 2:  # the first half warms up: kernels are chosen and compiled, memory is taken
            if accelerated:
                torch.accelerator.synchronize()
            started = time.perf_counter()
        x, y = batches[step % BATCHES]
        with torch.autocast(device.type, torch.bfloat16, enabled=accelerated):
            output = forward(x.float().sub_(127.5).div_(63.75) if work.pixels else x)
            loss = F.cross_entropy(output.flatten(0, -2), y.flatten())
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    if accelerated:
        torch.accelerator.synchronize()
    seconds = (time.perf_counter() - started) / (steps - steps // 2)
    return {"step_s": seconds, "peak": torch.accelerator.max_memory_allocated() if accelerated else None}


def main() -> None:
    """Measure one workload."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("workload", choices=WORKLOADS)
    parser.add_argument("device", type=torch.device)
    parser.add_argument("--steps", type=int, default=40)
    parser.add_argument("--compile", action="store_true", help="torch.compile of the whole network")
    asked = parser.parse_args()
    print(json.dumps(measure(WORKLOADS[asked.workload], asked.device, asked.steps, asked.compile)), flush=True)


if __name__ == "__main__":
    main()
