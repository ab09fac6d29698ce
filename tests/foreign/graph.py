"""A graph network: a batch is one large graph of all its graphs, with a vector that says whose each node is."""

import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.data import Dataset

from trainer import Data, Task


class Graphs(Dataset):
    """Random graphs of 4 to 9 nodes; the class says whether they have many edges."""

    def __init__(self, size, seed):
        generator = torch.Generator().manual_seed(seed)
        self.items = []
        for _ in range(size):
            n = int(torch.randint(4, 10, (1,), generator=generator))
            edges = torch.nonzero(torch.rand(n, n, generator=generator) < torch.rand(1, generator=generator)).t()
            y = int(edges.shape[1] > n * n / 2)
            self.items.append((torch.randn(n, 5, generator=generator), edges, y))

    def __len__(self):
        return len(self.items)

    def __getitem__(self, i):
        return self.items[i]


class Molecules(Data):
    def train(self):
        return Graphs(256, 1)

    def evaluation(self):
        return Graphs(45, 2)

    def collate(self, items):
        xs, edges, ys = zip(*items, strict=True)
        sizes = torch.tensor([len(x) for x in xs])
        offsets = torch.cat([sizes.new_zeros(1), sizes.cumsum(0)[:-1]])
        return {
            "x": torch.cat(xs),
            "edge_index": torch.cat([e + o for e, o in zip(edges, offsets, strict=True)], dim=1),
            "batch": torch.repeat_interleave(torch.arange(len(xs)), sizes),
        }, torch.tensor(ys)


class GCNConv(nn.Module):
    def __init__(self, a, b):
        super().__init__()
        self.lin = nn.Linear(a, b)

    def forward(self, x, edge_index):
        src, dst = edge_index
        h = self.lin(x)
        return h + torch.zeros_like(h).index_add(0, dst, h[src])


class GCN(nn.Module):
    def __init__(self, hidden=32, classes=2):
        super().__init__()
        self.conv1, self.conv2 = GCNConv(5, hidden), GCNConv(hidden, hidden)
        self.lin = nn.Linear(hidden, classes)

    def forward(self, data):
        x = F.relu(self.conv1(data["x"], data["edge_index"]))
        x = F.relu(self.conv2(x, data["edge_index"]))
        graphs = int(data["batch"].max()) + 1
        pooled = x.new_zeros(graphs, x.shape[1]).index_add(0, data["batch"], x)
        return self.lin(F.dropout(pooled, p=0.1, training=self.training))


class GraphClassification(Task):
    best = "accuracy"

    def loss(self, output, target):
        return F.cross_entropy(output, target)

    def metrics(self, output, target):
        return {"accuracy": (output.argmax(1) == target).sum()}
