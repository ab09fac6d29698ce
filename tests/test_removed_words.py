"""Words of the past: each is answered with what to do instead, and run folders that have them open."""

from pathlib import Path

import pytest
import yaml
from omegaconf import DictConfig

from tests.commands import ROOT
from tests.inside import product
from trainer.configuration import removed_words
from trainer.configuration.compose import compose
from trainer.configuration.multirun import parse_multirun
from trainer.configuration.removed_words import in_todays_words
from trainer.launch.rendezvous import Launch
from trainer.messages import Refusal

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


def refusal(*words: str) -> str:
    with pytest.raises(Refusal) as caught:
        parse_multirun(words) if "-m" in words else compose(words)
    return str(caught.value)


@pytest.mark.parametrize("words", WORDS)
def test_a_word_of_the_past_says_what_to_do_instead(words: str) -> None:
    said = refusal(*words.split())
    assert WORDS[words] in said
    assert " gone; " in said
    assert len(said.splitlines()) == 1
    assert words.split()[-1].split("=")[0].strip("+") in said


def test_no_word_of_the_table_means_anything_today() -> None:
    """A sentence that says that a key is gone is a lie where the key is there."""
    known = compose(["strategy=mesh", "optimizer=torch", "optimizer._target_=torch.optim.SGD"])
    for key in removed_words._KEYS:
        group, _, name = key.rpartition(".")
        assert name not in known.get(group, {})
    for word in removed_words._OPTIONS:
        group, _, option = word.partition("=")
        assert not (ROOT / "conf" / group / f"{option}.yaml").exists()


def test_a_yaml_file_of_a_lab_is_answered_too(tmp_path: Path) -> None:
    def experiment(text: str) -> str:
        conf = tmp_path / "conf"
        (conf / "experiment").mkdir(parents=True, exist_ok=True)
        (conf / "experiment" / "mine.yaml").write_text(f"# @package _global_\n{text}")
        return refusal("--config-dir", str(conf), "experiment=mine")

    assert "this key is gone; TensorBoard" in experiment("loop: {on_spike: rollback}\n")
    assert "compile.mode=step is gone; write" in experiment("compile: {mode: step}\n")
    assert "strategy=diloco is gone; DiLoCo" in experiment("defaults: [{override /strategy: diloco}]\n")


def test_a_lab_may_use_the_old_words_for_its_own(tmp_path: Path) -> None:
    (tmp_path / "conf" / "strategy").mkdir(parents=True)
    (tmp_path / "conf" / "strategy" / "diloco.yaml").write_text("_target_: lab.Mine\nattention: 3\n")
    cfg = compose(["--config-dir", str(tmp_path / "conf"), "strategy=diloco", "strategy.attention=4"])
    assert cfg.strategy == {"_target_": "lab.Mine", "attention": 4}
    # of which kind a lab's own key is, its class says
    cfg = compose(["--config-dir", str(tmp_path / "conf"), "strategy=diloco", "strategy.attention=many"])
    assert cfg.strategy["attention"] == "many"


def test_a_stored_configuration_in_todays_words(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(removed_words._RENAMED, "trainer.old.Place", "trainer.new.Place")
    monkeypatch.setitem(removed_words._RENAMED, "loop.batch", "loop.global_batch")
    stored = {
        "seed": 1,
        "loop": {"on_spike": "warn", "batch": 8},
        "strategy": {"_target_": "trainer.strategies.tp.TP", "attention": "gather", "async_tp": False, "tensor": 2},
        "optimizer": {"_target_": "package.Shampoo", "whole_matrices": None},
        "data": {"_target_": "lab.Mine", "blur": {"model.blur": 1}, "parts": [{"_target_": "trainer.old.Place"}]},
        "log": {},
    }
    today, gone = in_todays_words(stored)
    assert today == {
        "seed": 1,
        "loop": {"global_batch": 8},
        "strategy": {"_target_": "trainer.strategies.tp.TP", "tensor": 2},
        "optimizer": {"_target_": "package.Shampoo"},
        "data": {"_target_": "lab.Mine", "blur": {"model.blur": 1}, "parts": [{"_target_": "trainer.new.Place"}]},
        "log": {},
    }
    assert gone == {}
    assert in_todays_words(today) == (today, {})

    lab = {"strategy": {"_target_": "lab.Mine", "attention": "auto", "async_tp": True}}
    assert in_todays_words(lab) == (lab, {})
    _, gone = in_todays_words({"loop": {"on_spike": "rollback"}, "compile": {"mode": "step"}})
    assert [*gone] == ["loop.on_spike", "compile.mode"]


def test_a_run_folder_with_words_that_are_gone(tmp_path: Path) -> None:
    """What did nothing is left out; for the rest a word that chooses anew opens the run, or its line is taken out."""

    def opened(*words: str, **stored: object) -> DictConfig:
        (tmp_path / "config.yaml").write_text(yaml.safe_dump(stored))
        return compose(["job=evaluate", f"run.dir={tmp_path}", *words])

    tp = {"_target_": "trainer.strategies.tp.TP", "attention": "auto", "async_tp": False}
    assert opened(strategy=tp, loop={"on_spike": "warn"}, run={"stop_when": "/tmp/x"}).strategy == {
        "_target_": "trainer.strategies.tp.TP"
    }
    with pytest.raises(Refusal, match=r"config\.yaml has words that are gone(.|\n)*loop\.on_spike: this key is gone"):
        opened(loop={"on_spike": "rollback"})
    with pytest.raises(Refusal, match=r"compile\.mode=step is gone"):
        opened(compile={"mode": "step"})
    assert opened("compile.mode=default", compile={"mode": "step"}).compile.mode == "default"
    diloco = {"_target_": "trainer.strategies.diloco.DiLoCo", "every": 50}
    with pytest.raises(Refusal, match="strategy=diloco is gone"):
        opened(strategy=diloco)
    assert opened("strategy=ddp", strategy=diloco).strategy._target_ == "trainer.strategies.ddp.DDP"


def test_a_task_that_hands_on_a_state_is_told_where_it_belongs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(tmp_path)
    (tmp_path / "lab/conf/task").mkdir(parents=True)
    (tmp_path / "lab/conf/task/old.yaml").write_text("_target_: lab.old.Old\n")
    (tmp_path / "lab/old.py").write_text(
        "from recipes.vision.classification import Classification\n"
        "class Old(Classification):\n"
        "    def carry(self, output):\n"
        "        return output\n"
    )
    with pytest.raises(Refusal, match=r"Old\.carry is not called any more\. Keep the state"):
        product(
            Launch(),
            tmp_path,
            ["--config-dir", str(tmp_path / "lab/conf"), "task=old", "loop.steps=1", "trust=[oldlab]"],
        )
