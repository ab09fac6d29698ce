"""What a run leaves: its folder, checkpoints, lines of figures."""
