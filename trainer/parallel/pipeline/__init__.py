"""A network cut into stages, and micro-batches that flow through them.

`cut` decides where to cut, and which of two ways makes the stages. `stages` makes them from a graph of the forward,
which `fx_trace` reads. `untraced_stage` runs a forward that cannot be read as a graph; `fake_forward` says what each
stage needs for that. `schedule` runs the stages of a rank.
"""
