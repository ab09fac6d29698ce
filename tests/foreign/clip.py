"""CLIP: two towers, a learned temperature, and a loss over the pairs of all ranks (as open_clip's ClipLoss)."""

import numpy as np
import torch
from torch import nn
from torch.nn import functional as F

from recipes.vision.digits import Digits
from recipes.vision.images import Images
from trainer import Task, gather


class Captions(Digits):
    """Each digit with a text: five tokens that say its class and its number."""

    def train(self):
        return self.captioned(super().train())

    def evaluation(self):
        return self.captioned(super().evaluation())

    @staticmethod
    def captioned(images):
        number = torch.arange(len(images.labels))
        tokens = torch.stack([images.labels, *((number // 8**k) % 8 + 10 for k in range(4))], dim=1)
        return Images(images.images, tokens)


class CLIP(nn.Module):
    def __init__(self, embed_dim=32, vocab_size=18, context_length=5, width=32, heads=4, layers=2):
        super().__init__()
        self.visual = nn.Sequential(
            nn.Conv2d(1, width, 3, 2, 1),
            nn.GELU(),
            nn.Conv2d(width, width, 3, 2, 1),
            nn.GELU(),
            nn.Flatten(),
            nn.Linear(width * 4, embed_dim),
        )
        self.token_embedding = nn.Embedding(vocab_size, width)
        self.positional_embedding = nn.Parameter(torch.empty(context_length, width))
        layer = nn.TransformerEncoderLayer(
            width, heads, width * 4, dropout=0.1, activation="gelu", batch_first=True, norm_first=True
        )
        self.transformer = nn.TransformerEncoder(layer, layers, enable_nested_tensor=False)
        self.ln_final = nn.LayerNorm(width)
        self.text_projection = nn.Parameter(torch.empty(width, embed_dim))
        self.logit_scale = nn.Parameter(torch.ones([]) * np.log(1 / 0.07))
        nn.init.normal_(self.positional_embedding, std=0.01)
        nn.init.normal_(self.text_projection, std=width**-0.5)

    def encode_image(self, image):
        return F.normalize(self.visual(image), dim=-1)

    def encode_text(self, text):
        x = self.token_embedding(text) + self.positional_embedding
        x = self.ln_final(self.transformer(x))
        return F.normalize(x[:, -1] @ self.text_projection, dim=-1)

    def forward(self, image, text):
        return self.encode_image(image), self.encode_text(text), self.logit_scale.exp()


class ClipLoss(Task):
    def forward(self, network, inputs, targets):
        return network(inputs, targets)

    def loss(self, output, target):
        image, text, scale = output
        all_image, all_text = gather(image), gather(text)
        logits = scale * all_image @ all_text.T
        labels = torch.arange(len(logits), device=logits.device)
        return (F.cross_entropy(logits, labels) + F.cross_entropy(logits.T, labels)) / 2
