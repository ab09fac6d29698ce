"""Processes that the script starts itself: torch.multiprocessing.spawn.

python tutorial_spawn.py
"""

import os

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from lab.net import Net
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, DistributedSampler
from torchvision import transforms
from torchvision.datasets import FashionMNIST

BATCH, EPOCHS, WORLD = 16, 2, 2  # samples of one process


def train(rank, world):
    os.environ.setdefault("MASTER_ADDR", "localhost")
    os.environ.setdefault("MASTER_PORT", "29500")
    cuda = torch.cuda.is_available()
    device = torch.device("cuda", rank) if cuda else torch.device("cpu")
    dist.init_process_group("nccl" if cuda else "gloo", rank=rank, world_size=world)

    transform = transforms.Compose([transforms.ToTensor(), transforms.Normalize((0.2860,), (0.3530,))])
    train_set = FashionMNIST("data", train=True, transform=transform)
    test_set = FashionMNIST("data", train=False, transform=transform)
    sampler = DistributedSampler(train_set)
    train_loader = DataLoader(train_set, BATCH, sampler=sampler)
    test_loader = DataLoader(test_set, BATCH, sampler=DistributedSampler(test_set, shuffle=False))

    torch.manual_seed(0)
    model = DDP(Net().to(device), device_ids=[rank] if cuda else None)
    criterion = nn.CrossEntropyLoss()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, step_size=1, gamma=0.5)

    step = 0
    for epoch in range(EPOCHS):
        sampler.set_epoch(epoch)
        model.train()
        for images, labels in train_loader:
            images, labels = images.to(device), labels.to(device)
            optimizer.zero_grad()
            loss = criterion(model(images), labels)
            loss.backward()
            nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            step += 1
            mean = loss.detach().clone()
            dist.all_reduce(mean)
            if rank == 0:
                print(f"step {step} loss {mean.item() / world:.7f}")
        scheduler.step()

        model.eval()
        counts = torch.zeros(2, device=device)  # correct, total
        with torch.no_grad():
            for images, labels in test_loader:
                correct = (model(images.to(device)).argmax(1) == labels.to(device)).sum()
                counts += torch.stack([correct, torch.tensor(len(labels), device=device)])
        dist.all_reduce(counts)
        if rank == 0:
            print(f"accuracy {(counts[0] / counts[1]).item():.5f}")
            torch.save({"epoch": epoch, "model": model.state_dict()}, "tutorial_spawn.pt")
    dist.destroy_process_group()


if __name__ == "__main__":
    mp.spawn(train, args=(WORLD,), nprocs=WORLD)
