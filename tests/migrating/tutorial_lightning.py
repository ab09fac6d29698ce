"""A LightningModule and Lightning's Trainer, which starts the processes.

python tutorial_lightning.py
"""

import lightning as L
import torch
from lab.net import Net
from lightning.pytorch.callbacks import EarlyStopping, ModelCheckpoint
from lightning.pytorch.loggers import CSVLogger
from torch.nn.functional import cross_entropy
from torch.utils.data import DataLoader
from torchvision import transforms
from torchvision.datasets import FashionMNIST

BATCH = 20  # samples of one process


class Classifier(L.LightningModule):
    def __init__(self, lr=1e-3):
        super().__init__()
        self.save_hyperparameters()
        self.net = Net()

    def training_step(self, batch, index):
        images, labels = batch
        loss = cross_entropy(self.net(images), labels)
        self.log("loss", loss, sync_dist=True)
        return loss

    def validation_step(self, batch, index):
        images, labels = batch
        right = (self.net(images).argmax(1) == labels).float().mean()
        self.log("accuracy", right, sync_dist=True, prog_bar=True)

    def configure_optimizers(self):
        optimizer = torch.optim.AdamW(self.parameters(), lr=self.hparams.lr, weight_decay=0.01)
        steps = self.trainer.estimated_stepping_batches
        schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, T_max=steps)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": schedule, "interval": "step"}}


def main():
    transform = transforms.Compose([transforms.ToTensor(), transforms.Normalize((0.2860,), (0.3530,))])
    train = FashionMNIST("data", train=True, transform=transform)
    test = FashionMNIST("data", train=False, transform=transform)

    L.seed_everything(0)
    trainer = L.Trainer(
        max_epochs=2,
        devices=2,
        strategy="ddp",
        gradient_clip_val=1.0,
        log_every_n_steps=1,
        logger=CSVLogger("logs", name="tutorial", version=0),
        callbacks=[
            ModelCheckpoint("checkpoints", "best", monitor="accuracy", mode="max"),
            EarlyStopping("accuracy", mode="max", patience=5),
        ],
    )
    trainer.fit(Classifier(), DataLoader(train, BATCH, shuffle=True, drop_last=True), DataLoader(test, BATCH))


if __name__ == "__main__":
    main()
