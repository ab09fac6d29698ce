"""A VQ-VAE whose codebook follows moving averages: its forward puts a new parameter in place of the old one."""

import torch
from torch import nn
from torch.nn import functional as F

from trainer import Task


class VectorQuantizerEMA(nn.Module):
    def __init__(self, num_embeddings, embedding_dim, commitment_cost, decay, epsilon=1e-5):
        super().__init__()
        self._embedding_dim, self._num_embeddings = embedding_dim, num_embeddings
        self._embedding = nn.Embedding(num_embeddings, embedding_dim)
        self._embedding.weight.data.normal_()
        self._commitment_cost, self._decay, self._epsilon = commitment_cost, decay, epsilon
        self.register_buffer("_ema_cluster_size", torch.zeros(num_embeddings))
        self._ema_w = nn.Parameter(torch.Tensor(num_embeddings, embedding_dim))
        self._ema_w.data.normal_()

    def forward(self, inputs):
        inputs = inputs.permute(0, 2, 3, 1).contiguous()
        flat_input = inputs.view(-1, self._embedding_dim)
        distances = torch.cdist(flat_input, self._embedding.weight)
        encodings = F.one_hot(distances.argmin(1), self._num_embeddings).to(flat_input.dtype)
        quantized = torch.matmul(encodings, self._embedding.weight).view(inputs.shape)
        if self.training:
            self._ema_cluster_size = self._ema_cluster_size * self._decay + (1 - self._decay) * encodings.sum(0)
            n = self._ema_cluster_size.sum()
            self._ema_cluster_size = (
                (self._ema_cluster_size + self._epsilon) / (n + self._num_embeddings * self._epsilon) * n
            )
            dw = torch.matmul(encodings.t(), flat_input)
            self._ema_w = nn.Parameter(self._ema_w * self._decay + (1 - self._decay) * dw)
            self._embedding.weight = nn.Parameter(self._ema_w / self._ema_cluster_size.unsqueeze(1))
        e_latent_loss = F.mse_loss(quantized.detach(), inputs)
        quantized = inputs + (quantized - inputs).detach()
        return self._commitment_cost * e_latent_loss, quantized.permute(0, 3, 1, 2).contiguous()


class VQVAE(nn.Module):
    def __init__(self, hidden=16, dim=8, codes=16):
        super().__init__()
        self.encoder = nn.Sequential(nn.Conv2d(1, hidden, 4, 2, 1), nn.ReLU(), nn.Conv2d(hidden, dim, 1))
        self.vq = VectorQuantizerEMA(codes, dim, commitment_cost=0.25, decay=0.99)
        self.decoder = nn.Sequential(nn.Conv2d(dim, hidden, 1), nn.ReLU(), nn.ConvTranspose2d(hidden, 1, 4, 2, 1))

    def forward(self, x):
        vq_loss, quantized = self.vq(self.encoder(x))
        return vq_loss, self.decoder(quantized), x


class Reconstruct(Task):
    def loss(self, output, target):
        vq_loss, recon, x = output
        return {"vq": vq_loss, "recon": F.mse_loss(recon, x) / 0.1}
