"""The command line: Hydra's grammar, and that every mistake in it costs one message that says what would work.

Refusals are shown here in whole messages, in docs/problems.md (test_problems.py), and by three real launches below.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from omegaconf import OmegaConf

import trainer
from tests.run import ROOT, files_below, run, start
from trainer.configuration.compose import compose


@pytest.fixture
def lab(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A lab below the current folder; returns its conf/."""
    monkeypatch.chdir(tmp_path)
    conf = tmp_path / "lab" / "conf"
    put(conf, "model/unet", "_target_: lab.net.Net\nwidth: 8\ndropout: 0.0\nname: null\n")
    return conf


def put(conf: Path, name: str, content: str) -> None:
    """Write one yaml file of a lab."""
    file = conf / f"{name}.yaml"
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text(content)


def refusal(*words: str) -> str:
    """What is said about a command line that cannot work."""
    said = run(words, code=2).out
    assert len(said.splitlines()) <= 12
    return said


def composed(*words: str) -> dict[str, Any]:
    """The configuration that these words come to."""
    return OmegaConf.to_container(compose(words), resolve=True)  # type: ignore[return-value]


# -------------------------------------------------------------------------------------------------------- every mistake

MUTATIONS = [  # words, what the message must contain: the key, then the suggestion or what is expected
    ("optimzer.lr=1", "optimzer.lr", "optimizer.lr"),
    ("optimzer=sgd", "optimzer", "optimizer"),
    ("model=cmn", "model=cmn", "'cnn'"),
    ("optimizer=SGD", "optimizer=SGD", "'sgd'"),
    ("model.freeze=backbone", "model.freeze=backbone", "expected a list, like [backbone]"),
    ("model=resnet51", "model=resnet51", "'resnet50'"),
    ("strategy=dpd", "strategy=dpd", "'ddp'"),
    ("strategy=dpp", "strategy=dpp", "There are: auto, cp, ddp, "),
    ("strategy=3", "strategy=3", "There are: auto"),
    ("log=[console,tensorbord]", "log=tensorbord", "'tensorboard'"),
    ("schedule=cosin", "schedule=cosin", "'cosine'"),
    ("job=evaluat", "job=evaluat", "'evaluate'"),
    ("lr=0.1", "lr", "optimizer.lr"),
    ("loop.min_delta=0.01", "loop.min_delta", "Task.finish can round the metric"),
    ("epochs=3", "epochs", "loop.epochs"),
    ("max_steps=3", "max_steps", "loop.steps"),
    ("batch_size=64", "batch_size", "did you mean loop.global_batch?"),
    ("num_workers=2", "num_workers", "did you mean loader.workers?"),
    ("trainer.max_epochs=3", "trainer.max_epochs", "did you mean loop.epochs?"),
    ("accumulate_grad_batches=2", "accumulate_grad_batches", "did you mean loop.micro_batches?"),
    ("gradient_clip_val=1", "gradient_clip_val", "did you mean loop.max_norm?"),
    ("devices=2", "devices", "did you mean processes=2?"),
    ("gpus=-1", "gpus", "did you mean processes=auto?"),
    ("loss=mse", "loss", "did you mean task?"),
    ("data=./folder", "data", "data=imagefolder data.root=./folder"),
    ("model=efficientnet_b0", "model", "model=torchvision model.name=efficientnet_b0"),
    ("optimizer=rprop", "optimizer", "optimizer=torch optimizer._target_=torch.optim.Rprop works"),
    ("optimizer=sophia", "optimizer", "optimizer=torch optimizer._target_=PACKAGE.NAME"),
    ("strategy=deepspeed", "strategy", "strategy=zero1 (ZeRO-1) and strategy=fsdp"),
    ("strategy=ddp_find_unused_parameters_true", "strategy", "strategy=ddp strategy.find_unused_parameters=true"),
    ("fp16=true", "fp16", "did you mean precision=fp16?"),
    ("--amp", "--amp", "write precision=fp16 or precision=bf16"),
    ("--batch-size=3", "--batch_size", "write loop.global_batch=3"),
    ("--epochs 3 seed=1", "--epochs", "write loop.epochs=3"),
    ("loop.epchs=3", "loop.epchs", "loop.epochs"),
    ("loop={epochs:3,stepps:4}", "loop.stepps", "loop.steps"),
    ("loop.epochs.deep=3", "loop.epochs.deep", "loop.epochs"),
    ("checkpoint.kep=1", "checkpoint.kep", "checkpoint.keep"),
    ("+loop.epcohs=3", "loop.epcohs", "loop.epochs"),
    ("optimizer.rho=2", "optimizer.rho", "If AdamW has a parameter rho, write +optimizer.rho=2"),
    ("data.root=x", "data.root", "group. It is a key of data=cifar10 or cifar100 or fashion_mnist or imagefolder"),
    ("strategy.tensor=2", "strategy.tensor", "group. It is a key of strategy=cp or ddp_cp or "),
    ("--lr=3", "--lr", "write optimizer.lr=3"),
    ("--optimizer.lr=3", "--optimizer.lr", "write optimizer.lr=3"),
    ("--config-dri lab", "--config-dri", "'--config-dir'"),
    ("--experimental-rerun x seed=1", "--experimental_rerun", ""),
    ("--config-path x seed=1", "--config-path", ""),
    ("--cfg job optimzer.lr=1", "optimzer.lr", "optimizer.lr"),
    ("optimizer.betas=[a,b]", "optimizer.betas", "a list of numbers, like [0.9, 0.999]"),
    (
        "schedule=step schedule.milestones=[1ep,2ep]",
        "schedule.milestones",
        "a list of numbers, like [1000, 2000]; count in optimizer steps",
    ),
    ("+extra=3", "extra", "no such key"),
    ("~loop.epochs", "loop.epochs", "cannot be removed"),
    ("~nothing", "nothing", "no such key"),
    ("~schedule", "schedule", "schedule=NAME"),
    ("+optimizer.lr=3", "optimizer.lr", "leave out the +"),
    ("loop.epochs=abc", "loop.epochs=abc", "a whole number of at least 1 or null"),
    ("loop.epochs=-1", "loop.epochs=-1", "a whole number of at least 1"),
    ("loop.max_norm=-1", "loop.max_norm=-1", "above 0"),
    ("loop=fast", "loop=fast", "loop.epochs"),
    ("seed=1.5", "seed=1.5", "a whole number"),
    ("optimizer.lr=abc", "optimizer.lr=abc", "a number"),
    ("optimizer.betas=3", "optimizer.betas=3", "a list"),
    ("strategy.sync_bn=3", "strategy.sync_bn=3", "true or false"),
    ("compile.fullgraph=yes", "compile.fullgraph=yes", "true or false"),
    ("compile={dynamic:true}", "compile.dynamic=true", "changes nothing without compile.mode"),
    ("precision=fp8", "precision=fp8", "bf16"),
    ("optimizer.decay=none", "optimizer.decay=none", "one of weights, all"),
    ("float8=fp8", "float8=fp8", "one of false, tensorwise, rowwise"),
    ("device=gpu", "device=gpu", "cuda"),
    ("model=[cnn,mlp]", "model=[cnn,mlp]", "not a list"),
    ("loop.steps=${nope}", "loop.steps", "nope"),
    ("loop.steps=${loop.steps}", "loop.steps", "ecursive"),
    ("loop.steps=???", "loop.steps", "must be given"),
    ("data=imagefolder", "data.root", "must be given: the folder that contains train/CLASS/"),
    ("model=net", "model=net", "yaml files of your own: --config-dir FOLDER"),
    ("optimizer.lr=0.1,0.2", "optimizer.lr", "add -m"),
    ("loop.epochs=[", "loop.epochs=[", "cannot be read"),
    ("loop.steps=3=4", "loop.steps=3=4", "this cannot be read; quote values with spaces or signs"),
    ("word", "word", "KEY=VALUE"),
    ("=3", "=3", "no key"),
    ("hydra.run.dir=/tmp/x", "hydra.run.dir", "run.dir"),
    ("hydra.run.dirr=x", "hydra.run.dirr", "hydra.run.dir"),
    ("hydra.searchpath=[pkg://lab]", "hydra.searchpath", "--config-dir adds yaml files"),
    ("hydra.mode=MULTIRUN", "hydra.mode", "-m asks for several runs"),
    ("trust=os", "trust=os", "a list of packages"),
    ("loop.log_every=soon", "loop.log_every=soon", "1ep"),
    ("run.stop_after=soon", "run.stop_after=soon", "HH:MM:SS"),
    # what is noticed while a run is built, before it has a folder
    ("loop.micro_batches=2 loop.micro_batch=4", "loop.micro_batch", "not both"),
    ("task._target_=os.system", "os.system", "may not be called"),
    ("model._target_=__main__.Net", "model._target_: __main__.Net", "is written in a notebook's cell"),
    ("run.name=../../x", "run.name", "run.dir"),
    ("run.dir=/proc/nowhere/x", "/proc/nowhere/x", "run.dir"),
    ("run.resume=/nowhere", "/nowhere", "does not exist"),
    ("run.resume=~nobody-here/x", "~nobody-here/x", "this machine knows no home folder ~nobody-here"),
    ("loop.global_batch=-4", "loop.global_batch", "-4"),
    ("loop.micro_batches=7", "128 / 1 data rank / 7", "nearest"),
    ("data=synthetic_images data.size=0", "empty", "0 samples"),
    ("data=synthetic_images data.size=10", "10 samples", "128"),
    ("data.file=/nowhere/digits.csv.gz", "/nowhere/digits.csv.gz", ""),
    ("model=torchvision model.name=resnet81", "resnet81", "resnet18"),
    ("model=vit_tiny model.width=190", "width 190", "192"),
    ("optimizer.lr=-1", "optimizer", "-1"),
    ("strategy=ddp_tp strategy.tensor=3", "3", "tensor"),
    ("device=cuda", "no GPU", "device=cpu"),
    ("profile=true loop.steps=5", "steps 10 to 12", "profile=[2,4]"),
    ("~model +model._target_=torch.nn.LazyLinear +model.out_features=10", "weight has no size", "give its layer"),
    # several runs
    ("-m optimzer.lr=1,2", "optimzer.lr", "optimizer.lr"),
    ("-m seed=1,2 lr=3", "lr", "optimizer.lr"),
    ("-m seed=x,y", "seed=x", "seed=y"),
    ("-m seed=1,2 loop.steps=[", "loop.steps=[", "cannot be read"),
    ("-m optimizer.lr=interval(0,1)", "optimizer.lr", "these values cannot be listed; write a,b,c or range(1,4)"),
    ("-m hydra.launcher.n_jobs=0 seed=1,2", "hydra.launcher.n_jobs=0", "expected"),
    ("-m model=glob(nothing*)", "nothing*", "no option of model"),
    ("-m seed=1,2 hydra.sweep.dir=x", "hydra.sweep.dir", "run.dir"),
    ("-m run.dir=a,b", "run.dir", ""),
    ("-m seed=1,2 hydra/launcher=nothing", "hydra/launcher", "nothing"),
    ("-m hydra/launcher=basic,basic", "hydra/launcher", "one launcher"),
    ("-m --cfg job seed=1,2", "--cfg", "leave out -m"),
]


