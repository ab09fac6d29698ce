"""An optimizer of the lab's own."""

import torch


class Heavy(torch.optim.Optimizer):
    """Momentum and nothing else."""

    def __init__(self, params, lr: float, inertia: float = 0.9) -> None:
        super().__init__(params, {"lr": lr, "inertia": inertia})

    @torch.no_grad()
    def step(self, closure=None):
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.grad is None:
                    continue
                memory = self.state[parameter]
                if "speed" not in memory:
                    memory["speed"] = torch.zeros_like(parameter)
                memory["speed"].mul_(group["inertia"]).add_(parameter.grad)
                parameter.add_(memory["speed"], alpha=-group["lr"])
