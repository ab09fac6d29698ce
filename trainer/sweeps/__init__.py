"""Several runs in one command: which are left, who starts them, and a table of what was tried."""
