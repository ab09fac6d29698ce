"""One run, in order of time: a configuration becomes parts, parts a trainer, a trainer an exit code."""
