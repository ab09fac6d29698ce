"""A script as tutorials have it: torchrun, DistributedSampler, DDP, ResNet-18, CIFAR-10. Nothing of this program.

torchrun --standalone --nproc-per-node 2 tutorial_ddp.py DATA_ROOT OUT.json STEPS
"""

import json
import os
import sys

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, DistributedSampler
from torchvision import transforms
from torchvision.datasets import CIFAR10
from torchvision.models import resnet18

BATCH, LR, SEED = 16, 0.01, 0  # samples of one process


class Made(CIFAR10):
    """CIFAR-10 without the question whether its files are the published ones: a test has made these."""

    def _check_integrity(self):
        return True

    def _load_meta(self):
        self.classes = [str(label) for label in range(10)]


def main(root, out, steps):
    dist.init_process_group("nccl" if torch.cuda.is_available() else "gloo")
    rank = dist.get_rank()
    device = torch.device("cuda", int(os.environ["LOCAL_RANK"])) if torch.cuda.is_available() else torch.device("cpu")

    normalise = transforms.Normalize((0.4914, 0.4822, 0.4465), (0.2470, 0.2435, 0.2616))
    transform = transforms.Compose([transforms.ToTensor(), normalise])
    train, test = (Made(root, train=part, transform=transform) for part in (True, False))
    sampler = DistributedSampler(train, shuffle=True, seed=SEED, drop_last=True)
    loader = DataLoader(train, batch_size=BATCH, sampler=sampler, drop_last=True)
    test_loader = DataLoader(test, batch_size=BATCH, sampler=DistributedSampler(test, shuffle=False))

    torch.manual_seed(SEED)
    model = DDP(resnet18(num_classes=10).to(device))
    criterion = nn.CrossEntropyLoss()
    optimizer = torch.optim.SGD(model.parameters(), lr=LR, momentum=0.9, weight_decay=5e-4)

    losses, epoch = [], 0
    while len(losses) < steps:
        sampler.set_epoch(epoch)
        model.train()
        for images, labels in loader:
            if len(losses) == steps:
                break
            images, labels = images.to(device), labels.to(device)
            optimizer.zero_grad()
            loss = criterion(model(images), labels)
            loss.backward()
            optimizer.step()
            mean = loss.detach().clone()
            dist.all_reduce(mean)
            losses.append(mean.item() / dist.get_world_size())
        epoch += 1

    model.eval()
    counts = torch.zeros(2, device=device)  # correct, total
    with torch.no_grad():
        for images, labels in test_loader:
            said = model(images.to(device)).argmax(1)
            counts += torch.tensor([(said == labels.to(device)).sum().item(), len(labels)], device=device)
    dist.all_reduce(counts)
    if rank == 0:
        with open(out, "w") as file:
            json.dump({"losses": losses, "accuracy": (counts[0] / counts[1]).item()}, file)
        torch.save(model.module.state_dict(), out.replace(".json", ".pt"))
    dist.destroy_process_group()


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2], int(sys.argv[3]))
