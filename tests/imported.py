"""Everything that a command, or a rank, may import on its way: for the fork server, whose copies have it then."""

import atexit
import gc
import importlib
import os
import pkgutil
import sys
from contextlib import suppress

for package in ("trainer", "recipes"):
    for module in pkgutil.walk_packages(importlib.import_module(package).__path__, f"{package}."):
        if not module.name.endswith("__main__"):
            with suppress(ModuleNotFoundError):  # it needs an extra that is not here
                importlib.import_module(module.name)
for name in ("torch._dynamo", "torch.distributed.run", "torch.utils.tensorboard", "tests.ranks"):
    importlib.import_module(name)
sys.modules.pop("torch.distributed.run")  # or it says that it is not the first of its name
gc.collect()
gc.freeze()  # what is never touched again is never copied
atexit.register(os._exit, 0)  # of the server: triton would speak as the interpreter ends
