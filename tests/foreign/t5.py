"""T5 of transformers: an encoder and a decoder that share their embedding; it learns to turn a sequence round."""

import torch
from torch.utils.data import Dataset

from trainer import Data, Task


class Reverse(Dataset):
    def __init__(self, size, seed):
        self.ids = torch.randint(2, 30, (size, 9), generator=torch.Generator().manual_seed(seed))

    def __len__(self):
        return len(self.ids)

    def __getitem__(self, i):
        return {"input_ids": self.ids[i], "labels": self.ids[i].flip(0)}, self.ids[i].flip(0)


class Pairs(Data):
    def train(self):
        return Reverse(256, 1)

    def evaluation(self):
        return Reverse(40, 2)


class Seq2Seq(Task):
    def forward(self, network, inputs, targets):
        return network(**inputs)

    def loss(self, output, target):
        return output.loss
