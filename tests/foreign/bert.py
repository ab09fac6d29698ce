"""BERT of transformers with dynamic padding: the longest text of a batch decides its width."""

import torch
from torch.nn.utils.rnn import pad_sequence
from torch.utils.data import Dataset

from trainer import Data, Task


class Sentences(Dataset):
    def __init__(self, size, seed):
        generator = torch.Generator().manual_seed(seed)
        lengths = torch.randint(3, 17, (size,), generator=generator)
        self.texts = [torch.randint(2, 100, (n,), generator=generator) for n in lengths.tolist()]

    def __len__(self):
        return len(self.texts)

    def __getitem__(self, i):
        return self.texts[i], int((self.texts[i] > 50).float().mean() > 0.5)


class Sentiment(Data):
    def train(self):
        return Sentences(256, 1)

    def evaluation(self):
        return Sentences(50, 2)

    def collate(self, items):
        texts, labels = zip(*items, strict=True)
        ids = pad_sequence(texts, batch_first=True)
        return {"input_ids": ids, "attention_mask": (ids > 0).long()}, torch.tensor(labels)


class SequenceClassification(Task):
    best = "accuracy"

    def forward(self, network, inputs, targets):
        return network(**inputs, labels=targets)

    def loss(self, output, target):
        return output.loss

    def metrics(self, output, target):
        return {"accuracy": (output.logits.argmax(-1) == target).sum()}
