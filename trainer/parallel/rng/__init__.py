"""Whose random numbers a forward uses: torch's generators (`native_rng`), or each sample's own (`sample_rng`).

`loop.dropout` chooses. `native`: `TorchRNG` seeds torch's generators when a forward begins, and torch draws. `sample`:
`SampleRNG` stands between the network and torch. `function_mode` sees each call of a random function of torch, and
`dispatch_mode` the random operators inside of one. Both ask `SampleRNG.next_draw` which draw of the forward this is,
and get a `RandomDraw` (`random_draw`), whose numbers follow from the samples.
"""
