"""A decoder and its training loop as people write them by hand, in the manner of nanoGPT; nothing of trainer is in it.

`python -m tests.recipes.nano TEXT STEPS` prints the time of a step; test_language.py compares the curve.
"""

from __future__ import annotations

import math
import sys
import time
from pathlib import Path
from statistics import median

import torch
from torch import Tensor, nn
from torch.nn import functional

LAYERS, HEADS, WIDTH, BLOCK, BATCH = 4, 4, 128, 64, 12  # nanoGPT's published sizes for a CPU
RATE, FINAL, WARMUP, STEPS = 1e-3, 0.1, 100, 2000


class Block(nn.Module):
    """Attention and an MLP."""

    def __init__(self) -> None:
        super().__init__()
        self.ln_1, self.ln_2 = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)
        self.c_attn, self.c_proj = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)
        self.c_fc, self.c_out = nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        """(B, T, WIDTH)."""
        batch, tokens, _ = x.shape
        parts = self.c_attn(self.ln_1(x)).chunk(3, -1)
        q, k, v = (part.view(batch, tokens, HEADS, -1).transpose(1, 2) for part in parts)
        mixed = functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.c_proj(mixed.transpose(1, 2).flatten(2))
        return x + self.c_out(functional.gelu(self.c_fc(self.ln_2(x))))


class GPT(nn.Module):
    """Token numbers (B, T) to scores (B, T, 256)."""

    def __init__(self) -> None:
        super().__init__()
        self.wte, self.wpe = nn.Embedding(256, WIDTH), nn.Embedding(BLOCK, WIDTH)
        self.h, self.ln_f = nn.ModuleList(Block() for _ in range(LAYERS)), nn.LayerNorm(WIDTH)
        for name, parameter in self.named_parameters():
            if parameter.dim() == 2:
                added = name.endswith(("c_proj.weight", "c_out.weight"))
                nn.init.normal_(parameter, std=0.02 / math.sqrt(2 * LAYERS) if added else 0.02)
            elif name.endswith("bias"):
                nn.init.zeros_(parameter)

    def forward(self, tokens: Tensor) -> Tensor:
        """Tied: the embedding is the head, too."""
        x = self.wte(tokens) + self.wpe(torch.arange(tokens.shape[1]))
        for block in self.h:
            x = block(x)
        return functional.linear(self.ln_f(x), self.wte.weight)

    def published(self) -> dict[str, Tensor]:
        """The weights under the names, and the way round, of a published GPT-2."""
        found = {}
        for name, value in self.state_dict().items():
            layer, _, kind = name.replace("c_out", "mlp.c_proj").replace("c_fc", "mlp.c_fc").rpartition(".")
            layer = layer.replace("c_attn", "attn.c_attn").replace(".c_proj", ".attn.c_proj")
            layer = layer.replace("mlp.attn.", "mlp.")
            turned = value.T.contiguous() if "c_" in layer and kind == "weight" else value
            found[f"transformer.{layer}.{kind}"] = turned.clone()
        return found


def train(
    network: GPT, text: Tensor, order: Tensor, steps: int, horizon: int = STEPS, warmup: int = WARMUP
) -> tuple[list[float], list[float]]:
    """The loss and the seconds of each step; text: (N,) uint8; order: where the windows begin, one after the other."""
    matrices = [p for p in network.parameters() if p.dim() >= 2]
    vectors = [p for p in network.parameters() if p.dim() < 2]
    groups = [{"params": matrices, "weight_decay": 0.1}, {"params": vectors, "weight_decay": 0.0}]
    optimizer = torch.optim.AdamW(groups, lr=RATE, betas=(0.9, 0.99), fused=True)
    losses, seconds = [], []
    for step in range(steps):
        began = time.perf_counter()
        starts = order[step * BATCH : (step + 1) * BATCH].tolist()
        windows = torch.stack([text[at : at + BLOCK + 1] for at in starts]).long()  # (BATCH, BLOCK + 1)
        done = (step - warmup) / (horizon - warmup)
        cosine = FINAL + (1 - FINAL) * (1 + math.cos(math.pi * done)) / 2
        for group in optimizer.param_groups:
            group["lr"] = RATE * ((step + 1) / warmup if step < warmup else cosine)
        loss = functional.cross_entropy(network(windows[:, :-1]).flatten(0, 1), windows[:, 1:].flatten())
        loss.backward()
        torch.nn.utils.clip_grad_norm_(network.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        losses.append(loss.item())
        seconds.append(time.perf_counter() - began)
    return losses, seconds


if __name__ == "__main__":
    book = torch.frombuffer(bytearray(Path(sys.argv[1]).read_bytes()), dtype=torch.uint8)
    torch.manual_seed(0)
    _, times = train(GPT(), book, torch.randint(len(book) - BLOCK, (STEPS * BATCH,)), int(sys.argv[2]))
    print(f"{1000 * median(times[20:]):.2f} ms a step")
