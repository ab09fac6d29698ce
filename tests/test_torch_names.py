"""The names of torch that it may move without a word, each in one place of the product, and why there is no other."""

import ast
import importlib
import json
from functools import reduce
from inspect import signature
from pathlib import Path
from typing import Any

import pytest
import torch
import torch._inductor.config
import torch.distributed._symmetric_memory
import torch.distributed.tensor  # torch does not import it by itself, and names in it are looked up here
import torch.testing._internal.distributed.fake_pg

CHECKOUT = Path(__file__).resolve().parent.parent
PRODUCT = sorted(path for name in ("trainer", "recipes", "scripts") for path in (CHECKOUT / name).rglob("*.py"))

# name → the one file that uses it; the reason stands above
PRIVATE = {
    # How torch splits a layer by a style; whoever splits a little more than it does has no public name to call.
    "torch.distributed.tensor.parallel.ColwiseParallel._apply": "recipes/lora_splits.py",
    # The base of all BatchNorms, torch's SyncBatchNorm among them: whoever asks a network for its statistics means
    # these, too, and the public ones (1d, 2d, 3d) have no other base in common.
    "torch.nn.modules.batchnorm._BatchNorm": "trainer/parallel/batch_norm.py",
    # The base of all dropouts: the public ones are six classes, and a seventh would be overlooked.
    "torch.nn.modules.dropout._DropoutNd": "trainer/strategies/base.py",
    # Multiplies many tensors in one kernel; the public way is a kernel for each parameter.
    "torch._foreach_mul_": "trainer/parallel/gradient_clipping.py",
    # Copies many tensors in one kernel; the public way is a kernel for each buffer of the network, in every step.
    "torch._foreach_copy_": "trainer/strategies/loss_scaler.py",
    # The norms of many tensors in one kernel; the public way is a kernel for each parameter that tensor ranks share.
    "torch._foreach_norm": "trainer/parallel/tensor_parallel.py",
    # Gives a group's collectives another timeout; torch 2.15 has a public name for it, 2.11 to 2.14 only this one.
    "torch.distributed.distributed_c10d._set_pg_timeout": "trainer/parallel/process_group.py",
    # Weak references of LSTMs and their like to their weights, which keep these from being swapped; in 2.11 to 2.15.
    "torch.nn.LSTM(1, 1)._flat_weight_refs": "trainer/parallel/meta_model.py",
    # The mode that sees operators; torch's pages show it under this name, as there is no other.
    "torch.utils._python_dispatch": "trainer/parallel/dispatch_mode.py",
    # Tensors that have a shape and no values, and lie on any device: torch's pages describe them, under this name.
    "torch._subclasses": "trainer/parallel/pipeline/fake_forward.py",
    # What bool(), item() and unique() of a tensor are for who sees operators; the public names are not seen there.
    "torch.ops.aten._local_scalar_dense": "trainer/parallel/unused_parameters.py",
    "torch.ops.aten._unique2": "trainer/parallel/unused_parameters.py",
    # Was a tensor written to? The public way is to copy and compare it, where what is no number equals nothing.
    "torch.zeros(1)._version": "trainer/parallel/pipeline/fake_forward.py",
    # The process group that sends nothing, and its options; there is no other way to name a rank of many without them.
    "torch.testing._internal": "trainer/parallel/fake_group.py",
    # Where DTensor runs an operator to learn the shape of a whole result, which no rank computes; in 2.15.
    "torch.distributed.tensor._sharding_prop": "trainer/jobs/plan/fake_mode.py",
    # Where DDP orders its buckets anew, by numbers that tensors without values do not have; in 2.11 to 2.15.
    "torch.distributed.Reducer._rebuild_buckets": "trainer/jobs/plan/fake_mode.py",
    # A softmax that reads fp16 and writes fp32, as GPUs have it; in 2.11 to 2.15.
    "torch.ops.aten._log_softmax": "trainer/jobs/plan/fake_mode.py",
    "torch.ops.aten._log_softmax_backward_data": "trainer/jobs/plan/fake_mode.py",
    # Is a tensor a view of another one? FSDP asks the same of outputs; there is no public name.
    "torch.zeros(1)._is_view": "trainer/strategies/loss.py",
    # What `backward` calls once it has asked what its arguments are, which takes a tenth of a small network's; in 2.11
    # to 2.15.
    "torch.autograd.graph._engine_run_backward": "trainer/strategies/loss.py",
    # Does autograd's engine call? What is recomputed in a backward is no call of its own; torch's checkpoint asks so.
    "torch._C": "trainer/parallel/activation_checkpointing.py",
    "torch._C._current_graph_task_id": "trainer/parallel/activation_checkpointing.py",
    # torch.compile's own backend, called by ours, which counts graphs; torch.compile(mode=…) takes no other backend.
    "torch._inductor": "trainer/parallel/compile.py",
    # The switch of the cache that hands out graphs with their gradients, at which nobody has looked; in 2.11 to 2.15.
    "torch._functorch": "trainer/parallel/compile.py",
    # What a tensor is a view of, which it keeps alive; torch's page on views describes it.
    "torch.Tensor._base": "trainer/parallel/meta_model.py",
}


