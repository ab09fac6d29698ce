"""What is being learned, and how: the task, the plan of a network, rates, parameter groups, rhythms."""
