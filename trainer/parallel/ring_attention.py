"""Ring attention: keys and values travel from rank to rank, and each rank computes with those that it has at the time.

After Liu et al. 2023, arXiv:2310.01889, on zigzag pieces. A rank holds its own keys and values and those of one or two
other ranks, where `GatheredKeys` holds those of whole sequences.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor, cat
from torch.autograd.function import once_differentiable
from torch.distributed import P2POp, ProcessGroup
from torch.distributed.device_mesh import DeviceMesh
from torch.nn.functional import pad

from trainer.learning.parallel_plan import Plan
from trainer.messages import Refusal
from trainer.parallel.context_parallel import GatheredKeys, ModuleForward
from trainer.parallel.ranks import Waitable


class RingAttention(GatheredKeys):
    """For a plan's `context`: a module that is plain causal attention, called with (queries, keys, values) alone.

    Plain: softmax(q kᵀ / √head) v of (B, heads, T, head), where keys and values may have fewer heads. With keys and
    values in a ring the module itself is not called: so one that drops weights, or has a mask or a scale of its own,
    must be under `GatheredKeys`. Where they are gathered, it is called as `GatheredKeys` calls it; so it is with
    anything else beside the three.
    """

    in_ring = False  # do keys and values travel in a ring? `apply_context_parallel` sets it

    def __init__(self) -> None:
        super().__init__(dim=2)

    def _call(self, forward: ModuleForward, mesh: DeviceMesh, rank: int, *args: Any, **more: Any) -> Any:
        two_pieces = self.pieces == 2 and args[0].shape[2] % 2 == 0
        # with a mask, or whatever else comes along, the module must be called
        plain = len(args) == 3 and not more
        if self.in_ring and plain and two_pieces and not torch.compiler.is_compiling():
            queries, keys, values = (_as_autocast(x) for x in args)
            kernel = find_kernel(queries.device.type, queries.dtype, queries.shape[-1], values.shape[-1])
            if kernel is not None:
                ring = _Ring(mesh.get_group(), queries.shape[2] // 2)
                return _RingFunction.apply(queries, cat((keys, values), -1), kernel, ring)
        return super()._call(forward, mesh, rank, *args, **more)


def _as_autocast(x: Tensor) -> Tensor:
    """In the type that attention has inside of autocast, which knows torch's own functions alone."""
    kind = x.device.type
    return x.to(torch.get_autocast_dtype(kind)) if torch.is_autocast_enabled(kind) else x


def refuse_ring(plan: Plan, device_type: str, dtype: torch.dtype, compiled: bool) -> None:
    """Refuse `strategy.attention=ring` where keys and values must be gathered."""
    problem = ""
    if not any(isinstance(style, RingAttention) for style in plan.context.values()):
        problem = (
            "the network's plan names no module as plain causal attention, context={name: RingAttention()}; with"
            " data.pack=true or model.window attention has a mask"
        )
    elif compiled:
        problem = "a compiled graph has no messages from rank to rank"
    elif find_kernel(device_type, dtype, 8, 8) is None:
        problem = f"{device_type} has no kernel that gives the logarithm of attention's sum in {dtype}"
    if problem:
        raise Refusal(f"strategy.attention=ring: {problem}; strategy.attention=auto gathers keys and values there")


class _Messages(NamedTuple):
    """Tensors on their way."""

    works: Sequence[Waitable]
    sent: list[Tensor]  # must live until they are sent
    received: list[Tensor]

    def wait(self) -> list[Tensor]:
        """What was received."""
        for work in self.works:
            work.wait()
        return self.received


