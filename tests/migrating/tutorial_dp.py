"""One process, every GPU: torch.nn.DataParallel.

python tutorial_dp.py
"""

import torch
from torch import nn
from torch.utils.data import DataLoader, RandomSampler
from torchvision import transforms
from torchvision.datasets import CIFAR10
from torchvision.models import resnet18

BATCH, EPOCHS = 32, 1  # samples of all GPUs together


def main():
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    normalise = transforms.Normalize((0.4914, 0.4822, 0.4465), (0.2470, 0.2435, 0.2616))
    transform = transforms.Compose([transforms.ToTensor(), normalise])
    train = CIFAR10("data", train=True, download=True, transform=transform)
    test = CIFAR10("data", train=False, download=True, transform=transform)
    order = RandomSampler(train, generator=torch.Generator().manual_seed(0))
    train_loader = DataLoader(train, BATCH, sampler=order, drop_last=True)
    test_loader = DataLoader(test, BATCH)

    torch.manual_seed(0)
    model = nn.DataParallel(resnet18(num_classes=10)).to(device)
    criterion = nn.CrossEntropyLoss()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9, weight_decay=5e-4)

    step = 0
    for _ in range(EPOCHS):
        model.train()
        for images, labels in train_loader:
            images, labels = images.to(device), labels.to(device)
            optimizer.zero_grad()
            loss = criterion(model(images), labels)
            loss.backward()
            optimizer.step()
            step += 1
            print(f"step {step} loss {loss.item():.7f}")

        model.eval()
        correct = 0
        with torch.no_grad():
            for images, labels in test_loader:
                correct += (model(images.to(device)).argmax(1) == labels.to(device)).sum().item()
        print(f"accuracy {correct / len(test):.5f}")
    torch.save(model.state_dict(), "tutorial_dp.pt")


if __name__ == "__main__":
    main()
