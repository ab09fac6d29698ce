"""A network cut into stages, and micro-batches that flow through them.

`cut` decides where to cut. `fake_forward` runs the network's own code on shapes and says what each stage needs, and
`stages` makes the stages, which run it, too. `schedule` runs the stages of a rank.
"""
