"""A language model over bytes with truncated backpropagation: each row of a batch reads one stream of text."""

import torch
from torch import nn
from torch.nn.functional import cross_entropy
from torch.utils.data import TensorDataset

from trainer import Data, Task


class Counted(Data):
    """A text of ascending numbers. A sample is a window (T,) and, for each of its bytes, the next byte (T,)."""

    def __init__(self, numbers, window, streams, evaluation_streams):
        text = torch.tensor(list(" ".join(map(str, range(numbers))).encode()))
        self.windows, self.rest = (windows(part, window) for part in text.split(len(text) * 9 // 10 + 1))
        self.streams, self.evaluation_streams = streams, evaluation_streams

    def train(self):
        return self.windows

    def order(self, epoch, generator):  # row i of a batch continues row i of the batch before
        return in_streams(len(self.windows), self.streams)

    def evaluation(self):  # is read in its own order
        return TensorDataset(*self.rest[in_streams(len(self.rest), self.evaluation_streams)])


def windows(text, length):
    count = (len(text) - 1) // length
    return TensorDataset(*(text[at : at + count * length].view(count, length) for at in (0, 1)))


def in_streams(count, streams):  # `batchify` in torch's example: streams of equal length, one in each row
    return torch.arange(count // streams * streams).view(streams, -1).t().flatten()


class Reader(nn.Module):
    """Bytes (B, T) and the old state to scores (B, T, 256) and the new state: h and c, (B, depth, width)."""

    def __init__(self, width, depth):
        super().__init__()
        self.bytes, self.head = nn.Embedding(256, width), nn.Linear(width, 256)
        self.lstm = nn.LSTM(width, width, depth, batch_first=True)

    def forward(self, text, memory=None):  # an LSTM wants (depth, B, width)
        x, (h, c) = self.lstm(self.bytes(text), memory and [memory[name].transpose(0, 1).contiguous() for name in "hc"])
        return {"scores": self.head(x), "memory": {"h": h.transpose(0, 1), "c": c.transpose(0, 1)}}


class NextByte(Task):
    def forward(self, network, inputs, targets, carried=None):
        return network(inputs, carried)

    def carry(self, output):  # `carried` of the same rows in the next batch
        return output["memory"]

    def loss(self, output, target):
        return cross_entropy(output["scores"].mT, target)
