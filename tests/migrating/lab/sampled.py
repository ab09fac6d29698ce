"""Data in the order in which `DistributedSampler(seed=0)` deals it out: a script's run, sample by sample."""

import torch
from torch import Tensor

from recipes.vision import cifar, fashion_mnist
from recipes.vision.pictures import Pictures


class AsSampled(Pictures):
    """Rank r of n gets what the sampler's rank r of n gets, for both take every n-th sample of a global order."""

    def order(self, epoch: int, generator: torch.Generator) -> Tensor:
        """The sampler's own permutation: its seed is the epoch's number."""
        return torch.randperm(len(self.train()), generator=torch.Generator().manual_seed(epoch))


class CIFAR10(AsSampled, cifar.CIFAR10):
    """CIFAR-10 in that order."""


class FashionMNIST(AsSampled, fashion_mnist.FashionMNIST):
    """Fashion-MNIST in that order."""
