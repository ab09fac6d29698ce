"""Processes that torchrun starts: DistributedDataParallel, with two backwards before each step.

torchrun --standalone --nproc-per-node 2 tutorial_ddp.py
"""

import os
from contextlib import nullcontext

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, DistributedSampler
from torchvision import transforms
from torchvision.datasets import CIFAR10
from torchvision.models import resnet18

BATCH, ACCUMULATE, EPOCHS = 8, 2, 2  # samples of one process in one backward


def main():
    cuda, local = torch.cuda.is_available(), int(os.environ["LOCAL_RANK"])
    device = torch.device("cuda", local) if cuda else torch.device("cpu")
    dist.init_process_group("nccl" if cuda else "gloo")
    rank, world = dist.get_rank(), dist.get_world_size()

    normalise = transforms.Normalize((0.4914, 0.4822, 0.4465), (0.2470, 0.2435, 0.2616))
    transform = transforms.Compose([transforms.ToTensor(), normalise])
    train = CIFAR10("data", train=True, transform=transform)
    test = CIFAR10("data", train=False, transform=transform)
    sampler = DistributedSampler(train, drop_last=True)
    train_loader = DataLoader(train, BATCH, sampler=sampler, drop_last=True)
    test_loader = DataLoader(test, BATCH, sampler=DistributedSampler(test, shuffle=False))

    torch.manual_seed(0)
    model = DDP(resnet18(num_classes=10).to(device), device_ids=[local] if cuda else None)
    criterion = nn.CrossEntropyLoss()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9, weight_decay=5e-4)

    step, mean = 0, torch.zeros(1, device=device)
    for epoch in range(EPOCHS):
        sampler.set_epoch(epoch)
        model.train()
        for index, (images, labels) in enumerate(train_loader):
            images, labels = images.to(device), labels.to(device)
            last = (index + 1) % ACCUMULATE == 0
            with nullcontext() if last else model.no_sync():
                loss = criterion(model(images), labels) / ACCUMULATE
                loss.backward()
            mean += loss.detach()
            if last:
                optimizer.step()
                optimizer.zero_grad()
                step += 1
                dist.all_reduce(mean)
                if rank == 0:
                    print(f"step {step} loss {mean.item() / world:.7f}")
                mean.zero_()

        model.eval()
        counts = torch.zeros(2, device=device)  # correct, total
        with torch.no_grad():
            for images, labels in test_loader:
                correct = (model(images.to(device)).argmax(1) == labels.to(device)).sum()
                counts += torch.stack([correct, torch.tensor(len(labels), device=device)])
        dist.all_reduce(counts)
        if rank == 0:
            print(f"accuracy {(counts[0] / counts[1]).item():.5f}")
            torch.save(model.module.state_dict(), "tutorial_ddp.pt")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
