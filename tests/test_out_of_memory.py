"""In a process of its own: the setting holds for the rest of a process's life."""

import subprocess
import sys

import pytest

PROGRAM = """
import resource, torch
from trainer.jobs.out_of_memory import keep_freed_memory
kept = keep_freed_memory()
def step():
    return [torch.ones(1_000_000) for _ in range(4)]
for _ in range(5):
    step()
before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
for _ in range(10):
    step()
print(kept, resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before)
"""


@pytest.mark.long
def test_kept_memory_is_not_faulted_in_again() -> None:
    done = subprocess.run([sys.executable, "-c", PROGRAM], capture_output=True, text=True, check=True)
    kept, faults = done.stdout.split()
    if kept != "True":
        pytest.skip("the C library is not glibc")
    touched = 10 * 4 * 4_000_000 // 4096  # pages, all of which may be new if nothing is kept
    assert int(faults) < touched / 4
