"""Two networks whose steps take turns: the critic's, then the generator's on the same batch."""

import torch
from torch import nn
from torch.nn.functional import softplus
from torch.utils.data import TensorDataset

from trainer import Data, Task


class Sums(Data):
    """Numbers (B, 4), and their running sums (B, 4), which the generator is to make."""

    def train(self):
        given = torch.randn(96, 4, generator=torch.Generator().manual_seed(0))
        return TensorDataset(given, given.cumsum(1))

    def order(self, epoch, generator):
        # in the order of the program; torch.randperm(96, generator=generator) is that of another run
        batches = torch.randperm(96, generator=torch.Generator().manual_seed(epoch)).view(-1, 16)
        return batches.repeat_interleave(2, dim=0).flatten()  # each batch twice: one for each turn


class Rivals(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.generator = nn.Sequential(nn.Linear(4, 16), nn.Tanh(), nn.Linear(16, 4))
        self.critic = nn.Sequential(nn.Linear(4, 16), nn.Tanh(), nn.Linear(16, 1))
        self.register_buffer("turn", torch.zeros((), dtype=torch.long))  # a buffer is in every checkpoint


class Turns(Task):
    def forward(self, network, inputs, targets):
        if int(network.turn) % 2 == 0:
            with torch.no_grad():
                made = network.generator(inputs)
            return {"real": network.critic(targets), "made": network.critic(made)}
        network.critic.requires_grad_(False)  # gradients pass through it, and it gets none
        judged = network.critic(network.generator(inputs))
        network.critic.requires_grad_(True)
        return {"judged": judged}

    def loss(self, output, target):
        if "judged" in output:
            return softplus(-output["judged"]).mean()
        return softplus(-output["real"]).mean() + softplus(output["made"]).mean()

    def after_step(self, network, step):
        network.turn += 1