@pytest.mark.parametrize(("words", "key", "said"), MUTATIONS, ids=[words for words, *_ in MUTATIONS])
def test_a_mistake_is_named_with_what_would_work_and_leaves_nothing(
    words: str, key: str, said: str, tmp_path: Path
) -> None:
    if words == "device=cuda" and torch.cuda.is_available():
        pytest.skip("this machine has a GPU")
    message = run(words.split(), place=tmp_path, code=2).out
    assert key in message
    assert said in message
    assert len(message.splitlines()) <= 6
    assert files_below(tmp_path) == set()


def test_all_mistakes_are_told_together() -> None:
    message = refusal("optimzer.lr=1", "loop.epochs=abc", "strategy=dpd", "seed=x", "optimizer.lr=abc", "hydra.foo=1")
    assert len(message.splitlines()) == 6
    many = refusal(*(f"nothing{index}=1" for index in range(30)))
    assert many.rstrip().endswith("… and 20 more")
    # of several runs, before the first one starts
    message = refusal("-m", "strategy=single,nope", "seed=1,x,3,y", "optimizer.lr=1")
    assert [line.split(":")[0] for line in message.splitlines()] == ["strategy=nope", "seed=x", "seed=y"]


def test_keys_as_arguments_of_python_are_answered_with_the_words_that_they_are_here() -> None:
    with pytest.raises(trainer.Refusal) as caught:
        trainer.run(["model=mlp"], lr=0.1, epochs=3, strategy="ddp", amp=True, nonsensical=1)
    assert str(caught.value) == (
        'trainer.run takes keys as words of its list, like the command line: trainer.run(["optimizer.lr=0.1",'
        ' "loop.epochs=3", "strategy=ddp", "precision=fp16" or "precision=bf16", …])\n'
        "nonsensical: there is no such key or group."
    )


