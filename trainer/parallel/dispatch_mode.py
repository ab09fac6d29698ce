"""torch's mode that sees every operator. torch's pages show it under this name, as there is no public one."""

from torch.utils._python_dispatch import TorchDispatchMode

__all__ = ["TorchDispatchMode"]