class _Ring:
    """The context ranks; rank r sends to rank r - 1, and rank 0 to the last one.

    A block is the keys and values of a rank, (B, heads, T / ranks, key width + value width), or their gradients: its
    front piece and its back piece. In step i rank r computes with the block of rank r + i. No query of a front piece
    sees a later rank's block, and only ranks before it see a rank's back piece. So blocks are sent on whole until rank
    0 has them, then only their front pieces: all that arrives is seen, by all queries or by those of the back piece.
    """

    def __init__(self, group: ProcessGroup, piece: int) -> None:
        self.rank, self.size, self.piece = dist.get_rank(group), dist.get_world_size(group), piece  # tokens of a piece
        self._group, self._before, self._behind = group, (self.rank - 1) % self.size, (self.rank + 1) % self.size

    def is_later(self, step: int) -> bool:
        """Is this step's block a later rank's? Then it is whole, and seen by the queries of the back piece."""
        return (self.rank + step) % self.size > self.rank

    def pass_block(self, block: Tensor, step: int) -> _Messages:
        """Collective: start sending this step's block, and receiving that of the next one, if there is one."""
        if step == self.size - 1:
            return _Messages([], [], [block])
        # each context rank to the one before it; keys and values of a rank, or of its front piece
        return self._exchange([self._passed(block)], [self._space(block, step + 1)])

    def pass_gradient(self, gradient: Tensor, step: int) -> _Messages:
        """Collective: start sending the sum of gradients of this step's block, and receiving that of the next one's.

        After the last step that is this rank's own front piece. Rank 0 sends a back piece to its own rank at once.
        """
        sent, received = [self._passed(gradient)], [self._space(gradient, step + 1)]
        if self.rank == 0:
            sent.append((gradient[:, :, self.piece :].contiguous(), step))
        if self.rank == step:
            received.append((_like(gradient, self.piece), 0))
        # each context rank to the one before it, and rank 0 to rank `step`; gradients of a block or a piece
        return self._exchange(sent, received)

    def _passed(self, block: Tensor) -> tuple[Tensor, int]:
        return (block if self.rank > 0 else block[:, :, : self.piece].contiguous()), self._before

    def _space(self, block: Tensor, step: int) -> tuple[Tensor, int]:
        return _like(block, self.piece * 2 if self.is_later(step) else self.piece), self._behind

    def _exchange(self, sent: list[tuple[Tensor, int]], received: list[tuple[Tensor, int]]) -> _Messages:
        sends = [P2POp(dist.isend, x, group=self._group, group_peer=peer) for x, peer in sent]
        receives = [P2POp(dist.irecv, x, group=self._group, group_peer=peer) for x, peer in received]
        works = dist.batch_isend_irecv([*sends, *receives])
        return _Messages(works, [x for x, _ in sent], [x for x, _ in received])


def _like(block: Tensor, tokens: int) -> Tensor:
    return block.new_empty((*block.shape[:2], tokens, block.shape[3]))


class _RingFunction(torch.autograd.Function):
    """Attention of this rank's queries, (B, heads, T / ranks, head), to all keys that they see."""

    @staticmethod
    def forward(ctx: Any, queries: Tensor, local: Tensor, kernel: AttentionKernel, ring: _Ring) -> Tensor:
        block, width = local, queries.shape[-1]
        output = logsumexp = queries  # of the first step, which all ranks have
        for step in range(ring.size):
            first = ring.piece if ring.is_later(step) else 0  # the first query that sees the block
            messages = ring.pass_block(block, step)
            # own pieces lie one behind the other, so causal is right for both of them
            part = kernel.forward(queries[:, :, first:], block[..., :width], block[..., width:], step == 0)
            if step == 0:
                logsumexp = part[1].clone()  # (B, heads, T / ranks)
                output = part[0].to(logsumexp.dtype, copy=True)
            else:
                _merge_(output[:, :, first:], logsumexp[:, :, first:], *part)
            (block,) = messages.wait()
        output = output.to(queries.dtype)
        ctx.save_for_backward(queries, local, output, logsumexp)
        ctx.kernel, ctx.ring = kernel, ring
        return output

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> Any:
        queries, local, output, logsumexp = ctx.saved_tensors
        ring, block, width, gradient = ctx.ring, local, queries.shape[-1], gradient.contiguous()
        of_queries, of_local = torch.zeros_like(queries, dtype=logsumexp.dtype), local
        gradients = _Messages([], [], [])
        for step in range(ring.size):
            first = ring.piece if ring.is_later(step) else 0
            blocks = ring.pass_block(block, step)
            rows = (x[:, :, first:] for x in (gradient, queries, output, logsumexp))
            part, *of_block = ctx.kernel.backward(*rows, block[..., :width], block[..., width:], step == 0)
            of_queries[:, :, first:] += part
            if step == 0:
                of_local = cat(of_block, -1)
            else:
                of_block = _add_arrived(cat(of_block, -1), of_local, gradients, ring.piece)
                gradients = ring.pass_gradient(of_block, step)
            (block,) = blocks.wait()
        _add_arrived(of_local[:, :, : ring.piece], of_local, gradients, ring.piece)
        return of_queries.to(queries.dtype), of_local, None, None


def _add_arrived(of_block: Tensor, of_local: Tensor, arrived: _Messages, piece: int) -> Tensor:
    """Add what earlier ranks in the ring have sent for a block, and what rank 0 has for this rank's own back piece."""
    for into, x in zip((of_block, of_local[:, :, piece:]), arrived.wait(), strict=False):
        into += x
    return of_block


