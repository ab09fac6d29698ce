"""Programs that were not written for this one, in tests/foreign: docs/foreign.md says what becomes of each."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.run import ROOT, curve, far, run

HOME = ROOT / "tests"
BRIEF = ["precision=fp64", "loop.steps=4", "loop.log_every=1", "loader.workers=0"]
# program → what a pipeline says of it; the part that ddp says where it refuses
STAGES = {
    "ddpm": "time_mlp.1.weight is needed by stages 0 and 1: what is made with it passes ups.0.0 by",
    "t5": "decoder.embed_tokens.weight and lm_head.weight are one parameter, which stages 0 and 1 need",
    "experts": "its forward cannot be run without the values of its weights (DynamicOutputShapeException: aten.nonzero",
    "lightning_module": "",
    "speech": "its forward cannot be run without the values of its weights (DynamicOutputShapeException: aten._pack_pa",
}
PACKAGES = {"t5": "transformers", "lightning_module": "lightning"}


@pytest.mark.long
@pytest.mark.parametrize("case", STAGES)
def test_a_program_has_one_curve_or_is_refused_with_the_reason(processes: object, case: str, tmp_path: Path) -> None:
    pytest.importorskip(PACKAGES.get(case, "torch"))
    words = ["--config-dir", "foreign/conf", f"experiment={case}", *BRIEF]

    def trained(strategy: str, size: int, *own: str) -> list[float]:
        folder = tmp_path / f"{strategy}-{len(own)}"
        chosen = [*words, f"strategy={strategy}", "strategy.sync_bn=true", *own, f"run.dir={folder}"]
        run(chosen, size, "group" if size > 1 else "here", place=HOME)
        return curve(folder)

    alone = trained("single", 1)
    # which layers are called depends on the samples: ddp wants a word for it
    uneven = ["strategy.find_unused_parameters=true"] * (case == "experts")
    assert far(trained("ddp", 2, *uneven), alone) < 1e-9
    assert far(trained("fsdp", 2), alone) < 1e-9
    pipeline = [*words, "strategy=pp", "loop.micro_batches=2"]
    if not STAGES[case]:
        assert far(trained("pp", 2, "loop.micro_batches=2"), trained("single", 1, "loop.micro_batches=2")) < 1e-9
    else:
        assert STAGES[case] in run([*pipeline, f"run.dir={tmp_path}/pp"], 2, "group", place=HOME, code=2).out
    if uneven:
        refused = [*words, "strategy=ddp", f"run.dir={tmp_path}/refused"]
        said = run(refused, 2, "group", place=HOME, code=2).out
        assert "these parameters get no gradient: layers.0.experts." in said
        assert said.rstrip().endswith("strategy.find_unused_parameters=true")
