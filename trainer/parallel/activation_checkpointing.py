"""Activation checkpointing: a unit drops its activations in the forward and computes them again in the backward."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from functools import cache, partial
from inspect import signature
from typing import Any, ClassVar, Literal

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts, noop_context_fn

from trainer.messages import Refusal


def in_backward() -> bool:
    """Does autograd's engine call this code? torch 2.11 to 2.15 tell it by this name alone."""
    return torch._C._current_graph_task_id() != -1


Mode = Literal["units", "operators"]
ActivationCheckpointing = Literal["none", "units", "operators"]

# What "operators" keeps is offloaded like any kept tensor, where torch can: from 2.15 on, which warns if not told.
_HAS_HOOKS = "respect_saved_tensors_hooks" in signature(checkpoint).parameters
_WITH_HOOKS: dict[str, Any] = {"respect_saved_tensors_hooks": True} if _HAS_HOOKS else {}

# Operators whose results "operators" keeps, by namespace of torch.ops. torch 2.11 to 2.15 have these; some builds have
# fewer. Attention has many kernels.
EXPENSIVE = {
    "aten": (
        "mm",
        "addmm",
        "bmm",
        "baddbmm",
        "_scaled_mm",
        "_grouped_mm",
        "convolution",
        "_scaled_dot_product_flash_attention",
        "_scaled_dot_product_flash_attention_for_cpu",
        "_scaled_dot_product_efficient_attention",
        "_scaled_dot_product_cudnn_attention",
        "_scaled_dot_product_fused_attention_overrideable",
    ),
    "_c10d_functional": ("all_reduce", "all_gather_into_tensor", "reduce_scatter_tensor", "all_to_all_single"),
    "_dtensor": ("shard_dim_alltoall",),
}


def apply_activation_checkpointing(network: nn.Module, names: list[str], mode: ActivationCheckpointing) -> None:
    """Let these units of a network keep less between forward and backward, in place; names, values and losses stay.

    "units": a unit keeps its inputs and is run again in the backward. "operators": it also keeps the results of matrix
    products, convolutions, attention and collectives, so that only what is cheap is computed again. "none", and without
    gradients, as in evaluation, nothing changes.

    Random numbers repeat. So do buffers that a forward changes (BatchNorm's statistics): the second run begins with
    those of the first and leaves no trace. After torch.utils.checkpoint, without re-entrance.
    """
    for name in names if mode != "none" else ():
        unit = network.get_submodule(name)
        for inner in unit.modules():
            if getattr(inner, "inplace", False):
                vars(inner)["inplace"] = False  # would write over what is kept, and saves nothing any more
        if "forward" in vars(unit):
            raise Refusal(f"{name} cannot be recomputed: its forward was replaced by one that is not its class's")
        # another class, not a wrapper, which would be one level more in every name
        # recurrent layers write into products that "operators" would keep, which no version counter sees
        recurrent = any(isinstance(inner, nn.RNNBase | nn.RNNCellBase) for inner in unit.modules())
        unit.__class__ = _checkpointed_class(type(unit), "units" if recurrent else mode)  # type: ignore[arg-type]  # mypy takes no class for hashable


@cache
def _checkpointed_class(kind: type[nn.Module], mode: Mode) -> type[nn.Module]:
    """A class of the same name whose forward is recomputed. Units of one class share it, and so a compiled graph."""
    attributes = {"__module__": kind.__module__, "__qualname__": kind.__qualname__, "recomputed_mode": mode}
    return type(kind.__name__, (_Checkpointed, kind), attributes)


class _Checkpointed(nn.Module):
    """The class that a unit gets. Its attributes begin with `recomputed`, so that they are none of the unit's own."""

    recomputed_mode: ClassVar[Mode]

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        run, contexts = super().forward, _CONTEXTS[self.recomputed_mode]
        # functional_call's weights are gone by the backward: it would recompute with the unit's own, without a word
        if not torch.is_grad_enabled() or not all(isinstance(weight, nn.Parameter) for weight in self.parameters()):
            return run(*args, **kwargs)
        if torch.compiler.is_compiling():  # repeats no change of a buffer, and must see torch's own contexts
            contexts = _GRAPH_CONTEXTS[self.recomputed_mode]
            return checkpoint(run, *args, use_reentrant=False, context_fn=contexts, **kwargs)
        # which modules are in training mode → the buffers that a forward then changes
        changing: dict[tuple[bool, ...], list[str]] = vars(self).setdefault("recomputed_buffers", {})
        modes = tuple(inner.training for inner in self.modules())
        if modes not in changing:
            _refuse_cache([*args, *kwargs.values()], type(self).__qualname__)
        before = {name: value.clone() for name, value in self.named_buffers() if name in changing.get(modes, [name])}
        buffer_contexts = partial(_contexts, self, before, contexts)
        hooks = _WITH_HOOKS if self.recomputed_mode == "operators" else {}
        output = checkpoint(run, *args, use_reentrant=False, context_fn=buffer_contexts, **hooks, **kwargs)
        if modes not in changing:  # looked at once, so that constants are not copied in every step
            changing[modes] = [name for name, value in before.items() if not torch.equal(value, self.get_buffer(name))]
        return output


