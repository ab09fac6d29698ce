"""A network cut into stages, and micro-batches that flow through them."""