def test_what_is_huge_is_taken_or_refused_in_a_few_lines() -> None:
    composed(*(f"+data.key_{number}=1" for number in range(300)))
    assert composed("run.name=" + "x" * 100_000)["run"]["name"] == "x" * 100_000
    assert "a list of 60,001 values; a word has at most 2,000, a yaml" in refusal("+data.list=[" + "1," * 60_000 + "1]")


# -------------------------------------------------------------------------------------------------- three real launches


def imported(*words: str, place: Path) -> tuple[int, str, list[str]]:
    """Exit code, screen and imports of the program that these words start."""
    command = [sys.executable, "-X", "importtime", "-m", "trainer", *words]
    done = subprocess.run(command, cwd=place, capture_output=True, text=True, timeout=240)
    found = re.findall(r"^import time:.*\| +(\S+)$", done.stderr, re.MULTILINE)
    said = "".join(line for line in done.stderr.splitlines(keepends=True) if not line.startswith("import time:"))
    return done.returncode, done.stdout + said, found


def test_a_word_is_refused_and_help_is_given_before_torch_is_imported(tmp_path: Path) -> None:
    for words, ends, said in (
        ("strategy=ddp optimizer.lr=abc", 2, "optimizer.lr=abc: expected a number\n"),
        ("--help", 0, "Train a network:\n  python -m trainer processes=N "),
    ):
        code, screen, modules = imported(*words.split(), place=tmp_path)
        assert (code, "hydra" in modules, "torch" in modules) == (ends, True, False)
        assert screen.startswith(said)
    assert list(tmp_path.iterdir()) == []


