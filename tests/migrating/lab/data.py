"""CIFAR-10 in the order in which `DistributedSampler(seed=0)` deals it out: a script's run, sample by sample."""

import torch
from torch import Tensor

from recipes.vision.cifar import CIFAR10


class AsSampled(CIFAR10):
    """Rank r of n gets what the sampler's rank r of n gets, for both take every n-th sample of a global order."""

    def order(self, epoch: int, generator: torch.Generator) -> Tensor:
        """The sampler's own permutation: its seed is the epoch's number."""
        return torch.randperm(len(self.train()), generator=torch.Generator().manual_seed(epoch))
