"""A LightningModule that is moved here: the class stays as it is, and a task says what its steps said."""

import lightning as L
import torch
from torch import nn
from torch.nn import functional as F

from trainer import Task


class LitAutoEncoder(L.LightningModule):
    def __init__(self, width: int = 32, lr: float = 1e-3):
        super().__init__()
        self.save_hyperparameters()
        self.encoder = nn.Sequential(nn.Linear(64, width), nn.ReLU(), nn.Linear(width, 3))
        self.decoder = nn.Sequential(nn.Linear(3, width), nn.ReLU(), nn.Linear(width, 64))

    def forward(self, x):
        x = x.view(x.size(0), -1)
        return self.decoder(self.encoder(x))

    def training_step(self, batch, batch_idx):
        x, _ = batch
        loss = F.mse_loss(self(x), x.view(x.size(0), -1))
        self.log("train_loss", loss)
        return loss

    def configure_optimizers(self):
        return torch.optim.Adam(self.parameters(), lr=self.hparams.lr)


class Reconstruction(Task):
    def forward(self, network, inputs, targets):
        return network(inputs), inputs

    def loss(self, output, target):
        decoded, x = output
        return F.mse_loss(decoded, x.view(x.size(0), -1))
