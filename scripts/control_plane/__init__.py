"""What the ranks of a run say to each other, counted: docs/scale.md."""
