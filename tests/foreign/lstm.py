"""A word language model: an LSTM whose state passes from window to window (as pytorch/examples/word_language_model)."""

import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.data import TensorDataset

from trainer import Data, Task


class Corpus(Data):
    def __init__(self, words, bptt, batch_size, eval_batch_size):
        generator = torch.Generator().manual_seed(0)
        ids = torch.arange(words) * 7 % 50 + torch.randint(0, 2, (words,), generator=generator)
        cut = words * 9 // 10
        self.parts = [self.windows(ids[:cut], bptt), self.windows(ids[cut:], bptt)]
        self.batch_size, self.eval_batch_size = batch_size, eval_batch_size

    @staticmethod
    def windows(ids, bptt):
        count = (len(ids) - 1) // bptt
        return TensorDataset(ids[: count * bptt].view(-1, bptt), ids[1 : count * bptt + 1].view(-1, bptt))

    def train(self):
        return self.parts[0]

    def order(self, epoch, generator):
        return self.batchify(len(self.parts[0]), self.batch_size)

    def evaluation(self):
        return TensorDataset(*self.parts[1][self.batchify(len(self.parts[1]), self.eval_batch_size)])

    @staticmethod
    def batchify(count, streams):
        return torch.arange(count // streams * streams).view(streams, -1).t().flatten()


class RNNModel(nn.Module):
    def __init__(self, ntoken, ninp, nhid, nlayers, dropout=0.5):
        super().__init__()
        self.drop = nn.Dropout(dropout)
        self.encoder = nn.Embedding(ntoken, ninp)
        self.rnn = nn.LSTM(ninp, nhid, nlayers, dropout=dropout)
        self.decoder = nn.Linear(nhid, ntoken)
        nn.init.uniform_(self.encoder.weight, -0.1, 0.1)
        nn.init.zeros_(self.decoder.bias)
        nn.init.uniform_(self.decoder.weight, -0.1, 0.1)

    def forward(self, input, hidden=None):
        emb = self.drop(self.encoder(input))  # (T, B, ninp)
        output, hidden = self.rnn(emb, hidden)
        decoded = self.decoder(self.drop(output))
        return F.log_softmax(decoded, dim=-1), hidden


class LanguageModel(Task):
    def forward(self, network, inputs, targets, carried=None):
        hidden = carried and tuple(carried[k].transpose(0, 1).contiguous() for k in ("h", "c"))
        output, (h, c) = network(inputs.t(), hidden)
        return output.transpose(0, 1), {"h": h.transpose(0, 1), "c": c.transpose(0, 1)}

    def carry(self, output):
        return output[1]

    def loss(self, output, target):
        return F.nll_loss(output[0].flatten(0, 1), target.flatten())

    def finish(self, totals):
        loss = totals["loss"] / totals["weight"]
        return {"loss": float(loss), "perplexity": float(loss.exp())}
