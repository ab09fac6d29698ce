"""The names of torch that it may move without a word: they are on this torch, and each in one file of the product.

So a new torch is answered in one place. Why there is no public name, that file says.
"""

from __future__ import annotations

import ast
import importlib
from collections import Counter
from functools import reduce
from pathlib import Path
from typing import Any

import torch._inductor.config
import torch.distributed._symmetric_memory
import torch.distributed.tensor  # torch does not import it by itself, and names in it are looked up here
import torch.testing._internal.distributed.fake_pg  # noqa: F401  (as with the others)

CHECKOUT = Path(__file__).resolve().parent.parent
PRODUCT = sorted(path for name in ("trainer", "recipes", "scripts") for path in (CHECKOUT / name).rglob("*.py"))
PRIVATE = [
    "torch.distributed.tensor.parallel.ColwiseParallel._apply", "torch.nn.modules.batchnorm._BatchNorm",
    "torch.nn.modules.dropout._DropoutNd", "torch._foreach_mul_", "torch._foreach_copy_", "torch._foreach_norm",
    "torch.distributed.distributed_c10d._set_pg_timeout", "torch.nn.LSTM(1, 1)._flat_weight_refs",
    "torch.utils._python_dispatch", "torch._subclasses", "torch.ops.aten._local_scalar_dense",
    "torch.ops.aten._unique2", "torch.zeros(1)._version", "torch.testing._internal",
    "torch.distributed.tensor._sharding_prop", "torch.distributed.Reducer._rebuild_buckets",
    "torch.ops.aten._log_softmax", "torch.ops.aten._log_softmax_backward_data", "torch.zeros(1)._is_view",
    "torch.autograd.graph._engine_run_backward", "torch._C", "torch._C._current_graph_task_id", "torch._inductor",
    "torch._functorch", "torch.Tensor._base",
]  # fmt: skip


def step(holder: Any, part: str) -> Any:
    """One level of a dotted name; `Class(1, 2)` in it means an object of that class."""
    name, called, words = part.partition("(")
    value = getattr(holder, name)
    return value(*ast.literal_eval(f"[{words.rstrip(')')}]")) if called else value


def private_names(text: str) -> set[str]:
    """Names with an underscore that a file imports from torch or reads from anything but its own objects."""
    names = set()
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.ImportFrom) and (node.module or "").split(".")[0] in ("torch", "torchvision"):
            path = [f"{node.module}.{alias.name}" for alias in node.names]
            names |= {part for name in path for part in name.split(".") if part.startswith("_")}
        if isinstance(node, ast.Attribute) and node.attr.startswith("_") and not node.attr.endswith("_target_"):
            # a namedtuple has some by its documentation
            public = node.attr.startswith("__") or node.attr in ("_replace", "_fields", "_make")
            if ast.unparse(node.value) not in ("self", "cls", "super()", "os", "sys") and not public:
                names.add(node.attr)
    return names


def test_each_private_name_of_torch_is_there_and_in_one_file() -> None:
    text = "from torch._dynamo import x\nfrom torch.nn import _Y\nlayer._z, self._own, torch.a._b, torch.c.__d__\n"
    assert private_names(text) == {"_dynamo", "_Y", "_z", "_b"}
    for name in PRIVATE:
        first, *parts = name.split(".")
        assert reduce(step, parts, importlib.import_module(first)) is not None, name
    used = Counter(name for path in PRODUCT for name in private_names(path.read_text()))
    assert [name for name, files in used.items() if files > 1] == []
    assert used.keys() == {name.rsplit(".", 1)[-1] for name in PRIVATE}
