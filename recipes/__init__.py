"""Networks, tasks and data sets: what is trained. Written as a lab would write its own."""
