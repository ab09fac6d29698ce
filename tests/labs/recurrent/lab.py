"""A language model over bytes with truncated backpropagation: each row of a batch reads one stream of text."""

import torch
from torch import nn
from torch.nn.functional import cross_entropy
from torch.utils.data import Dataset

from trainer import Data, Task, gather


class Counted(Data):
    """A text of ascending numbers, in two parts of several streams each."""

    def __init__(self, numbers, window, streams, evaluation_streams):
        text = torch.tensor(list(" ".join(map(str, range(numbers))).encode()))
        learned, held = text.split(len(text) * 9 // 10 + 1)
        self.windows, self.rest = Windows(learned, window, streams), Windows(held, window, evaluation_streams)

    def train(self):
        return self.windows

    def order(self, epoch, generator):  # row i of a batch continues row i of the batch before
        return torch.arange(len(self.windows))

    def evaluation(self):  # is read in its own order
        return self.rest


class Windows(Dataset):
    """Sample i is window i // streams of stream i % streams: (T,), and for each of its bytes the next byte (T,)."""

    def __init__(self, text, length, streams):
        self.streams, steps = streams, (len(text) - 1) // length // streams
        parts = (text[at : at + streams * steps * length].view(streams, steps, length) for at in (0, 1))
        self.text, self.following = (part.transpose(0, 1).flatten(0, 1) for part in parts)

    def __len__(self):
        return len(self.text)

    def batch(self, indices):
        stream = {"stream": indices % self.streams, "begins": indices < self.streams}
        return {"text": self.text[indices], **stream}, self.following[indices]


class Reader(nn.Module):
    """Bytes (B, T) and a state, h and c (B, 2, depth, width), to scores (B, T, 256) and the new state.

    Its buffers keep the state of every stream: (streams, 2, depth, width). An evaluation has its own.
    """

    def __init__(self, width, depth, streams, evaluation_streams):
        super().__init__()
        self.bytes, self.head = nn.Embedding(256, width), nn.Linear(width, 256)
        self.lstm = nn.LSTM(width, width, depth, batch_first=True)
        self.register_buffer("learning", torch.zeros(streams, 2, depth, width))
        self.register_buffer("evaluating", torch.zeros(evaluation_streams, 2, depth, width), persistent=False)

    def forward(self, text, state):  # an LSTM wants (depth, B, width)
        x, state = self.lstm(self.bytes(text), [x.transpose(0, 1).contiguous() for x in state.unbind(1)])
        return self.head(x), torch.stack(state, dim=2).permute(1, 2, 0, 3)


class NextByte(Task):
    def forward(self, network, inputs, targets):
        memory = network.learning if network.training else network.evaluating
        stream, goes_on = inputs["stream"], ~inputs["begins"][:, None, None, None]
        scores, state = network(inputs["text"], memory[stream] * goes_on)
        with torch.no_grad():  # every rank keeps the streams of all: a checkpoint has them, whoever reads them next
            memory[gather(stream)] = gather(state.detach())
        return scores

    def loss(self, output, target):
        return cross_entropy(output.mT, target)
