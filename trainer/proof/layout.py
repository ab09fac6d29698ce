"""Where the samples of a batch lie in what a module gives: found out from two batches of different sizes."""

from __future__ import annotations

from typing import NamedTuple

from torch import Tensor

from trainer.proof.signature import signatures

_ALIKE = 1e-9  # of two signatures in float64, relative to the norm


class Layout(NamedTuple):
    """Where the samples of a batch lie in a tensor."""

    dim: int  # their dimension; -1: there is none, the tensor is the same for every batch
    each: int = 1  # entries of that dimension for a sample: windows of an image, words of a text
    outer: bool = True  # the entries of a sample stand together; else those of all samples alternate
    size: int = 0  # numbers of a sample

    def rows(self, x: Tensor, samples: int) -> Tensor | None:
        """(samples, size): a row for each sample; None where the tensor has another shape than it must have then."""
        if self.dim < 0:
            return x.reshape(1, -1) if x.numel() == self.size else None
        if x.dim() <= self.dim or x.shape[self.dim] != samples * self.each or x.numel() != samples * self.size:
            return None
        x = x.movedim(self.dim, 0)
        x = x.unflatten(0, (samples, self.each) if self.outer else (self.each, samples))
        return (x if self.outer else x.transpose(0, 1)).flatten(1)


def layout(large: Tensor, small: Tensor, samples: int, fewer: int) -> Layout | None:
    """Where samples lie in a tensor, from what it is for so many samples, and for the first `fewer` of them.

    None where that cannot be seen, or where the tensor depends on all samples together.
    """
    if large.dim() != small.dim() or not large.numel() or not small.numel():
        return None
    differing = [dim for dim in range(large.dim()) if large.shape[dim] != small.shape[dim]]
    if not differing:
        found = Layout(-1, size=large.numel())
        return found if _alike(found, large, small, samples, fewer) else None
    (dim, *others) = differing
    if others or large.shape[dim] * fewer != small.shape[dim] * samples or large.shape[dim] % samples:
        return None
    each, size = large.shape[dim] // samples, large.numel() // samples
    first = Layout(dim, each, True, size)
    if each == 1:
        return first
    # several entries for a sample: together, or in turn with those of others? The first samples are the same ones
    either = first, first._replace(outer=False)
    return next((one for one in either if _alike(one, large, small, samples, fewer)), None)


def _alike(found: Layout, large: Tensor, small: Tensor, samples: int, fewer: int) -> bool:
    one, other = found.rows(large, samples), found.rows(small, fewer)
    if one is None or other is None:
        return False
    one, other = signatures(one[: len(other)]), signatures(other)
    return bool(((one - other).abs().amax(1) <= _ALIKE * one[:, 1]).all())
