"""Functions over torch.distributed that strategies are made of."""
