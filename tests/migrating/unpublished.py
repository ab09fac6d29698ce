"""`python unpublished.py SCRIPT`: the script as it stands, where CIFAR-10's files are not the published ones.

torchvision compares them with their published sums, and would download others in their place; a test's are made up.
"""

import runpy
import sys

from torchvision.datasets import CIFAR10

if __name__ == "__main__":
    CIFAR10._check_integrity = lambda self: True
    CIFAR10._load_meta = lambda self: None
    del sys.argv[0]
    runpy.run_path(sys.argv[0], run_name="__main__")