def found(name: str) -> Any:
    """What stands behind a dotted name; `Class(1, 2)` in it means an object of that class."""
    first, *parts = name.split(".")
    return reduce(step, parts, importlib.import_module(first))


def step(holder: Any, part: str) -> Any:
    """One level of a dotted name."""
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
            owner = ast.unparse(node.value)
            public = node.attr.startswith("__") or node.attr in (
                "_replace",
                "_fields",
                "_make",
            )  # a namedtuple's, by its documentation
            if owner not in ("self", "cls", "super()", "os", "sys") and not public:
                names.add(node.attr)
    return names


@pytest.mark.parametrize("name", PRIVATE)
def test_a_private_name_is_still_there(name: str) -> None:
    assert found(name) is not None


def test_the_walk_sees_private_names() -> None:
    text = "from torch._dynamo import x\nfrom torch.nn import _Y\nlayer._z, self._own, torch.a._b, torch.c.__d__\n"
    assert private_names(text) == {"_dynamo", "_Y", "_z", "_b"}


def test_each_private_name_stands_in_one_file_and_here() -> None:
    used = {(name, str(path.relative_to(CHECKOUT))) for path in PRODUCT for name in private_names(path.read_text())}
    assert used == {(name.rsplit(".", 1)[-1], home) for name, home in PRIVATE.items()}


# Names without an underscore that torch's documentation does not promise.


@pytest.mark.parametrize("kind", [torch.optim.SGD, torch.optim.Adam, torch.optim.AdamW])
def test_a_fused_step_is_left_out_on_the_device_when_found_inf_says_so(kind: type[torch.optim.Optimizer]) -> None:
    """trainer/strategies/loss_scaler.py: torch's own GradScaler talks to the optimizers through these attributes."""
    parameter = torch.nn.Parameter(torch.ones(3))
    parameter.grad = torch.ones(3)
    optimizer: Any = kind([parameter], lr=0.1, fused=True)  # type: ignore[call-arg]  # the base class knows no lr
    optimizer.grad_scale, optimizer.found_inf = None, torch.ones(())
    optimizer.step()
    assert parameter.tolist() == [1, 1, 1]
    optimizer.found_inf = torch.zeros(())
    optimizer.step()
    assert parameter[0] < 1


def test_the_record_of_the_last_collectives_can_be_read() -> None:
    """trainer/launch/flight_recorder.py: torch says what it has recorded in pickle, or in JSON by these names alone."""
    from trainer.launch.flight_recorder import RECORDERS

    module = importlib.import_module("torch._C._distributed_c10d")
    for backend, name in RECORDERS.items():
        if backend != "nccl" or torch.distributed.is_nccl_available():
            assert "version" in json.loads(getattr(module, name)())


def test_a_modules_tensors_and_hooks_lie_in_these_tables() -> None:
    """trainer/parallel/pipeline/stages.py: two modules share them, so that a parameter is replaced in both."""
    from trainer.parallel.pipeline.stages import HOOKS, TABLES

    module = torch.nn.Linear(2, 2)
    assert {*TABLES, *HOOKS} < vars(module).keys()
    module.weight = other = torch.nn.Parameter(torch.zeros(2, 2))
    assert vars(module)["_parameters"]["weight"] is other


def test_a_backward_looks_for_modes_by_this_name() -> None:
    """trainer/parallel/rng/function_mode.py: copies of these functions have another function under this name."""
    for function in (torch.autograd.backward, torch.autograd.grad):
        assert "has_torch_function" in function.__globals__
        assert "has_torch_function" in function.__code__.co_names


def test_a_module_calls_the_forward_of_the_class_that_it_was_given() -> None:
    """parallel/activation_checkpointing.py, batch_norm.py, context_parallel.py: they give modules a derived class."""
    module = torch.nn.Linear(2, 2)
    names = [name for name, _ in module.named_parameters()]
    module.__class__ = type("Linear", (torch.nn.Linear,), {"forward": lambda self, x: 0 * x})
    assert module(torch.ones(1, 2)).tolist() == [[0, 0]]
    assert [name for name, _ in module.named_parameters()] == names


def test_a_style_of_ones_own_says_one_thing() -> None:
    """trainer/parallel/context_parallel.py: parallelize_module calls this of every style, and asks nothing else."""
    from torch.distributed.tensor.parallel import ParallelStyle

    assert ParallelStyle.__abstractmethods__ == {"_apply"}
    assert list(signature(ParallelStyle._apply).parameters) == ["self", "module", "device_mesh"]


def test_torchrun_exports_the_names_that_are_read() -> None:
    """launch/rendezvous.py and launch/failure.py: the store that the agent hosts, restarts, the file for last words."""
    from torch.distributed.elastic.agent.server import local_elastic_agent
    from torch.distributed.elastic.multiprocessing import api

    text = "".join(Path(str(module.__file__)).read_text() for module in (local_elastic_agent, api))
    for name in ("RESTART_COUNT", "RUN_ID", "USE_AGENT_STORE", "ERROR_FILE"):
        assert f"TORCHELASTIC_{name}" in text
