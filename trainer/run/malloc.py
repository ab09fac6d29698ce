"""What glibc does with freed memory: keep it where a step asks for the same again, else give it back."""

from __future__ import annotations

import ctypes

_TRIM_THRESHOLD, _MMAP_THRESHOLD = -1, -3  # mallopt(3): M_TRIM_THRESHOLD, M_MMAP_THRESHOLD
_NEVER, _LARGE = 2**30, 2**20  # bytes


def keep_freed_memory() -> bool:
    """Tell glibc not to give freed memory back to the kernel; False where the C library is another one.

    For a network that is whole on its rank: every step asks for the sizes that the last one freed, and fresh pages
    cost faults. Measured on the CPU with the cnn on 28×28 images: 3,000 page faults a step become 30, and a step 3 to
    10 % shorter; peak memory is the same.
    """
    return _told(_TRIM_THRESHOLD, _NEVER) and _told(_MMAP_THRESHOLD, _NEVER)


def give_back_freed_memory() -> bool:
    """Tell glibc to give every larger block back as soon as it is freed; False where the C library is another one.

    For ranks that hold shards: they gather parameters and free them all the time, and what is kept lies in pieces
    that do not fit the next request. Measured with fsdp on 2 processes and 100
    million parameters: a peak of 871 MiB instead of 2,151.
    """
    return _told(_MMAP_THRESHOLD, _LARGE)


def _told(parameter: int, value: int) -> bool:
    try:
        return bool(ctypes.CDLL(None).mallopt(parameter, value))
    except (OSError, AttributeError):
        return False
