"""From a configuration to objects: what may be built, of which kind, with which arguments. What must never run: see
test_strangers.py."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import yaml

from tests.run import run

LAB = """
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Literal
from torch import nn
from trainer import Data, Task

if TYPE_CHECKING:
    from somewhere import Unknown

number = 3


class Shown(Exception):
    pass


class Net(nn.Module):
    def __init__(self, width: int, rate: float = 0.1, name: str = "net", deep: bool = False,
                 sizes: tuple[int, ...] = (1,), pair: tuple[int, int] | None = None, mode: Literal["a", "b"] = "a",
                 norm: "Unknown" = None, file: Path | None = None, parts: list[nn.Module] | None = None,
                 depth: int = None):
        raise Shown({name: value for name, value in locals().items() if name not in ("self", "__class__")})


class Loose(nn.Module):
    def __init__(self, **words):
        Net(**words)


class Broken(nn.Module):
    def __init__(self):
        raise ZeroDivisionError("my own mistake")


class Picky(nn.Module):
    def __init__(self, width: int, token: str = ""):
        super().__init__()
        self.inner = nn.Linear(width, width)


class Cells(Data):
    def __init__(self, classes: int = 2):
        self.classes = classes

    def train(self):
        raise Shown(self.classes)


class Counting(Cells):
    def __init__(self, num_classes: int, channels: int):
        self.classes = num_classes, channels


class Learn(Task):
    pass


class Elastic:
    def __init__(self, amount: float):
        self.amount = amount


def make(width: int = 64):
    return nn.Sequential(nn.Flatten(), nn.Linear(width, 10))


def typed(width: int = 64) -> nn.Module:
    return make(width)


def number_of(width: int = 1) -> int:
    return width


def wrong(width: int = 1):
    return {"width": width}
"""

Built = Callable[..., str]


@pytest.fixture
def built(tmp_path: Path) -> Built:
    """What stands on the screen where a group is built of a node, in a lab's folder."""
    lab = tmp_path / "biolab"
    (lab / "conf").mkdir(parents=True)
    (lab / "net.py").write_text(LAB)
    (lab / "torn.py").write_text("import not_installed_anywhere\n")

    def build(target: Any, group: str = "model", code: int = 2, words: tuple[str, ...] = (), **values: Any) -> str:
        file = lab / "conf" / group / "own.yaml"
        file.parent.mkdir(exist_ok=True)
        file.write_text(yaml.safe_dump(({} if target is None else {"_target_": target}) | values, sort_keys=False))
        own = ["--config-dir", "biolab/conf", f"{group}=own", "loop.steps=1", "loop.global_batch=8", *words]
        return run(own, place=tmp_path, code=code).out

    return build


NET = "biolab.net.Net"


# ------------------------------------------------------------------------------------------------- what is built


def test_a_class_of_a_lab_gets_what_its_types_say(built: Built) -> None:
    given = {"width": 3, "rate": 1, "name": 7, "sizes": [1, 2], "pair": [3, 4], "file": "a/b", "depth": None}
    inner = [
        {"_target_": "torch.nn.LayerNorm", "_partial_": True, "eps": 0.1},
        {"_target_": "torch.distributed.fsdp.MixedPrecisionPolicy", "output_dtype": None},
        {"_target_": "torch.nn.Sequential", "_args_": [{"_target_": "torch.nn.ReLU"}, {"_target_": "torch.nn.Tanh"}]},
    ]
    linear = {"_target_": "torch.nn.Linear", "_args_": [1], "out_features": 2}
    shown = built(NET, code=1, **given, norm=inner, parts=[linear])
    assert "'width': 3, 'rate': 1.0, 'name': '7', 'deep': False, 'sizes': (1, 2), 'pair': (3, 4), 'mode': 'a'" in shown
    assert re.search(r"functools.partial\(<class 'torch.nn.modules.normalization.LayerNorm'>, eps=0.1\)", shown)
    assert re.search(r"MixedPrecisionPolicy\(.*output_dtype=None", shown)
    assert re.search(r"(?s)Sequential\(.*ReLU\(\).*Tanh\(\)", shown)
    assert "[Linear(in_features=1, out_features=2, bias=True)]" in shown
    assert re.search(r"'file': PosixPath\('a/b'\)", shown)
    # what nobody can know is taken as it is
    assert "'norm': 'batch'" in built(NET, code=1, width=1, norm="batch")
    assert "'width': 1" in built("biolab.net.Loose", code=1, width=1)


