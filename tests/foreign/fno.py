"""A Fourier neural operator (as neuraloperator's fourier_1d): complex weights; it learns the heat equation."""

import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.data import TensorDataset

from trainer import Data, Task


class SpectralConv1d(nn.Module):
    def __init__(self, in_channels, out_channels, modes1):
        super().__init__()
        self.out_channels, self.modes1 = out_channels, modes1
        self.scale = 1 / (in_channels * out_channels)
        self.weights1 = nn.Parameter(
            self.scale * torch.rand(in_channels, out_channels, self.modes1, dtype=torch.cfloat)
        )

    def forward(self, x):
        x_ft = torch.fft.rfft(x)
        out_ft = torch.zeros(x.shape[0], self.out_channels, x.size(-1) // 2 + 1, device=x.device, dtype=torch.cfloat)
        out_ft[:, :, : self.modes1] = torch.einsum("bix,iox->box", x_ft[:, :, : self.modes1], self.weights1)
        return torch.fft.irfft(out_ft, n=x.size(-1))


class FNO1d(nn.Module):
    def __init__(self, modes=8, width=16):
        super().__init__()
        self.fc0 = nn.Linear(2, width)
        self.conv0, self.conv1 = SpectralConv1d(width, width, modes), SpectralConv1d(width, width, modes)
        self.w0, self.w1 = nn.Conv1d(width, width, 1), nn.Conv1d(width, width, 1)
        self.fc1, self.fc2 = nn.Linear(width, 32), nn.Linear(32, 1)

    def get_grid(self, shape, device):
        return torch.linspace(0, 1, shape[1], device=device).reshape(1, -1, 1).repeat(shape[0], 1, 1)

    def forward(self, x):
        x = self.fc0(torch.cat((x, self.get_grid(x.shape, x.device)), dim=-1)).permute(0, 2, 1)
        x = F.gelu(self.conv0(x) + self.w0(x))
        x = (self.conv1(x) + self.w1(x)).permute(0, 2, 1)
        return self.fc2(F.gelu(self.fc1(x)))


class Heat(Data):
    def train(self):
        return self.curves(256, 1)

    def evaluation(self):
        return self.curves(33, 2)

    def curves(self, size, seed):
        x = torch.randn(size, 64, generator=torch.Generator().manual_seed(seed)).cumsum(1) / 8
        decay = torch.exp(-0.02 * torch.arange(33) ** 2)
        return TensorDataset(x[..., None], torch.fft.irfft(torch.fft.rfft(x) * decay, n=64))


class LpLoss(Task):
    """The relative error of each curve."""

    best = "-l2"

    def loss(self, output, target):
        return self.rel(output, target).sum() / max(len(target), 1)

    def rel(self, output, target):
        return (output.view(len(output), -1) - target).norm(dim=1) / target.norm(dim=1)

    def metrics(self, output, target):
        return {"l2": self.rel(output, target).sum()}
