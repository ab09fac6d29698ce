"""From indices to batches on the device; everything random in it is a function of numbers."""