def test_several_processes_refuse_with_one_voice(tmp_path: Path) -> None:
    ended = start(["strategy=ddp", "device=cpu", "loop.global_batch=101"], ranks=2, place=tmp_path).end()
    assert (ended.code, ended.left, len(ended.out.splitlines())) == (2, [], 1), ended.out
    assert "global_batch 101 / 2 data ranks" in ended.out
    assert files_below(tmp_path) == set()


# -------------------------------------------------------------------------------------------------------- what is taken


def test_words_arrive_in_all_of_hydra_s_grammar() -> None:
    words = ["strategy=ddp", "strategy.bucket_mb=7", "++optimizer.lr=3", "log=[console]", "loop.epochs=${seed}"]
    more = ["+optimizer.amsgrad=true", "~optimizer.eps", "optimizer.betas.0=0.8", "loop={steps:1e4}", "seed=4"]
    cfg = composed(*words, *more, "experiment=null", "run.name=2024", "loop.log_every=[1ep,15min,500]")
    assert cfg["strategy"]["_target_"].endswith(".DDP")
    assert (cfg["strategy"]["bucket_mb"], cfg["optimizer"]["lr"], [*cfg["log"]]) == (7, 3, ["console"])
    assert (cfg["optimizer"]["amsgrad"], "eps" in cfg["optimizer"], cfg["optimizer"]["betas"][0]) == (True, False, 0.8)
    assert (cfg["loop"]["epochs"], cfg["loop"]["steps"], cfg["run"]["name"]) == (4, 10000, 2024)
    assert cfg["loop"]["log_every"] == ["1ep", "15min", 500]
    assert "hydra" not in cfg
    assert composed("data=imagefolder", "data.root=~/my pictures")["data"]["root"] == "~/my pictures"
    for both in ("compile=true compile.fullgraph=true", "compile.fullgraph=true compile=true"):
        assert composed(*both.split())["compile"]["fullgraph"] is True


@pytest.mark.parametrize(
    ("words", "said"),
    [
        ("--help", ["strategy: auto, cp, ddp", "loop.epochs=20", "torchrun --standalone", "--config-dir DIR"]),
        ("-h model=resnet18", ["model: cnn"]),
        ("--cfg job", ["global_batch: 128", "_target_"]),
        ("--cfg job --package loop loop.epochs=7", ["epochs: 7"]),
        ("--cfg job --resolve", ["num_classes: 10"]),
        ("--version", ["trainer "]),
        ("--shell-completion install=bash", ["hydra_bash_completion"]),
    ],
)
def test_hydra_answers(words: str, said: list[str], tmp_path: Path) -> None:
    answer = run(words.split(), place=tmp_path).out
    assert [part for part in said if part not in answer] == []
    assert list(tmp_path.iterdir()) == []