def _merge_(output: Tensor, logsumexp: Tensor, more: Tensor, more_logsumexp: Tensor) -> None:
    """Attention to some keys becomes that to these and more keys, in place. Each weighs as its sum of exponentials."""
    share = torch.sigmoid(more_logsumexp - logsumexp)  # (B, heads, T): of the new keys
    output.lerp_(more.to(output.dtype), share[..., None])
    torch.logaddexp(logsumexp, more_logsumexp, out=logsumexp)


# Kernels: torch has no public name for those that give the logarithm of the sum. 2.11 to 2.15 have these.


class AttentionKernel(NamedTuple):
    """Attention to some keys, (B, heads, T, head), and its gradients; causal: square, no token sees a later one."""

    # queries, keys, values, causal → output, logsumexp (B, heads, T)
    forward: Callable[[Tensor, Tensor, Tensor, bool], tuple[Tensor, Tensor]]
    # gradient, queries, output, logsumexp, keys, values, causal → gradients of queries, keys, values
    backward: Callable[[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, bool], tuple[Tensor, Tensor, Tensor]]


def find_kernel(device_type: str, dtype: torch.dtype, width: int, value_width: int) -> AttentionKernel | None:
    """The kernel for heads of these widths; None: this device has none for them."""
    if width != value_width:
        return None
    half = dtype in (torch.bfloat16, torch.float16)
    if device_type == "cpu" and (half or dtype in (torch.float32, torch.float64)):
        return _CPU
    if device_type == "cuda" and half and width % 8 == 0 and width <= 256:
        return _FLASH
    if device_type == "cuda" and dtype == torch.float32 and width % 4 == 0:
        return _EFFICIENT
    return None


def _cpu_forward(q: Tensor, k: Tensor, v: Tensor, causal: bool) -> tuple[Tensor, Tensor]:
    return torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(q, k, v, 0.0, causal)


def _cpu_backward(grad: Tensor, q: Tensor, out: Tensor, lse: Tensor, k: Tensor, v: Tensor, causal: bool) -> Any:
    backward = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward
    return backward(grad, q, k, v, out, lse, 0.0, causal)


def _flash_forward(q: Tensor, k: Tensor, v: Tensor, causal: bool) -> tuple[Tensor, Tensor]:
    return torch.ops.aten._scaled_dot_product_flash_attention(q, k, v, 0.0, causal)[:2]


def _flash_backward(grad: Tensor, q: Tensor, out: Tensor, lse: Tensor, k: Tensor, v: Tensor, causal: bool) -> Any:
    backward = torch.ops.aten._scaled_dot_product_flash_attention_backward
    unused = torch.zeros((), dtype=torch.int64, device=q.device)  # the random numbers of dropout
    sizes = None, None, q.shape[2], k.shape[2]
    return backward(grad, q, k, v, out, lse.contiguous(), *sizes, 0.0, causal, unused, unused)


def _efficient_forward(q: Tensor, k: Tensor, v: Tensor, causal: bool) -> tuple[Tensor, Tensor]:
    k, v = (x.repeat_interleave(q.shape[1] // x.shape[1], 1) for x in (k, v))  # it has no groups of heads
    out, lse, *_ = torch.ops.aten._scaled_dot_product_efficient_attention(q, k, v, None, True, 0.0, causal)
    return out, lse[..., : q.shape[2]]  # it rounds the tokens up


def _efficient_backward(grad: Tensor, q: Tensor, out: Tensor, lse: Tensor, k: Tensor, v: Tensor, causal: bool) -> Any:
    backward = torch.ops.aten._scaled_dot_product_efficient_attention_backward
    groups, each = k.shape[1], q.shape[1] // k.shape[1]
    k, v = (x.repeat_interleave(each, 1) for x in (k, v))
    lse = pad(lse, (0, -lse.shape[-1] % 32), value=torch.inf)  # to a multiple of 32 tokens
    unused = torch.zeros((), dtype=torch.int64, device=q.device)  # the random numbers of dropout
    wanted = [True, True, True, False]  # gradients, of all but a mask
    of_q, *of_kv, _ = backward(grad, q, k, v, None, out, lse, unused, unused, 0.0, wanted, causal)
    return of_q, *(x.unflatten(1, (groups, each)).sum(2) for x in of_kv)


_CPU = AttentionKernel(_cpu_forward, _cpu_backward)
_FLASH = AttentionKernel(_flash_forward, _flash_backward)
_EFFICIENT = AttentionKernel(_efficient_forward, _efficient_backward)
