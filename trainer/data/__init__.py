"""From a data set to batches on the device: order, reading, micro-batches, and random numbers of samples."""
