"""Whose random numbers a forward uses: torch's (`torch_rng`), or each sample's own (`sample_rng`)."""
