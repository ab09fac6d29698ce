"""What the loop calls beside the step: evaluations, lines, pictures, its position, the way back."""
