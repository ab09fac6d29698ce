"""A lab as users have one: plain PyTorch and yaml files. The tests copy this folder to a place of its own."""
