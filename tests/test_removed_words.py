"""Words of the past: each is answered with what to do instead, and run folders that have them open."""

from pathlib import Path

import pytest
import yaml

from tests.run import run

WORDS = {  # what people type, and what the line must tell them
    "compile.mode=step": "compile.mode=default, or reduce-overhead",
    "strategy=diloco": "docs/own-strategy.md",
    "strategy=fsdp strategy.attention=ring": "gather keys and values",
    "strategy=ddp_tp strategy.async_tp=true": "leave it out",
    "loop.on_nonfinite=rollback": "write stop",
    "loop.on_spike=rollback": "TensorBoard",
    "optimizer=torch optimizer._target_=torch.optim.SGD optimizer.whole_matrices=true": "strategy=ddp or zero1",
    "run.stop_when=/tmp/notice": "docs/clusters.md",
    "log=[csv]": "pandas reads metrics.jsonl",
    "job=report": "status.json has the goodput",
    "hydra/sweeper=optuna": "docs/sweeps.md",
    "-m seed=1,2 hydra/sweeper=optuna": "docs/sweeps.md",
    "hydra/launcher=submitit_slurm": "docs/clusters.md",
    "job=plan job.flops=100": "by the data sheet",
    "job=plan job.doctor=doctor.json": "by the data sheet",
    "job=verify job.layers=2": "make the network smaller",
    "model=deepseek": "model=hf_decoder",
    "model=deepseek_moe": "model=moe_nano",
    "model=mixtral": "model=hf_decoder",
    "model=llama model.kv_rank=512": "latent attention",
    "model=moe_nano model.capacity=1.25": "no token is dropped",
    "model=moe_nano model.expert_groups=2": "one group",
    "model=resnet18 model.blur=true": "leave it out",
    "data=cifar10 data.augment.border=reflect": "is black",
    "data=cifar10 data.augment.flip=alternate": "data.augment.flip=true",
    "model=airbench": "model=resnet18",
    "task=classification_views": "task=classification",
    "optimizer=sgd_lookahead": "optimizer=sgd",
    "experiment=cifar10_airbench": "experiment=cifar10_resnet18",
}


@pytest.mark.parametrize("words", WORDS)
def test_a_word_of_the_past_says_what_to_do_instead(words: str, tmp_path: Path) -> None:
    said = run(words.split(), place=tmp_path, code=2).out
    assert WORDS[words] in said
    assert " gone; " in said
    assert len(said.splitlines()) == 1
    assert words.split()[-1].split("=")[0].strip("+") in said


def lab(place: Path, name: str, text: str) -> list[str]:
    """A yaml file of a lab; the words that name its folder."""
    file = place / "conf" / f"{name}.yaml"
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text(text)
    return ["--config-dir", "conf", name.replace("/", "=")]


def test_a_yaml_file_of_a_lab_is_answered_too(tmp_path: Path) -> None:
    for text, said in (
        ("loop: {on_spike: rollback}", "this key is gone; TensorBoard"),
        ("compile: {mode: step}", "compile.mode=step is gone; write"),
        ("defaults: [{override /strategy: diloco}]", "strategy=diloco is gone; DiLoCo"),
    ):
        words = lab(tmp_path, "experiment/mine", f"# @package _global_\n{text}\n")
        assert said in run(words, place=tmp_path, code=2).out


def test_a_lab_may_use_the_old_words_for_its_own(tmp_path: Path) -> None:
    words = lab(tmp_path, "strategy/diloco", "_target_: lab.Mine\nattention: 3\n")
    said = run([*words, "strategy.attention=many", "--cfg", "job"], place=tmp_path).out
    assert yaml.safe_load(said)["strategy"] == {"_target_": "lab.Mine", "attention": "many"}


def test_a_run_folder_with_words_that_are_gone(tmp_path: Path) -> None:
    """What did nothing is left out; for the rest a word that chooses anew opens the run, or its line is taken out."""

    def opened(*words: str, **stored: object) -> str:
        (tmp_path / "config.yaml").write_text(yaml.safe_dump(stored))
        return run(["job=evaluate", "run.dir=.", *words], place=tmp_path, code=2).out

    tp = {"_target_": "trainer.strategies.tp.TP", "attention": "auto", "async_tp": False}
    diloco = {"_target_": "trainer.strategies.diloco.DiLoCo", "every": 50}
    for said in (
        opened(strategy=tp, loop={"on_spike": "warn"}, run={"stop_when": "/tmp/x"}),
        opened("compile.mode=default", compile={"mode": "step"}),
        opened("strategy=ddp", strategy=diloco),
    ):
        assert " gone" not in said  # only that nothing was trained here
    said = opened(loop={"on_spike": "rollback"})
    assert "config.yaml has words that are gone" in said
    assert "loop.on_spike: this key is gone" in said
    assert "compile.mode=step is gone" in opened(compile={"mode": "step"})
    assert "strategy=diloco is gone" in opened(strategy=diloco)
    lab = {"_target_": "lab.Mine", "attention": "ring", "async_tp": True}
    assert " gone" not in opened(strategy=lab)


def test_a_task_that_hands_on_a_state_is_told_where_it_belongs(tmp_path: Path) -> None:
    words = lab(tmp_path, "task/old", "_target_: mine.Old\n")
    (tmp_path / "mine.py").write_text(
        "from recipes.vision.classification import Classification\n"
        "class Old(Classification):\n"
        "    def carry(self, output):\n"
        "        return output\n"
    )
    said = run([*words, "loop.steps=1"], place=tmp_path, code=2).out
    assert "Old.carry is not called any more. Keep the state" in said
