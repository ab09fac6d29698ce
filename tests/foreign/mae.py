"""A masked autoencoder of transformers: its forward masks at random, and gives its own loss."""

from trainer import Task


class MaskedImages(Task):
    def forward(self, network, inputs, targets):
        return network(pixel_values=inputs)

    def loss(self, output, target):
        return output.loss
