"""What computes each token by itself: an MLP, or a mixture of experts in its place."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor, nn
from torch.nn import functional

from recipes.language.experts import BalancedMixture, Mixture, Routing
from trainer.messages import Refusal, did_you_mean


class MLP(nn.Module):
    """Two linear layers with GELU between them; `tanh`: the approximation that GPT-2 was trained with."""

    def __init__(self, width: int, inner: int, bias: bool, approximate: str = "none") -> None:
        super().__init__()
        self.up, self.down = nn.Linear(width, inner, bias=bias), nn.Linear(inner, width, bias=bias)
        self.approximate = approximate

    def forward(self, x: Tensor) -> Tensor:
        """(B, T, width) to (B, T, width)."""
        return self.down(functional.gelu(self.up(x), approximate=self.approximate))


class TanhMLP(MLP):
    """The same with GPT-2's approximation of GELU."""

    def __init__(self, width: int, inner: int, bias: bool) -> None:
        super().__init__(width, inner, bias, "tanh")


class SwiGLU(nn.Module):
    """Two layers side by side, one of which opens the other, then one back (Shazeer 2020, arXiv:2002.05202)."""

    def __init__(self, width: int, inner: int, bias: bool) -> None:
        super().__init__()
        self.gate, self.up = nn.Linear(width, inner, bias=bias), nn.Linear(width, inner, bias=bias)
        self.down = nn.Linear(inner, width, bias=bias)

    def forward(self, x: Tensor) -> Tensor:
        """(B, T, width) to (B, T, width)."""
        return self.down(functional.silu(self.gate(x)) * self.up(x))


MLPS: dict[str, type[nn.Module]] = {"gelu": MLP, "gelu_tanh": TanhMLP, "swiglu": SwiGLU}


@dataclass(frozen=True)
class MLPSettings:
    """What stands behind the attention of each block, which it makes."""

    width: int
    depth: int  # blocks
    kind: str
    inner: int
    bias: bool
    routing: Routing | None  # None: no mixtures
    shared: int  # experts of every token
    expert_inner: int
    dense_first: int  # blocks at the beginning that have no mixture

    def refuse(self) -> None:
        """Refuse settings of which no MLP can be made."""
        if self.kind not in MLPS:
            raise Refusal(f"model.mlp={self.kind}: there are {', '.join(MLPS)}{did_you_mean(self.kind, MLPS)}")
        if self.routing is None:
            return
        self.routing.refuse()
        if not 0 <= self.dense_first < self.depth:
            raise Refusal(
                f"model.dense_first={self.dense_first} of model.depth {self.depth} blocks leaves none for experts; at"
                f" most {self.depth - 1}, or model.experts=null"
            )
        if self.shared < 0:
            raise Refusal(f"model.shared={self.shared}: 0 or more experts compute every token")
        if self.expert_inner < 1:
            raise Refusal(
                f"model.expert_inner={self.expert_inner}: the width inside an expert is 1 or more; null: model.inner"
            )

    def make(self, number: int) -> nn.Module:
        """That of this block."""
        if self.routing is None or number < self.dense_first:
            return MLPS[self.kind](self.width, self.inner, self.bias)
        shared = SwiGLU(self.width, self.shared * self.expert_inner, bias=False) if self.shared else None
        kind = BalancedMixture if self.routing.auxiliary else Mixture
        return kind(self.width, self.expert_inner, self.routing, shared)
