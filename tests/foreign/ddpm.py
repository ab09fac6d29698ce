"""A diffusion model (Ho et al., 2020): a small U-Net with time embeddings, and a moving average of its weights."""

import itertools
import math

import torch
from torch import nn
from torch.nn import functional as F

from trainer import Task


class SinusoidalPositionEmbeddings(nn.Module):
    def __init__(self, dim):
        super().__init__()
        self.dim = dim

    def forward(self, time):
        half_dim = self.dim // 2
        embeddings = math.log(10000) / (half_dim - 1)
        embeddings = torch.exp(torch.arange(half_dim, device=time.device) * -embeddings)
        embeddings = time[:, None] * embeddings[None, :]
        return torch.cat((embeddings.sin(), embeddings.cos()), dim=-1)


class Block(nn.Module):
    def __init__(self, dim, dim_out, time_dim):
        super().__init__()
        self.mlp = nn.Sequential(nn.SiLU(), nn.Linear(time_dim, dim_out))
        self.conv1 = nn.Conv2d(dim, dim_out, 3, padding=1)
        self.norm1 = nn.GroupNorm(4, dim_out)
        self.conv2 = nn.Conv2d(dim_out, dim_out, 3, padding=1)
        self.norm2 = nn.GroupNorm(4, dim_out)
        self.res = nn.Conv2d(dim, dim_out, 1) if dim != dim_out else nn.Identity()

    def forward(self, x, t):
        h = F.silu(self.norm1(self.conv1(x))) + self.mlp(t)[:, :, None, None]
        return F.silu(self.norm2(self.conv2(h))) + self.res(x)


class Unet(nn.Module):
    def __init__(self, dim=8, mults=(1, 2)):
        super().__init__()
        dims = [dim, *(dim * m for m in mults)]
        time_dim = dim * 4
        self.time_mlp = nn.Sequential(
            SinusoidalPositionEmbeddings(dim), nn.Linear(dim, time_dim), nn.GELU(), nn.Linear(time_dim, time_dim)
        )
        self.init_conv = nn.Conv2d(1, dim, 3, padding=1)
        self.downs, self.ups = nn.ModuleList([]), nn.ModuleList([])
        for a, b in itertools.pairwise(dims):
            self.downs.append(nn.ModuleList([Block(a, b, time_dim), nn.Conv2d(b, b, 4, 2, 1)]))
        self.mid = Block(dims[-1], dims[-1], time_dim)
        for a, b in zip(reversed(dims[:-1]), reversed(dims[1:]), strict=True):
            self.ups.append(nn.ModuleList([nn.ConvTranspose2d(b, b, 4, 2, 1), Block(b * 2, a, time_dim)]))
        self.final = nn.Conv2d(dim, 1, 1)

    def forward(self, x, time):
        t = self.time_mlp(time)
        x = self.init_conv(x)
        h = []
        for block, downsample in self.downs:
            x = block(x, t)
            h.append(x)
            x = downsample(x)
        x = self.mid(x, t)
        for upsample, block in self.ups:
            x = block(torch.cat((upsample(x), h.pop()), dim=1), t)
        return self.final(x)


class Denoise(Task):
    def __init__(self, timesteps=100):
        self.timesteps = timesteps
        self.alphas_cumprod = torch.cumprod(1.0 - torch.linspace(0.0001, 0.02, timesteps), dim=0)

    def forward(self, network, inputs, targets):
        t = torch.randint(0, self.timesteps, (inputs.shape[0],), device=inputs.device).long()
        noise = torch.randn_like(inputs)
        a = self.alphas_cumprod.to(inputs.device)[t][:, None, None, None]
        x_noisy = a.sqrt() * inputs + (1 - a).sqrt() * noise
        return network(x_noisy, t), noise

    def loss(self, output, target):
        return F.smooth_l1_loss(*output)
