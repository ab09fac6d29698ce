"""What is learned, and how: tasks, plans of networks, optimizers, learning rates, intervals."""
