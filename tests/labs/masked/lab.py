"""Masked language modelling: sequences of different lengths, padded in each batch; the loss is over masked words."""

import torch
from torch import nn
from torch.nn.functional import cross_entropy
from torch.nn.utils.rnn import pad_sequence

from trainer import Data, Task

PAD, HIDDEN, NONE = 0, 1, -100  # special words; a target that is not masked


class Counting(Data):
    """Sentences that count upwards, each in steps of its own size, with 5 to 17 words."""

    def __init__(self, vocab_size, size):
        steps = torch.arange(17)
        words = [2 + (at + (1 + at % 3) * steps[: 5 + at * at % 13]) % (vocab_size - 2) for at in range(size)]
        self.training, self.rest = words[: size * 3 // 4], words[size * 3 // 4 :]

    def train(self):
        return self.training

    def evaluation(self):
        return self.rest

    def collate(self, items):  # (B, T), T: the longest sentence of a micro-batch
        return [pad_sequence(items, batch_first=True, padding_value=PAD)] * 2

    def augment(self, inputs, targets, random, training):  # a random number does not depend on the padding
        hidden = (random.uniform(*inputs.shape) < 0.2) & (inputs != PAD)
        return inputs.masked_fill(hidden, HIDDEN), targets.masked_fill(~hidden, NONE)


class Reader(nn.Module):
    """A transformer's encoder. Words (B, T) to scores (B, T, vocab_size)."""

    def __init__(self, vocab_size, width, heads, depth):
        super().__init__()
        self.words, self.places = nn.Embedding(vocab_size, width), nn.Embedding(17, width)
        layer = nn.TransformerEncoderLayer(width, heads, 4 * width, 0.1, "gelu", batch_first=True, norm_first=True)
        self.encoder = nn.TransformerEncoder(layer, depth, enable_nested_tensor=False)
        self.head = nn.Linear(width, vocab_size)

    def forward(self, words):
        x = self.words(words) + self.places(torch.arange(words.shape[1], device=words.device))
        return self.head(self.encoder(x, src_key_padding_mask=words == PAD))


class MaskedWords(Task):
    best = "accuracy"

    def loss(self, output, target):  # the mean over masked words; a rank may have none
        return cross_entropy(output.mT, target, ignore_index=NONE, reduction="sum") / self.weight(target).clamp(min=1)

    def weight(self, target):  # so the gradient is that of the mean over the masked words of all ranks
        return (target != NONE).sum()

    def metrics(self, output, target):
        return {"accuracy": (output.argmax(-1) == target).sum()}  # the default `finish` divides by the weight
