"""Constructions recorded on the meta device and carried out later on the CPU; `trainer/deferred.py` is the way in."""
