"""The job `verify`: does a strategy train what one process trains? The records of both are compared."""
