"""Whose random numbers a forward uses: torch's generators (`torch_rng`), or each sample's own (`sample_rng`).

`loop.dropout` chooses. `native`: `TorchRNG` seeds torch's generators when a forward begins, and torch draws. `sample`:
`SampleRNG` stands between the network and torch. `random_functions` sees each call of a random function or operator of
torch, asks `SampleRNG.next_draw` which draw of the forward it is, and gets a `RandomDraw` (`random_draw`), whose
numbers follow from the samples.
"""
