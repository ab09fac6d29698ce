"""A graph network in plain torch: a batch is one large graph, the nodes of its samples one after the other."""

import torch
from torch import nn
from torch.nn.functional import cross_entropy

from trainer import Data, Task


class Rings(Data):
    """Is a graph one ring (1), or two (0)? It has 6 to 17 nodes in random order, with random features."""

    def __init__(self, size):
        self.graphs, self.size = [graph(index) for index in range(size + size // 2 + 1)], size

    def train(self):
        return self.graphs[: self.size]

    def evaluation(self):
        return self.graphs[self.size :]

    def collate(self, items):
        graphs, labels = zip(*items, strict=True)
        sizes = torch.tensor([len(nodes) for nodes, _ in graphs])
        starts = (sizes.cumsum(0) - sizes).tolist()  # the number of each graph's first node
        owner = torch.repeat_interleave(torch.arange(len(graphs)), sizes)  # (nodes,): the graph of each
        edges = torch.cat([edges + start for (_, edges), start in zip(graphs, starts, strict=True)], 1)
        return {"nodes": torch.cat([nodes for nodes, _ in graphs]), "edges": edges, "owner": owner}, torch.stack(labels)


def graph(index):
    generator = torch.Generator().manual_seed(index)
    size, label = 6 + index % 12, index % 2
    ring = torch.randperm(size, generator=generator)
    rings = [ring] if label else [ring[: size // 2], ring[size // 2 :]]
    edges = torch.cat([torch.stack([one, one.roll(1)]) for one in rings], 1)
    return (torch.randn(size, 8, generator=generator), torch.cat([edges, edges.flip(0)], 1)), torch.tensor(label)


class Messages(nn.Module):
    """Layers in which every node adds up what its neighbours say. A batch of graphs to scores (B, 2)."""

    def __init__(self, width, depth):
        super().__init__()
        self.embed, self.head = nn.Linear(8, width), nn.Linear(width, 2)
        self.layers = nn.ModuleList(nn.Linear(2 * width, width) for _ in range(depth))

    def forward(self, batch):
        x, (source, target) = self.embed(batch["nodes"]), batch["edges"]
        for layer in self.layers:
            heard = torch.zeros_like(x).index_add(0, target, x[source])
            x = x + layer(torch.cat([x, heard], 1)).relu()
        owner = batch["owner"]
        return self.head(x.new_zeros(owner[-1] + 1, x.shape[1]).index_add(0, owner, x))


class OneRing(Task):
    best = "accuracy"

    def loss(self, output, target):
        return cross_entropy(output, target)

    def metrics(self, output, target):
        return {"accuracy": (output.argmax(1) == target).sum()}