@pytest.mark.long
def test_hydra_helps_and_completion_knows_how_the_program_is_started(tmp_path: Path) -> None:
    assert "Hydra" in imported("--hydra-help", place=tmp_path)[1]
    assert "schedule/cosine" in imported("--info", "defaults", place=tmp_path)[1]
    typed = {**os.environ, "COMP_LINE": "python -m trainer strategy=dd", "PYTHONPATH": str(ROOT)}
    command = [sys.executable, "-m", "trainer", "-sc", "query=bash"]
    done = subprocess.run(command, cwd=tmp_path, env=typed, capture_output=True, text=True, timeout=240)
    assert done.stdout.split() == ["strategy=ddp", "strategy=ddp_cp", "strategy=ddp_pp", "strategy=ddp_tp"]


def test_secrets_are_not_written_and_not_shown(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SECRET_TOK", "tok123")
    words = ["+data.token=${oc.env:SECRET_TOK}", "+data.url='https://x/${data.token}'"]
    written = yaml.safe_load(run([*words, "--cfg", "job"]).out)["data"]
    assert (written["token"], written["url"]) == ("${oc.env:SECRET_TOK}", "https://x/${data.token}")
    for word in ("optimizer.lr", "seed", "strategy.sync_bn", "loop.log_every", "device"):
        assert "tok123" not in refusal(f"{word}=${{oc.env:SECRET_TOK}}")
    for value in ("${run.name}", "${${oc.env:SECRET_TOK}}", "${${run.name}}"):
        said = refusal("run.name=${oc.env:SECRET_TOK}", f"loop.epochs={value}")
        assert "loop.epochs=${" in said
        assert "tok123" not in said


# ----------------------------------------------------------------------------------------------------------------- labs


class TestLab:
    def test_its_options_are_found_however_the_folder_is_written(self, lab: Path) -> None:
        for spelled in (["--config-dir", "./lab/conf/"], ["--config-dir=lab/conf"], ["-cd", "lab/conf"]):
            assert composed("model=unet", *spelled, "seed=3")["model"]["width"] == 8  # flags between words
        put(lab.parent / "more conf 'x'", "data/cells", "_target_: lab.data.Cells\n")
        words = ["--config-dir", str(lab), "--config-dir", "lab/more conf 'x'", "model=unet", "data=cells"]
        cfg = composed(*words)
        assert (cfg["model"]["_target_"], cfg["data"]["_target_"]) == ("lab.net.Net", "lab.data.Cells")
        assert "unet" in run(["--config-dir", "lab/conf", "--help"]).out

    def test_a_folder_or_an_option_that_is_not_there_is_named(self, lab: Path) -> None:
        assert "'conf'" in refusal("--config-dir", "lab/cnof", "model=unet")
        assert "but there is lab/conf/model/unet.yaml; add --config-dir lab/conf" in refusal("model=unet")
        said = refusal("--config-dir", "lab/conf", "model=zzz")
        assert "there is no such option; model=torchvision model.name=zzz" in said
        put(lab, "data/digits", "_target_: lab.data.Mine\n")  # Hydra would silently not read it
        assert "another data is called digits" in refusal("--config-dir", "lab/conf", "data=digits")

    def test_a_fact_that_its_data_does_not_say_is_named(self, lab: Path) -> None:
        put(lab, "data/points", "_target_: lab.data.Points\nchannels: 1\nimage_size: 8\n")
        said = refusal("--config-dir", "lab/conf", "data=points", "model=cnn")
        wanted = "model.num_classes=${data.num_classes}: the yaml of data says no num_classes; add it there"
        assert said.startswith(wanted)

    def test_types_are_those_of_its_signature_and_not_of_its_yaml(self, lab: Path) -> None:
        cd = ["--config-dir", "lab/conf", "model=unet"]
        composed(*cd, "model.dropout=1", "model.name=anything", "model.width=auto")  # width: int | Literal["auto"]
        assert "did you mean model.width" in refusal(*cd, "model.widht=3")

    def test_a_misspelt_key_of_its_yaml_gets_no_advice_that_cannot_help(self, lab: Path) -> None:
        put(lab, "strategy/votes", "_target_: lab.votes.Votes\nscale: 1.0\n")
        put(lab, "task/scaled", "_target_: lab.votes.Scaled\nscale: 1.0\n")  # as near, and of another group
        said = refusal("--config-dir", "lab/conf", "strategy=votes", "task=scaled", "strategy.scael=2")
        assert said.strip().endswith("strategy.scael: there is no such key or group; did you mean strategy.scale?")
        said = refusal("--config-dir", "lab/conf", "strategy=votes", "strategy.scale_of_rest=2")
        assert "If Votes has a parameter scale_of_rest, write +strategy.scale_of_rest=2" in said

    def test_an_experiment_chooses_and_sets(self, lab: Path) -> None:
        put(
            lab,
            "experiment/first",
            "# @package _global_\ndefaults:\n  - override /model: unet\n  - override /optimizer: sgd\nsize: 32\n"
            "optimizer: {lr: 1}\nloop: {epochs: 3, log_every: 1ep, global_batch: '${size}', eval_batch: '${size}'}\n",
        )
        cd = ["--config-dir", "lab/conf"]
        cfg = composed(*cd, "experiment=first")
        assert (cfg["model"]["width"], cfg["optimizer"]["lr"], cfg["loop"]["epochs"]) == (8, 1, 3)
        assert (cfg["loop"]["global_batch"], cfg["loop"]["eval_batch"]) == (32, 32)  # written once, used twice
        # the experiment's `lr: 1` does not make the rate a whole number: its own yaml says what it is
        assert composed(*cd, "experiment=first", "optimizer.lr=0.5", "model=cnn")["optimizer"]["lr"] == 0.5
        assert composed(*cd, "+experiment=first")["model"]["width"] == 8
        assert composed(*cd, "experiment=first", "experiment=null") == composed()  # what was chosen is taken back
        assert "'first'" in refusal(*cd, "experiment=frist")

    @pytest.mark.parametrize(
        ("content", "said"),
        [
            ("loop: {epoch: 3}", "loop.epoch: there is no such key or group; did you mean loop.epochs"),
            ("loop: {epochs: many}", "loop.epochs=many"),
            ("seeed: 3", "seeed"),
            ("defaults:\n  - override /model: cmn", "bad.yaml: its defaults ask for model=cmn, and there is no such"),
            ("trust: [os]", "only the command line"),
            ("hydra: {sweeper: {params: {seed: '(1'}}}", "seed=(1"),
            ("hydra: {sweeper: {params: {trust: '[os]'}}}", "only the command line can set trust"),
        ],
    )
    def test_what_is_wrong_in_a_yaml_is_said_too(self, lab: Path, content: str, said: str) -> None:
        put(lab, "experiment/bad", f"# @package _global_\n{content}\n")
        several = ["-m", "seed=1,2"] if "sweeper" in content else []
        assert said in refusal(*several, "--config-dir", "lab/conf", "experiment=bad")
        put(lab, "experiment/bad", "loop: {epochs: 3}\n")
        assert "# @package _global_" in refusal("--config-dir", "lab/conf", "experiment=bad")

    @pytest.mark.parametrize(
        ("content", "said"),
        [
            ("_target_: lab.net.Net\nwidth: [1, 2\nname: x\n", "line 3"),
            ("a: 1\na: 2\n", "line 2"),
            ("a: *unknown\n", "line 1"),
            ("a: \x00\n", "not valid YAML"),
            ("a: &a [*a]\n", "without end"),
            (
                "a0: &a0 x\n" + "".join(f"a{n}: &a{n} [*a{n - 1}, *a{n - 1}]\n" for n in range(1, 41)),
                "unet.yaml: its references (*name) make 4,398,046,511,103 values of it; at most 10,000",
            ),
        ],
        ids=["syntax", "twice", "alias", "bytes", "endless", "bomb"],
    )
    def test_a_broken_yaml_is_named_with_its_line(self, lab: Path, content: str, said: str) -> None:
        put(lab, "model/unet", content)
        message = refusal("--config-dir", "lab/conf", "model=unet")
        assert said in message
        assert "unet" in message
        put(lab, "model/unet", "_target_: lab.net.Net\nwidth: &width 7\nclasses: *width\n")
        assert composed("--config-dir", "lab/conf", "model=unet")["model"]["classes"] == 7