def _refuse_cache(arguments: list[Any], unit: str) -> None:
    """ValueError for a cache of keys and values: the second forward would fill it a second time."""
    if any(hasattr(each, "get_seq_length") for each in arguments):  # transformers.Cache, whichever kind
        raise ValueError(  # no Refusal: the run has begun, and its status.json must say that it failed
            f"strategy.activation_checkpointing: {unit} is given a cache of keys and values, which a second forward "
            "fills a second time; training needs no such cache: set use_cache=False in the network's own configuration"
        )


def _contexts(unit: nn.Module, before: dict[str, Tensor], contexts: Callable[[], Contexts]) -> Contexts:
    first, again = contexts()
    return first, _InitialBuffers(unit, before, again)


class _InitialBuffers:
    """Around the second forward: the unit has the buffers that the first began with. Can be entered several times."""

    def __init__(self, unit: nn.Module, before: dict[str, Tensor], inner: AbstractContextManager[Any]) -> None:
        self._unit, self._before, self._inner = unit, before, inner
        self._dtype = torch.get_default_dtype()  # torch repeats autocast, but not this

    def __enter__(self) -> None:
        self._now = {name: self._unit.get_buffer(name) for name in self._before}
        self._outside = torch.get_default_dtype()
        torch.set_default_dtype(self._dtype)
        # other tensors, not other values: autograd may have kept the present ones
        self._set({name: value.clone() for name, value in self._before.items()})
        self._inner.__enter__()

    def __exit__(self, *error: Any) -> None:
        self._inner.__exit__(*error)
        torch.set_default_dtype(self._outside)
        self._set(self._now)

    def _set(self, values: dict[str, Tensor]) -> None:
        for name, value in values.items():
            owner, _, buffer = name.rpartition(".")
            setattr(self._unit.get_submodule(owner), buffer, value)


def _policy(_: Any, operator: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy:
    """Keep results of expensive operators, but not of attention with dropout: later random numbers would shift."""
    has_dropout = any(isinstance(value, float) and value > 0 for value in args) or kwargs.get("dropout_p", 0.0) > 0
    save = operator in _expensive_operators() and not (has_dropout and "attention" in str(operator))
    return CheckpointPolicy.MUST_SAVE if save else CheckpointPolicy.PREFER_RECOMPUTE


def _keep_draws(_: Any, operator: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy:
    """What a graph draws it keeps: nobody tells it in the backward how far the forward was."""
    draws = torch.Tag.nondeterministic_seeded in getattr(operator, "tags", ())
    return CheckpointPolicy.MUST_SAVE if draws else CheckpointPolicy.PREFER_RECOMPUTE


def _keep_draws_and_results(context: Any, operator: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy:
    if torch.Tag.nondeterministic_seeded in getattr(operator, "tags", ()):
        return CheckpointPolicy.MUST_SAVE
    return _policy(context, operator, *args, **kwargs)


@cache
def _expensive_operators() -> frozenset[Any]:
    packets = [getattr(getattr(torch.ops, space), name, None) for space, names in EXPENSIVE.items() for name in names]
    return frozenset(packet.default for packet in packets if packet is not None)


Contexts = tuple[AbstractContextManager[Any], AbstractContextManager[Any]]  # of the forward, of its repetition
_GRAPH_CONTEXTS: dict[Mode, Callable[[], Contexts]] = {
    "units": partial(create_selective_checkpoint_contexts, _keep_draws),
    "operators": partial(create_selective_checkpoint_contexts, _keep_draws_and_results),
}
_CONTEXTS: dict[Mode, Callable[[], Contexts]] = {
    "units": noop_context_fn,
    "operators": partial(create_selective_checkpoint_contexts, _policy),
}
