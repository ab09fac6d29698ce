"""A GAN: two networks, two losses, one step for both (Radford et al., 2015: DCGAN, for images of 8×8 pixels)."""

from contextlib import contextmanager

from torch import nn
from torch.nn.functional import softplus

from recipes.vision.digits import Digits
from trainer import Task


class Drawings(Digits):
    """Digits, and for each sample the input noise of the generator. It depends only on the sample, not on the rank."""

    def augment(self, inputs, targets, random, training):
        image, _ = super().augment(inputs, targets, random, training)
        return {"image": image, "noise": random.normal(len(image), 16, 1, 1)}, targets


class Rivals(nn.Module):
    """A generator, (B, 16, 1, 1) to (B, 1, 8, 8), and a discriminator, (B, 1, 8, 8) to (B,): above 0 means real."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.generator = nn.Sequential(
            nn.ConvTranspose2d(16, 2 * width, 4),
            nn.GroupNorm(4, 2 * width),
            nn.LeakyReLU(0.2),
            nn.ConvTranspose2d(2 * width, 1, 4, stride=2, padding=1),
            nn.Tanh(),
        )
        self.discriminator = nn.Sequential(
            nn.Conv2d(1, width, 4, stride=2, padding=1), nn.LeakyReLU(0.2), nn.Conv2d(width, 1, 4), nn.Flatten(0)
        )


class Adversarial(Task):
    """Each network has its own loss. With `detach` and freezing, one backward gives both gradients."""

    def forward(self, network, inputs, targets):
        drawn = network.generator(inputs["noise"])
        with frozen(network.discriminator):  # its weights get no gradient from the generator's loss
            fooled = network.discriminator(drawn)
        real, seen = network.discriminator(inputs["image"]), network.discriminator(drawn.detach())
        return {"fooled": fooled, "real": real, "drawn": seen}  # (B,) each

    def loss(self, output, target):
        unmasked = softplus(-output["real"]) + softplus(output["drawn"])
        return {"generator": softplus(-output["fooled"]).mean(), "discriminator": unmasked.mean()}

    def metrics(self, output, target):
        return {"real_believed": (output["real"] > 0).sum(), "drawn_believed": (output["drawn"] > 0).sum()}


@contextmanager
def frozen(network):
    """Inside, gradients pass through the network, but its parameters get none."""
    network.requires_grad_(False)
    yield
    network.requires_grad_(True)
