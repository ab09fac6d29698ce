"""Parallel strategies, one a file, and what they share: `Strategy`, `ParallelModel`, checks of every step."""
