"""Text classification with EmbeddingBag (as PyTorch's tutorial): one long row of words, and where each text begins."""

import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.data import Dataset

from trainer import Data, Task


class News(Dataset):
    def __init__(self, size, seed):
        generator = torch.Generator().manual_seed(seed)
        lengths = torch.randint(3, 17, (size,), generator=generator)
        self.texts = [torch.randint(0, 100, (n,), generator=generator) for n in lengths.tolist()]

    def __len__(self):
        return len(self.texts)

    def __getitem__(self, i):
        return int(self.texts[i].float().mean() // 25), self.texts[i]


class AgNews(Data):
    def train(self):
        return News(256, 1)

    def evaluation(self):
        return News(50, 2)

    def collate(self, batch):
        label_list, text_list, offsets = [], [], [0]
        for label, text in batch:
            label_list.append(label)
            text_list.append(text)
            offsets.append(text.size(0))
        return (torch.cat(text_list), torch.tensor(offsets[:-1]).cumsum(dim=0)), torch.tensor(label_list)


class TextClassificationModel(nn.Module):
    def __init__(self, vocab_size=100, embed_dim=16, num_class=4):
        super().__init__()
        self.embedding = nn.EmbeddingBag(vocab_size, embed_dim, sparse=True)
        self.fc = nn.Linear(embed_dim, num_class)
        self.init_weights()

    def init_weights(self):
        initrange = 0.5
        self.embedding.weight.data.uniform_(-initrange, initrange)
        self.fc.weight.data.uniform_(-initrange, initrange)
        self.fc.bias.data.zero_()

    def forward(self, text, offsets):
        return self.fc(self.embedding(text, offsets))


class Topic(Task):
    best = "accuracy"

    def forward(self, network, inputs, targets):
        return network(*inputs)

    def loss(self, output, target):
        return F.cross_entropy(output, target)

    def metrics(self, output, target):
        return {"accuracy": (output.argmax(1) == target).sum()}
