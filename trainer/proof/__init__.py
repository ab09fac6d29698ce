"""Is what a strategy trains what one process trains? Signatures of both, compared in the order of time."""