@pytest.mark.parametrize(
    ("target", "values"),
    [
        ("biolab.net.make", {}),
        ("biolab.net.typed", {"width": 64}),
        (
            "torch.nn.Sequential",
            {"_args_": [{"_target_": "torch.nn.Flatten"}, {"_target_": "torch.nn.Linear", "_args_": [64, 10]}]},
        ),
    ],
)
def test_a_network_may_come_of_a_function_or_of_torch(built: Built, target: str, values: dict[str, Any]) -> None:
    built(target, code=0, **values)


def test_facts_of_data_go_to_those_who_name_them(built: Built) -> None:
    facts = {"num_classes": 10, "channels": 3, "image_size": None}
    assert "Shown: 2" in built("biolab.net.Cells", "data", code=1, **facts)
    assert "Shown: (10, 3)" in built("biolab.net.Counting", "data", code=1, **facts)
    assert "model.num_classes: Net takes no such key" in built(NET, width=1, num_classes=10)  # only data has facts


# ------------------------------------------------------------------------------------------- what is wrong with it


@pytest.mark.parametrize(
    ("target", "said"),
    [
        ("torch.package.PackageImporter", "no Module, Task, Data, ParallelStyle, transform or dataclass"),
        ("torch.distributed.nn.RemoteModule", "that keeps to itself; if you know what it does"),
        ("torchvision.datasets.CIFAR10", "trust=[torchvision]"),
        ("torch.nn.init.zeros_", "it is a function; a class may be that is a Module"),
        ("torch.distributions.Normal", "trust=[torch]"),
    ],
)
def test_what_others_may_not_be_says_what_to_write(built: Built, target: str, said: str) -> None:
    message = built(NET, width=1, norm={"_target_": target, "loc": 0.0, "scale": 1.0})
    assert message.startswith("model.norm: torch")
    assert said in message
    if "Normal" in target:
        shown = built(NET, code=1, words=("trust=[torch]",), width=1, norm={"_target_": target, "loc": 0.0, "scale": 1})
        assert "Normal(loc: 0.0, scale: 1.0)" in shown


def test_all_wrong_arguments_are_told_together(built: Built) -> None:
    values = {"widht": 1, "rate": "fast", "deep": 1, "sizes": ["a"], "pair": [1, 2, 3], "mode": "c", "parts": [3]}
    told = built(NET, **values)
    for said in (
        "model.widht: Net takes no such key; did you mean 'width'",
        "model.width: Net needs it",
        "model.rate=fast: Net expects a number",
        "model.deep=1: Net expects true or false",
        "model.sizes=['a']: Net expects a list of whole numbers",
        "model.pair=[1, 2, 3]: Net expects a list of 2 or null",
        "model.mode=c: Net expects one of a, b",
        "model.parts=[3]: Net expects a list",
    ):
        assert said in told
    # behind **words only the callee knows
    assert "model.widht" in built("biolab.net.Loose", width=1, widht=1)
    for reserved, said in (({"_convert_": "none"}, "only _target_"), ({"_partial_": "yes"}, "(true or false)")):
        assert said in built(NET, width=1, **reserved)


def test_what_is_wrong_in_any_group_is_told_before_one_is_built(built: Built) -> None:
    words = ("schedule=cosine", "schedule.reference_batch=1.5")
    told = built("biolab.net.Broken", words=(*words, "strategy=fsdp", "strategy.activation_checkpointing=all"))
    assert set(told.splitlines()) == {
        "schedule.reference_batch=1.5: Cosine expects a whole number or null",
        "strategy.activation_checkpointing=all: FSDP expects one of none, units, operators",
    }


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (("optimizer=sgd", "+optimizer.lrr=1"), "optimizer.lrr: SGD takes no such key; did you mean 'lr'?"),
        (("optimizer=torch", "optimizer._target_=torch.optim.SDG"), "'SGD'"),
        (("optimizer=torch", "optimizer._target_=torch.nn.Linear"), "not a Optimizer"),
        (("optimizer=torch", "optimizer._target_=torch.optim.lr_scheduler.StepLR"), "not a Optimizer"),
        (("task.label_smoothing=3",), "between 0 and 1"),
        (("model=cnn", "model.width=4"), "at least 8"),
        (("log=[mine]", "+log.mine._target_=torch.nn.Linear"), "log"),
        (("+log.console=null", "log=[console]"), "log.console"),
    ],
)
def test_an_optimizer_or_a_value_that_cannot_work_is_said_before_any_step(
    tmp_path: Path, words: tuple[str, ...], said: str
) -> None:
    assert said in run(words, place=tmp_path, code=2).out


