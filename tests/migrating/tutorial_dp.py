"""A script as older tutorials have it: torch.nn.DataParallel, one process, ResNet-18. Nothing of this program.

python tutorial_dp.py DATA_ROOT OUT.json STEPS
"""

import json
import sys

import torch
from torch import nn
from torch.utils.data import DataLoader, RandomSampler
from torchvision import transforms
from torchvision.models import resnet18
from tutorial_ddp import Made

BATCH, LR, SEED = 32, 0.01, 0  # samples of all devices


def main(root, out, steps):
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    normalise = transforms.Normalize((0.4914, 0.4822, 0.4465), (0.2470, 0.2435, 0.2616))
    transform = transforms.Compose([transforms.ToTensor(), normalise])
    train, test = (Made(root, train=part, transform=transform) for part in (True, False))
    order = RandomSampler(train, generator=torch.Generator().manual_seed(SEED))
    loader = DataLoader(train, batch_size=BATCH, sampler=order, drop_last=True)

    torch.manual_seed(SEED)
    model = nn.DataParallel(resnet18(num_classes=10)).to(device)
    criterion = nn.CrossEntropyLoss()
    optimizer = torch.optim.SGD(model.parameters(), lr=LR, momentum=0.9, weight_decay=5e-4)

    losses = []
    model.train()
    for images, labels in loader:
        optimizer.zero_grad()
        loss = criterion(model(images.to(device)), labels.to(device))
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
        if len(losses) == steps:
            break

    model.eval()
    correct = 0
    with torch.no_grad():
        for images, labels in DataLoader(test, batch_size=BATCH):
            correct += (model(images.to(device)).argmax(1) == labels.to(device)).sum().item()
    with open(out, "w") as file:
        json.dump({"losses": losses, "accuracy": correct / len(test)}, file)
    torch.save(model.state_dict(), out.replace(".json", ".pt"))


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2], int(sys.argv[3]))
