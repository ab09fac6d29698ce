"""Whose random numbers a forward uses: torch's generators (`native_rng`), or each sample's own (`sample_rng`).

`loop.dropout` chooses. `native`: `TorchRNG` seeds the global generators when a forward begins, and torch draws.
`sample`: `kernels` overrides torch's random operators, so that every draw of a forward comes to `SampleRNG`.
`draw_numbers` says which draw it is, `row_owners` has found before the first step whose its rows are, and `RandomDraw`
(`random_draw`) makes the numbers, which follow from the samples.
"""
