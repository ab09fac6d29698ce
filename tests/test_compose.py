"""The command line: Hydra's grammar, typos and types in words, labs, and nothing that runs code or imports torch."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
from omegaconf import OmegaConf

import trainer
from tests.quick import quickly
from trainer.configuration.command_line import parse_command_line
from trainer.configuration.compose import compose
from trainer.configuration.interpolation import flatten, to_yaml
from trainer.configuration.key_checks import _OTHER_NAMES
from trainer.configuration.resource_paths import resource_root
from trainer.configuration.schema import parse_settings
from trainer.messages import Refusal


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
    with pytest.raises(Refusal) as caught:
        compose(words)
    assert len(str(caught.value).splitlines()) <= 12
    return str(caught.value)


MUTATIONS = [  # words, what the message must contain: the key, then the suggestion or what is expected
    ("optimzer.lr=1", "optimzer.lr", "optimizer.lr"),
    ("optimzer=sgd", "optimzer", "optimizer"),
    ("modle=cnn", "modle", "model"),
    ("strateg=ddp", "strateg", "strategy"),
    ("model=cmn", "model=cmn", "'cnn'"),
    ("optimizer=SGD", "optimizer=SGD", "'sgd'"),
    ("model.freeze=backbone", "model.freeze=backbone", "expected a list, like [backbone]"),
    ("model=resnet51", "model=resnet51", "'resnet50'"),
    ("strategy=dpd", "strategy=dpd", "'ddp'"),
    ("strategy=dpp", "strategy=dpp", "There are: auto, cp, ddp, "),
    ("strategy=3", "strategy=3", "There are: auto"),
    ("log=[console,tensorbord]", "log=tensorbord", "'tensorboard'"),
    ("schedule=cosin", "schedule=cosin", "'cosine'"),
    ("data=digit", "data=digit", "'digits'"),
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
    ("loop.epchs=3", "loop.epchs", "loop.epochs"),
    ("loop.logevery=3", "loop.logevery", "loop.log_every"),
    ("loop={epochs:3,stepps:4}", "loop.stepps", "loop.steps"),
    ("loop.epochs.deep=3", "loop.epochs.deep", "loop.epochs"),
    ("run.nam=x", "run.nam", "run.name"),
    ("checkpoint.kep=1", "checkpoint.kep", "checkpoint.keep"),
    ("+loop.epcohs=3", "loop.epcohs", "loop.epochs"),
    ("optimizer.rho=2", "optimizer.rho", "If AdamW has a parameter rho, write +optimizer.rho=2"),
    ("data.root=x", "data.root", "group. It is a key of data=cifar10 or cifar100 or fashion_mnist or imagefolder"),
    ("strategy.tensor=2", "strategy.tensor", "group. It is a key of strategy=cp or ddp_cp or "),
    ("--lr=3", "--lr", "write optimizer.lr=3"),
    ("--global-batch=3", "--global_batch", "write loop.global_batch=3"),
    ("--optimizer.lr=3", "--optimizer.lr", "write optimizer.lr=3"),
    ("optimizer.betas=[a,b]", "optimizer.betas", "a list of numbers, like [0.9, 0.999]"),
    ("+extra=3", "extra", "no such key"),
    ("~loop.epochs", "loop.epochs", "cannot be removed"),
    ("~nothing", "nothing", "no such key"),
    ("~schedule", "schedule", "schedule=NAME"),
    ("+optimizer.lr=3", "optimizer.lr", "leave out the +"),
    ("loop.epochs=abc", "loop.epochs=abc", "a whole number of at least 1 or null"),
    ("loop.epochs=-1", "loop.epochs=-1", "a whole number of at least 1"),
    ("loop.global_batch=0", "loop.global_batch=0", "at least 1"),
    ("loop.max_norm=-1", "loop.max_norm=-1", "above 0"),
    ("loop=fast", "loop=fast", "loop.epochs"),
    ("seed=1.5", "seed=1.5", "a whole number"),
    ("optimizer.lr=abc", "optimizer.lr=abc", "a number"),
    ("optimizer.betas=3", "optimizer.betas=3", "a list"),
    ("strategy.sync_bn=3", "strategy.sync_bn=3", "true or false"),
    ("compile.fullgraph=yes", "compile.fullgraph=yes", "true or false"),
    ("compile={dynamic: true}", "compile.dynamic=true", "changes nothing without compile.mode"),
    ("precision=fp8", "precision=fp8", "bf16"),
    ("float8=fp8", "float8=fp8", "one of false, tensorwise, rowwise"),
    ("device=gpu", "device=gpu", "cuda"),
    ("model=[cnn,mlp]", "model=[cnn,mlp]", "not a list"),
    ("loop.steps=${nope}", "loop.steps", "nope"),
    ("loop.steps=???", "loop.steps", "must be given"),
    ("data=imagefolder", "data.root", "must be given: the folder that contains train/CLASS/"),
    ("model=net", "model=net", "yaml files of your own: --config-dir FOLDER"),
    ("optimizer.lr=0.1,0.2", "optimizer.lr", "add -m"),
    ("loop.epochs=[", "loop.epochs=[", "cannot be read"),
    ("word", "word", "KEY=VALUE"),
    ("=3", "=3", "no key"),
    ("hydra.run.dir=/tmp/x", "hydra.run.dir", "run.dir"),
    ("hydra.searchpath=[pkg://lab]", "hydra.searchpath", "--config-dir adds yaml files"),
    ("hydra.mode=MULTIRUN", "hydra.mode", "-m asks for several runs"),
    ("trust=os", "trust=os", "a list of packages"),
]


@pytest.mark.parametrize(("word", "key", "said"), MUTATIONS, ids=[word for word, *_ in MUTATIONS])
def test_a_mistake_is_named_with_what_would_work(word: str, key: str, said: str) -> None:
    message = refusal(word)
    assert key in message
    assert said in message


def test_all_mistakes_are_told_together() -> None:
    message = refusal("optimzer.lr=1", "loop.epochs=abc", "strategy=dpd", "seed=x", "optimizer.lr=abc", "hydra.foo=1")
    assert len(message.splitlines()) == 6
    many = refusal(*(f"nothing{index}=1" for index in range(30)))
    assert many.endswith("… and 20 more")


def test_what_others_call_a_key_is_a_key_here() -> None:
    known = flatten(OmegaConf.to_container(compose(["data=imagefolder", "data.root=x", "strategy=ddp"])))
    assert [key for key in _OTHER_NAMES if not re.search("[= ]", key) and key not in known] == []
    names = [name for theirs in _OTHER_NAMES.values() for name in theirs.split()]
    assert [name for name in names if name in known] == []


@pytest.mark.parametrize(
    "words",
    [
        ["strategy=ddp", "model=resnet18", "optimizer.lr=0.4"],
        ["loop.log_every=[1ep,15min,500]", "run.stop_after=01:30:00", "loop.save_every=null"],
        ["+optimizer.amsgrad=true", "++optimizer.lr=1", "~optimizer.eps"],
        ["optimizer.betas.0=0.8", "optimizer={lr:1}"],
        ["log=[]"],
        ["log=console"],
        ["experiment=null"],
        ["run.name=2024", "loop.steps=1e4"],
        ["data=imagefolder", "data.root=~/my pictures"],
        ["loop.epochs=${seed}", "seed=3"],
        [],
    ],
    ids=str,
)
def test_hydra_s_grammar_is_taken(words: list[str]) -> None:
    parse_settings(compose(words))


def test_words_arrive() -> None:
    cfg = compose(["strategy=ddp", "strategy.bucket_mb=7", "optimizer.lr=3", "log=[console]", "loop.epochs=4"])
    assert cfg.strategy._target_ == "trainer.strategies.ddp.DDP"
    assert (cfg.strategy.bucket_mb, cfg.optimizer.lr, list(cfg.log), cfg.loop.epochs) == (7, 3, ["console"], 4)
    assert "hydra" not in cfg


@pytest.mark.parametrize("words", ["compile=true compile.fullgraph=true", "compile.fullgraph=true compile=true"])
def test_compile_true_goes_with_the_other_keys_of_its_section(words: str) -> None:
    found = parse_settings(compose(words.split())).compile
    assert (found.mode, found.fullgraph) == ("default", True)


@pytest.mark.parametrize("flags", [["--experimental-rerun", "x"], ["--config-path", "x"]], ids=str)
def test_flags_that_are_not_taken_are_refused_in_words(flags: list[str]) -> None:
    assert len(refusal(*flags, "seed=1").splitlines()) == 1


def test_a_key_written_like_a_flag_takes_its_value_along() -> None:
    assert refusal("--epochs", "3", "seed=1").endswith("write loop.epochs=3")


def test_milestones_are_counted_in_steps() -> None:
    message = refusal("schedule=step", "schedule.milestones=[1ep,2ep]")
    assert "a list of numbers, like [1000, 2000]; count in optimizer steps" in message


def test_a_mistyped_flag_is_named() -> None:
    assert "'--config-dir'" in refusal("--config-dri", "lab")


class TestLab:
    @pytest.mark.parametrize(
        "spelled",
        [
            ["--config-dir", "lab/conf"],
            ["--config-dir=lab/conf"],
            ["-cd", "lab/conf"],
            ["--config-dir", "./lab/conf/"],
        ],
        ids=str,
    )
    def test_its_options_are_found_however_the_folder_is_written(self, lab: Path, spelled: list[str]) -> None:
        assert compose([*spelled, "model=unet"]).model.width == 8
        assert compose(["model=unet", *spelled, "seed=3"]).seed == 3  # flags between words
        assert parse_command_line(spelled).folders == (lab,)

    def test_an_absolute_path_and_two_folders(self, lab: Path) -> None:
        put(lab.parent / "more conf 'x'", "data/cells", "_target_: lab.data.Cells\n")
        words = ["--config-dir", str(lab), "--config-dir", "lab/more conf 'x'", "model=unet", "data=cells"]
        cfg = compose(words)
        assert (cfg.model._target_, cfg.data._target_) == ("lab.net.Net", "lab.data.Cells")

    def test_a_folder_that_is_not_there_is_named(self, lab: Path) -> None:
        assert "'conf'" in refusal("--config-dir", "lab/cnof", "model=unet")

    def test_a_fact_that_its_data_does_not_say_is_named(self, lab: Path) -> None:
        put(lab, "data/points", "_target_: lab.data.Points\nchannels: 1\nimage_size: 8\n")
        said = refusal("--config-dir", "lab/conf", "data=points", "model=cnn")
        assert said.startswith(
            "model.num_classes=${data.num_classes}: the yaml of data says no num_classes; add it there"
        )

    def test_that_its_folder_was_not_named_is_seen(self, lab: Path) -> None:
        assert "but there is lab/conf/model/unet.yaml; add --config-dir lab/conf" in refusal("model=unet")
        assert "there is no such option; model=torchvision model.name=zzz" in refusal(
            "--config-dir", "lab/conf", "model=zzz"
        )

    def test_types_are_those_of_its_signature_and_not_of_its_yaml(self, lab: Path) -> None:
        cd = ["--config-dir", "lab/conf", "model=unet"]
        compose([*cd, "model.dropout=1", "model.name=anything", "model.width=auto"])  # width: int | Literal["auto"]
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
            "# @package _global_\ndefaults:\n  - override /model: unet\n  - override /optimizer: sgd\n"
            "optimizer: {lr: 1}\nloop: {epochs: 3, log_every: 1ep}\n",
        )
        cd = ["--config-dir", "lab/conf"]
        cfg = compose([*cd, "experiment=first"])
        assert (cfg.model.width, cfg.optimizer.lr, cfg.loop.epochs) == (8, 1, 3)
        # the experiment's `lr: 1` does not make the rate a whole number: its own yaml says what it is
        assert compose([*cd, "experiment=first", "optimizer.lr=0.5", "model=cnn"]).optimizer.lr == 0.5
        assert compose([*cd, "+experiment=first"]).model.width == 8
        assert compose([*cd, "experiment=first", "experiment=null"]) == compose([])  # what was chosen is taken back
        assert "'first'" in refusal(*cd, "experiment=frist")

    @pytest.mark.parametrize(
        ("content", "said"),
        [
            (
                "# @package _global_\nloop: {epoch: 3}\n",
                "loop.epoch: there is no such key or group; did you mean loop.epochs",
            ),
            ("# @package _global_\nloop: {epochs: many}\n", "loop.epochs=many"),
            ("# @package _global_\nseeed: 3\n", "seeed"),
            ("loop: {epochs: 3}\n", "# @package _global_"),
            (
                "# @package _global_\ndefaults:\n  - override /model: cmn\n",
                "bad.yaml: its defaults ask for model=cmn, and there is no such option; did you mean 'cnn'",
            ),
            (
                "# @package _global_\ndefaults:\n  - override /model: xyzzy\n",
                "ask for model=xyzzy, and there is no such",
            ),
            ("# @package _global_\ntrust: [os]\n", "only the command line"),
            ("# @package _global_\nhydra: {job: {env_copy: [NOT_SET_ANYWHERE]}}\n", "NOT_SET_ANYWHERE"),
        ],
    )
    def test_what_is_wrong_in_a_yaml_is_said_too(self, lab: Path, content: str, said: str) -> None:
        put(lab, "experiment/bad", content)
        assert said in refusal("--config-dir", "lab/conf", "experiment=bad")

    def test_a_number_written_once_and_used_twice_is_read(self, lab: Path) -> None:
        put(
            lab,
            "experiment/one",
            "# @package _global_\nsize: 32\nloop: {global_batch: '${size}', eval_batch: '${size}'}\n",
        )
        assert compose(["--config-dir", "lab/conf", "experiment=one"]).loop.eval_batch == 32

    @pytest.mark.parametrize(
        ("content", "said"),
        [
            (
                "a0: &a0 x\n" + "".join(f"a{n}: &a{n} [*a{n - 1}, *a{n - 1}]\n" for n in range(1, 41)),
                "4,398,046,511,105 values",
            ),
            ("a: &a [*a]\n", "without end"),
        ],
    )
    def test_references_that_multiply_are_refused_before_they_are_followed(
        self, lab: Path, content: str, said: str
    ) -> None:
        put(lab, "model/unet", f"_target_: lab.net.Net\n{content}")
        message = refusal("--config-dir", "lab/conf", "model=unet")
        assert re.search(rf"unet\.yaml: its references \(\*name\) make {said} of it; at most 10,000", message), message
        put(lab, "model/unet", "_target_: lab.net.Net\nwidth: &width 7\nclasses: *width\n")
        assert compose(["--config-dir", "lab/conf", "model=unet"]).model.classes == 7

    def test_a_file_that_hydra_would_silently_not_read_is_named(self, lab: Path) -> None:
        put(lab, "data/digits", "_target_: lab.data.Mine\n")
        assert "another data is called digits" in refusal("--config-dir", "lab/conf", "data=digits")

    @pytest.mark.parametrize(
        ("content", "said"),
        [
            ("_target_: lab.net.Net\nwidth: [1, 2\nname: x\n", "line 3"),
            ("a: 1\na: 2\n", "line 2"),
            ("a: *unknown\n", "line 1"),
            ("a: '${x'\n", "${x"),
            ("a: \x00\n", "not valid YAML"),
        ],
        ids=["syntax", "twice", "alias", "interpolation", "bytes"],
    )
    def test_a_broken_yaml_is_named_with_its_line(self, lab: Path, content: str, said: str) -> None:
        put(lab, "model/unet", content)
        message = refusal("--config-dir", "lab/conf", "model=unet")
        assert said in message
        assert "unet" in message or "${" in message  # OmegaConf itself forgets where it has read an interpolation


def test_secrets_are_not_written_and_not_shown(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SECRET_TOK", "tok123")
    cfg = compose(["+data.token=${oc.env:SECRET_TOK}"])
    assert cfg.data.token == "tok123"
    assert "${oc.env:SECRET_TOK}" in to_yaml(cfg)
    assert "tok123" not in to_yaml(cfg)
    for word in ("optimizer.lr", "seed", "strategy.sync_bn", "loop.log_every", "device"):
        assert "tok123" not in refusal(f"{word}=${{oc.env:SECRET_TOK}}")


def process(*words: str, cwd: Path, **env: str) -> subprocess.CompletedProcess[str]:
    """Compose in a process of its own, as the program does before it imports torch, and in 1 GiB of memory."""
    script = (
        "import resource, sys\nresource.setrlimit(resource.RLIMIT_AS, (2**30, 2**30))\n"
        "from trainer.configuration.compose import compose\nfrom trainer.messages import Refusal\n"
        "try:\n    compose(sys.argv[1:])\n"
        "except Refusal as refusal:\n    print(refusal)\n"
        "finally:\n    assert 'torch' not in sys.modules\n"
    )
    surroundings = {**os.environ, "PYTHONPATH": str(resource_root()), **env}
    command = [sys.executable, "-W", "error", "-c", script, *words]
    return subprocess.run(command, cwd=cwd, env=surroundings, capture_output=True, text=True, timeout=240)


class TestProcess:
    @pytest.mark.parametrize(
        "words", quickly([["bad=words"], ["model=resnet18"], ["loop.epochs=abc"]], ["model=resnet18"]), ids=str
    )
    def test_no_torch_and_no_files(self, tmp_path: Path, words: list[str]) -> None:
        done = process(*words, cwd=tmp_path)
        assert (done.returncode, done.stderr) == (0, "")
        assert list(tmp_path.iterdir()) == []

    @pytest.mark.parametrize(
        ("words", "said"),
        [
            (
                ["--help"],
                [
                    "Train a network:\n  python -m trainer processes=N ",
                    "strategy: auto, cp, ddp",
                    "loop.epochs=20",
                    "torchrun --standalone",
                    "--config-dir DIR",
                ],
            ),
            pytest.param(["-h", "model=resnet18"], ["model: cnn"], marks=pytest.mark.long),
            (["--cfg", "job"], ["global_batch: 128", "_target_"]),
            pytest.param(["--cfg", "job", "--package", "loop", "loop.epochs=7"], ["epochs: 7"], marks=pytest.mark.long),
            pytest.param(["--cfg", "job", "--resolve"], ["num_classes: 10"], marks=pytest.mark.long),
            pytest.param(["--info", "defaults"], ["config"], marks=pytest.mark.long),
            pytest.param(["--hydra-help"], ["Hydra"], marks=pytest.mark.long),
            (["--version"], ["trainer "]),
            pytest.param(["--shell-completion", "install=bash"], ["hydra_bash_completion"], marks=pytest.mark.long),
        ],
        ids=lambda value: " ".join(value) if value[0].startswith("-") else "",
    )
    def test_hydra_answers(self, tmp_path: Path, words: list[str], said: list[str]) -> None:
        done = process(*words, cwd=tmp_path)
        assert (done.returncode, done.stderr) == (0, "")
        assert [part for part in said if part not in done.stdout] == []
        assert list(tmp_path.iterdir()) == []

    @pytest.mark.parametrize(
        ("words", "said"),
        [
            pytest.param([f"+data.key_{number}=1" for number in range(1000)], "", marks=pytest.mark.long),
            ([f"data.root=/{number}" for number in range(50)], "data.root: there is no such key"),
            pytest.param(["run.name=" + "x" * 100_000], "", marks=pytest.mark.long),
            (["+data.list=[" + "1," * 60_000 + "1]"], "a list of 60,001 values; a word has at most 2,000, a yaml"),
        ],
        ids=["keys", "mistakes", "value", "list"],
    )
    def test_what_is_huge_is_taken_or_refused_in_a_few_lines(self, tmp_path: Path, words: list[str], said: str) -> None:
        done = process(*words, cwd=tmp_path)
        assert (done.returncode, done.stderr) == (0, "")
        assert bool(said) == bool(done.stdout)
        assert said in done.stdout
        assert len(done.stdout.splitlines()) <= 12

    @pytest.mark.parametrize(
        ("words", "said"),
        [
            pytest.param(
                "model=resnet81",
                "model=resnet81: there is no such option; did you mean 'resnet18' or 'resnet50'?",
                marks=pytest.mark.long,
            ),
            ("loop.stepz=3", "loop.stepz: there is no such key or group; did you mean loop.steps?"),
            ("strategy=ddp optimizer.lr=abc", "optimizer.lr=abc: expected a number"),
            pytest.param(
                "loop.steps=abc",
                "loop.steps=abc: expected a whole number of at least 1 or null",
                marks=pytest.mark.long,
            ),
            pytest.param(
                "loop.steps=3=4",
                "loop.steps=3=4: this cannot be read; quote values with spaces or signs",
                marks=pytest.mark.long,
            ),
            pytest.param(
                "loop.steps=3,4", "loop.steps=3,4: several values mean several runs: add -m", marks=pytest.mark.long
            ),
            pytest.param(
                "--epochs=3",
                "--epochs: keys are written as KEY=VALUE, without dashes; write loop.epochs=3",
                marks=pytest.mark.long,
            ),
            pytest.param("processes=2 data.size=1", "data.size: there is no such key or group", marks=pytest.mark.long),
            ("-m loop.stepz=1,2", "loop.stepz: there is no such key or group; did you mean loop.steps?"),
        ],
    )
    def test_the_program_refuses_a_word_before_it_imports_torch(self, tmp_path: Path, words: str, said: str) -> None:
        command = [sys.executable, "-X", "importtime", "-m", "trainer", *words.split()]
        done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=240)
        imported = re.findall(r"^import time:.*\| +(\S+)$", done.stderr, re.MULTILINE)
        assert (done.returncode, "hydra" in imported, "torch" in imported) == (2, True, False)
        assert said in done.stderr
        assert list(tmp_path.iterdir()) == []

    @pytest.mark.long
    def test_help_lists_a_lab_s_options(self, lab: Path, tmp_path: Path) -> None:
        assert "unet" in process("--config-dir", "lab/conf", "--help", cwd=tmp_path).stdout

    @pytest.mark.long
    def test_completion_knows_how_the_program_is_started(self, tmp_path: Path) -> None:
        done = process("-sc", "query=bash", cwd=tmp_path, COMP_LINE="python -m trainer strategy=dd")
        assert done.stdout.split() == ["strategy=ddp", "strategy=ddp_cp", "strategy=ddp_pp", "strategy=ddp_tp"]

    def test_of_several_processes_one_answers(self, tmp_path: Path) -> None:
        assert process("--help", cwd=tmp_path, RANK="1", WORLD_SIZE="2").stdout == ""

    def test_typos_are_refused_under_cfg_too(self, tmp_path: Path) -> None:
        assert "optimizer.lr" in process("--cfg", "job", "optimzer.lr=1", cwd=tmp_path).stdout


def test_keys_as_arguments_of_python_are_answered_with_the_words_that_they_are_here() -> None:
    with pytest.raises(Refusal) as caught:
        trainer.run(["model=mlp"], lr=0.1, epochs=3, strategy="ddp", amp=True, nonsensical=1)
    assert str(caught.value) == (
        'trainer.run takes keys as words of its list, like the command line: trainer.run(["optimizer.lr=0.1",'
        ' "loop.epochs=3", "strategy=ddp", "precision=fp16" or "precision=bf16", …])\n'
        "nonsensical: there is no such key or group."
    )
