"""The training loop, and what it calls beside the step: evaluations, training lines, media, progress."""
