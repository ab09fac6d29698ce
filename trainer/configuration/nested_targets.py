"""What may stand inside a group's node: a configuration is data, and a stranger may have written it."""

from __future__ import annotations

from typing import Any

from torch import nn
from torch.distributed.tensor.parallel import ParallelStyle

from trainer.configuration.import_allowlist import Names, real_name
from trainer.data.data import Data
from trainer.learning.task import Task
from trainer.refusal import Refusal

# What a configuration is for, from packages that were not written for this. torchvision's older transforms are plain
# classes, which is why their module is named; of data sets only those are here that hold what they are given.
KINDS = (nn.Module, Task, Data, ParallelStyle)
MODULES = ("torchvision.transforms.", "torch.utils.data.dataset", "trainer.learning.schedule", "recipes.")
ELSEWHERE = "torch.distributed.nn."  # networks that are made on other machines


def refuse_inside(target: Any, names: Names, where: str) -> None:
    """Refuse what a node inside a group's may not call, though a configuration may name it.

    Of a lab everything may be called, of packages that the command line trusts every class, of others the classes of
    some kinds and records: a public class is not harmless for that. Making one of torch's may start a process
    (SubprocessHandler of torch.distributed.elastic) or write to a path (PackageExporter, SummaryWriter,
    every data set of torchvision's that downloads).
    """
    if names.beside(target):
        return
    kinds = f"{', '.join(kind.__name__ for kind in KINDS)}, transform or dataclass"
    if not isinstance(target, type):
        remedy = f"a class may be that is a {kinds}, or a function of your lab that calls this one"
        raise Refusal(f"{where}: {real_name(target)} may not be called here: it is a function; {remedy}")
    of_kind = issubclass(target, KINDS) and not target.__module__.startswith(ELSEWHERE)
    known = of_kind or target.__module__.startswith(MODULES) or _is_record(target)
    if not known and not names.trusted(target):
        package = target.__module__.split(".")[0]
        remedy = f"if you know what it does, name its package on the command line: trust=[{package}]"
        why = f"it is no {kinds} that keeps to itself"
        raise Refusal(f"{where}: {real_name(target)} may not be called here: {why}; {remedy}")


def _is_record(kind: type) -> bool:
    """Does making one only keep what it is given?

    Dataclasses and named tuples have a constructor that Python wrote, and it stores, unless they say what comes after
    it. So do the configurations of transformers, which were neither before its version 5.
    """
    # its own, for a class that inherits may have any; and not one that it wrote itself
    made = getattr(vars(kind).get("__init__"), "__code__", None)
    generated = "__dataclass_params__" in vars(kind) and made is not None and made.co_filename == "<string>"
    named = issubclass(kind, tuple) and hasattr(kind, "_fields")
    configuration = any(base.__module__ == "transformers.configuration_utils" for base in kind.__mro__)
    return (generated and not hasattr(kind, "__post_init__")) or named or configuration
