"""Tabular data: embeddings of the categories, BatchNorm of the numbers, a regression."""

import itertools

import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.data import Dataset

from trainer import Data, Task


class Table(Dataset):
    def __init__(self, size, seed):
        generator = torch.Generator().manual_seed(seed)
        self.cats = torch.stack([torch.randint(0, n, (size,), generator=generator) for n in (5, 12)], 1)
        self.conts = torch.randn(size, 4, generator=generator)
        self.y = self.conts.sum(1) + 0.3 * self.cats[:, 0] - 0.1 * self.cats[:, 1]

    def __len__(self):
        return len(self.y)

    def __getitem__(self, i):
        return (self.cats[i], self.conts[i]), self.y[i]


class Houses(Data):
    def train(self):
        return Table(600, 1)

    def evaluation(self):
        return Table(101, 2)


class TabularModel(nn.Module):
    def __init__(self, emb_szs=((5, 3), (12, 6)), n_cont=4, layers=(32, 16), ps=0.1):
        super().__init__()
        self.embeds = nn.ModuleList([nn.Embedding(ni, nf) for ni, nf in emb_szs])
        self.emb_drop = nn.Dropout(ps)
        self.bn_cont = nn.BatchNorm1d(n_cont)
        sizes = [sum(nf for _, nf in emb_szs) + n_cont, *layers]
        blocks = []
        for a, b in itertools.pairwise(sizes):
            blocks += [nn.Linear(a, b), nn.ReLU(inplace=True), nn.BatchNorm1d(b), nn.Dropout(ps)]
        self.layers = nn.Sequential(*blocks, nn.Linear(sizes[-1], 1))

    def forward(self, inputs):
        x_cat, x_cont = inputs
        x = torch.cat([e(x_cat[:, i]) for i, e in enumerate(self.embeds)], 1)
        x = torch.cat([self.emb_drop(x), self.bn_cont(x_cont)], 1)
        return self.layers(x).squeeze(-1)


class Price(Task):
    def loss(self, output, target):
        return F.mse_loss(output, target)

    def metrics(self, output, target):
        return {"mae": (output - target).abs().sum()}
