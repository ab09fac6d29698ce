"""A loop around an Accelerator, with two backwards before each step.

accelerate launch --num_processes 2 tutorial_accelerate.py
"""

import torch
from accelerate import Accelerator
from accelerate.utils import DataLoaderConfiguration, set_seed
from lab.net import Net
from torch.nn.functional import cross_entropy
from torch.utils.data import DataLoader
from torchvision import transforms
from torchvision.datasets import FashionMNIST

BATCH, ACCUMULATE, EPOCHS = 20, 2, 2  # samples of one process in one backward


def main():
    seeded = DataLoaderConfiguration(use_seedable_sampler=True, data_seed=0)
    accelerator = Accelerator(gradient_accumulation_steps=ACCUMULATE, dataloader_config=seeded)
    transform = transforms.Compose([transforms.ToTensor(), transforms.Normalize((0.2860,), (0.3530,))])
    train = FashionMNIST("data", train=True, transform=transform)
    test = FashionMNIST("data", train=False, transform=transform)
    train_loader = DataLoader(train, BATCH, shuffle=True, drop_last=True)
    test_loader = DataLoader(test, BATCH)

    set_seed(0)
    model = Net()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, weight_decay=0.01)
    # not divided by the processes: a prepared scheduler makes a step for each of them
    steps = EPOCHS * len(train_loader) // ACCUMULATE
    scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, T_max=steps)
    model, optimizer, scheduler = accelerator.prepare(model, optimizer, scheduler)
    train_loader, test_loader = accelerator.prepare(train_loader, test_loader)

    step, losses = 0, []
    for _ in range(EPOCHS):
        model.train()
        for images, labels in train_loader:
            with accelerator.accumulate(model):
                loss = cross_entropy(model(images), labels)
                accelerator.backward(loss)
                if accelerator.sync_gradients:
                    accelerator.clip_grad_norm_(model.parameters(), 1.0)
                optimizer.step()
                scheduler.step()
                optimizer.zero_grad()
            losses.append(accelerator.gather(loss.detach()).mean().item())
            if accelerator.sync_gradients:
                step += 1
                accelerator.print(f"step {step} loss {sum(losses) / len(losses):.7f}")
                losses.clear()

        model.eval()
        correct = total = 0
        with torch.no_grad():
            for images, labels in test_loader:
                said, wanted = accelerator.gather_for_metrics((model(images).argmax(1), labels))
                correct += (said == wanted).sum().item()
                total += len(wanted)
        accelerator.print(f"accuracy {correct / total:.5f}")
    accelerator.save_model(model, "tutorial_accelerate")


if __name__ == "__main__":
    main()