@pytest.mark.parametrize(
    ("target", "group", "said"),
    [
        ("biolab.net.Cells", "task", "not a Task"),
        ("biolab.net.Learn", "schedule", "not a Schedule"),
        ("biolab.net.Elastic", "model", "not a Module"),
        ("biolab.net.number_of", "model", "returns int"),
        ("biolab.net.wrong", "model", "returned a dict"),
        ("biolab.net.make", "task", "does not say"),
        ("biolab.net.number", "model", "not a class or function"),
        ("torch.nn.Linear", "strategy", "not a Strategy"),
        ("trainer.learning.schedule.Schedule", "schedule", "abstract"),
        ("trainer.strategies.auto.auto", "model", "returns Strategy"),
        (None, "model", "must say what to build"),
        (3, "model", "is not the name"),
        ("biolab..net", "model", "is not the name"),
        ("biolab.net.Ne", "model", "'Net'"),
        ("biolab.nett.Net", "model", "there is no biolab.nett"),
        ("net.Net", "model", "write biolab.net.Net"),
    ],
)
def test_the_kind_is_checked_and_the_name(built: Built, target: Any, group: str, said: str) -> None:
    assert said in built(target, group)


def test_an_error_of_the_callee_keeps_its_traceback_and_says_where(built: Built) -> None:
    screen = built("biolab.net.Broken", code=1)
    assert re.search(r"(?s)biolab/net\.py\", line \d+, in __init__.*ZeroDivisionError: my own mistake", screen)
    assert "while building model from the configuration: biolab.net.Broken" in screen
    screen = built("biolab.torn.Net", code=1)
    assert re.search(r"(?s)ModuleNotFoundError.*not_installed_anywhere.*biolab\.torn", screen)


def test_values_that_a_constructor_does_not_take_are_refused_and_a_secret_is_in_no_message(
    built: Built, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SECRET_TOK", "tok123")
    message = built("biolab.net.Picky", width=-3, token="${oc.env:SECRET_TOK}")
    assert message.startswith("model: biolab.net.Picky cannot be built with width=-3, token=${oc.env:SECRET_TOK}: ")
    assert "negative dimension -3" in message
    assert re.search(r"\(\S+biolab/net.py, line \d+\)$", message.strip())
    assert "${oc.env:SECRET_TOK}" in (wrong := built(NET, width="${oc.env:SECRET_TOK}"))
    assert "tok123" not in message + wrong


# ---------------------------------------------------------------------------------------------- who may be named


def test_a_package_is_trusted_by_the_command_line_and_no_further(tmp_path: Path) -> None:
    def said(target: str, *words: str) -> str:
        return run([f"model._target_={target}", *words], place=tmp_path, code=2).out

    assert "trust=[unittest]" in said("unittest.mock.Mock")
    assert "not a Module" in said("unittest.mock.Mock", "trust=[unittest]")  # known, but of no kind
    assert "is really posix.system" in said("shutil.os.system", "trust=[shutil]")
    assert "does not say" in said("shutil.copyfile", "trust=[shutil]")


def test_a_lab_that_is_not_below_the_current_folder_is_told_where_to_start(tmp_path: Path) -> None:
    conf = tmp_path / "far_away" / "conf"
    conf.mkdir(parents=True)
    (tmp_path / "here").mkdir()
    words = ["--config-dir", str(conf), "model._target_=far_away.net.Net"]
    assert f"start in {tmp_path}" in run(words, place=tmp_path / "here", code=2).out
