"""Two optimizers that take turns: a step of the critic, then one of the generator.

python tutorial_turns.py
"""

import torch
from lab.turns import Rivals, Sums
from torch.nn.functional import softplus


def main():
    torch.manual_seed(0)
    network, (given, real) = Rivals(), Sums().train().tensors
    critics = torch.optim.Adam(network.critic.parameters(), lr=4e-3)
    generators = torch.optim.Adam(network.generator.parameters(), lr=1e-3)

    losses = []
    for epoch in range(2):
        for batch in torch.randperm(96, generator=torch.Generator().manual_seed(epoch)).view(-1, 16):
            made = network.generator(given[batch]).detach()
            loss = softplus(-network.critic(real[batch])).mean() + softplus(network.critic(made)).mean()
            critics.zero_grad()
            loss.backward()
            critics.step()
            losses.append(loss.item())

            loss = softplus(-network.critic(network.generator(given[batch]))).mean()
            generators.zero_grad()
            loss.backward()
            generators.step()
            losses.append(loss.item())
    for step, loss in enumerate(losses, 1):
        print(f"step {step} loss {loss:.7f}")


if __name__ == "__main__":
    main()
