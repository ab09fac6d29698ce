"""The job `plan`: what each strategy takes on devices that are not there, tried on tensors without values."""
