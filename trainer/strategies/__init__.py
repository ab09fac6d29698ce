"""One strategy a file: how a step is spread over devices."""
