"""DCGAN (as pytorch/examples/dcgan): two networks with BatchNorm, weights by apply(), noise from torch.randn."""

import torch
from torch import nn
from torch.nn import functional as F

from trainer import Task

nz, ngf, ndf, nc = 16, 8, 8, 1


def weights_init(m):
    classname = m.__class__.__name__
    if classname.find("Conv") != -1:
        torch.nn.init.normal_(m.weight, 0.0, 0.02)
    elif classname.find("BatchNorm") != -1:
        torch.nn.init.normal_(m.weight, 1.0, 0.02)
        torch.nn.init.zeros_(m.bias)


class Generator(nn.Module):
    def __init__(self):
        super().__init__()
        self.main = nn.Sequential(
            nn.ConvTranspose2d(nz, ngf * 2, 2, 1, 0, bias=False),
            nn.BatchNorm2d(ngf * 2),
            nn.ReLU(True),
            nn.ConvTranspose2d(ngf * 2, ngf, 4, 2, 1, bias=False),
            nn.BatchNorm2d(ngf),
            nn.ReLU(True),
            nn.ConvTranspose2d(ngf, nc, 4, 2, 1, bias=False),
            nn.Tanh(),
        )

    def forward(self, input):
        return self.main(input)


class Discriminator(nn.Module):
    def __init__(self):
        super().__init__()
        self.main = nn.Sequential(
            nn.Conv2d(nc, ndf, 4, 2, 1, bias=False),
            nn.LeakyReLU(0.2, inplace=True),
            nn.Conv2d(ndf, ndf * 2, 4, 2, 1, bias=False),
            nn.BatchNorm2d(ndf * 2),
            nn.LeakyReLU(0.2, inplace=True),
            nn.Conv2d(ndf * 2, 1, 2, 1, 0, bias=False),
            nn.Sigmoid(),
        )

    def forward(self, input):
        return self.main(input).view(-1, 1).squeeze(1)


class GAN(nn.Module):
    def __init__(self):
        super().__init__()
        self.netG, self.netD = Generator(), Discriminator()
        self.netG.apply(weights_init)
        self.netD.apply(weights_init)


class Adversarial(Task):
    def forward(self, network, inputs, targets):
        noise = torch.randn(inputs.size(0), nz, 1, 1, device=inputs.device)
        fake = network.netG(noise)
        real_score = network.netD(inputs)
        fake_score = network.netD(fake.detach())
        network.netD.requires_grad_(False)
        fooled = network.netD(fake)
        network.netD.requires_grad_(True)
        return real_score, fake_score, fooled

    def loss(self, output, target):
        real, fake, fooled = output
        ones, zeros = torch.ones_like(real), torch.zeros_like(real)
        errD = F.binary_cross_entropy(real, ones) + F.binary_cross_entropy(fake, zeros)
        return {"errD": errD, "errG": F.binary_cross_entropy(fooled, ones)}
