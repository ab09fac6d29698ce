"""From nodes to objects: what may be called, of which kind, with which arguments; and what must never run."""

import re
import sys
from collections.abc import Iterator
from dataclasses import replace
from functools import partial
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from omegaconf import DictConfig, OmegaConf
from torch import nn
from torch.optim import Optimizer

from trainer.configuration.allowed_targets import AllowedTargets
from trainer.configuration.instantiate import check_groups, instantiate, make_factory
from trainer.data.data import Data
from trainer.learning.schedule import Cosine, Schedule
from trainer.learning.task import Task
from trainer.messages import Refusal
from trainer.records.sinks import Sink
from trainer.strategies.base import Strategy
from trainer.strategies.machine import Machine
from trainer.strategies.single import Single

LAB = """
import os
from dataclasses import dataclass
from functools import wraps
from os import system
from pathlib import Path
from typing import TYPE_CHECKING, Literal
from torch import nn
from trainer import Data, Task

if TYPE_CHECKING:
    from somewhere import Unknown

number = 3


class Net(nn.Module):
    def __init__(self, width: int, rate: float = 0.1, name: str = "net", deep: bool = False,
                 sizes: tuple[int, ...] = (1,), pair: tuple[int, int] | None = None, mode: Literal["a", "b"] = "a",
                 norm: "Unknown" = None, file: Path | None = None, parts: list[nn.Module] | None = None,
                 depth: int = None):
        super().__init__()
        self.given = dict(width=width, rate=rate, name=name, sizes=sizes, pair=pair, norm=norm, file=file, parts=parts)


class Loose(nn.Module):
    def __init__(self, **words):
        super().__init__()
        self.inner = Net(**words)


class Broken(nn.Module):
    def __init__(self):
        super().__init__()
        raise ZeroDivisionError("my own mistake")


class Picky(nn.Module):
    def __init__(self, width: int, token: str = ""):
        super().__init__()
        self.inner = nn.Linear(width, width)


class Cells(Data):
    def __init__(self, classes: int = 2):
        self.classes = classes

    @classmethod
    def small(cls) -> "Cells":
        return cls(1)


class Counting(Data):
    def __init__(self, num_classes: int, channels: int):
        self.facts = (num_classes, channels)


class Learn(Task):
    pass


class Elastic:
    def __init__(self, amount: float):
        self.amount = amount


def loosely(cls):
    plain = cls.__init__

    @wraps(plain)
    def init(self, **words):
        self.labels = words.pop("labels", 2)
        plain(self, **words)

    cls.__init__ = init
    return cls


@loosely
@dataclass
class Config:
    # as those of transformers: the decorator takes what the dataclass says, and what has a property
    hidden: int = 3

    @property
    def labels(self):
        return self._labels

    @labels.setter
    def labels(self, count):
        self._labels = count


def make(width: int = 1):
    return Net(width)


def typed(width: int = 1) -> nn.Module:
    return Net(width)


def number_of(width: int = 1) -> int:
    return width


def wrong(width: int = 1):
    return {"width": width}
"""


@pytest.fixture
def names(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[AllowedTargets]:
    """What a lab may call whose folder lies in the current one."""
    lab = tmp_path / "biolab"
    (lab / "conf").mkdir(parents=True)
    (lab / "net.py").write_text(LAB)
    (lab / "torn.py").write_text("import not_installed_anywhere\n")
    (tmp_path / "outside.py").write_text(f"open({str(tmp_path / 'canary')!r}, 'w')\n")
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(tmp_path)
    yield AllowedTargets(folders=(lab / "conf",))
    for module in [name for name in sys.modules if name.split(".")[0] in ("biolab", "outside")]:
        del sys.modules[module]


def _keep(self: Any, **values: Any) -> None:
    vars(self).update(values)


def node(target: str, **values: Any) -> DictConfig:
    return OmegaConf.create({"_target_": target, **values})


def refusal(*args: Any, **words: Any) -> str:
    with pytest.raises(Refusal) as caught:
        instantiate(*args, **words)
    return str(caught.value)


class TestWhatIsBuilt:
    def test_a_lab_s_class_with_its_types(self, names: AllowedTargets) -> None:
        given = {"width": 3, "rate": 1, "name": 7, "sizes": [1, 2], "pair": [3, 4], "file": "a/b"}
        net = instantiate(node("biolab.net.Net", **given), nn.Module, "model", names)
        assert net.given["sizes"] == (1, 2)
        assert net.given["pair"] == (3, 4)
        assert (net.given["rate"], net.given["name"], net.given["file"]) == (1.0, "7", Path("a/b"))

    @pytest.mark.parametrize("factory", ["make", "typed"])
    def test_a_function_that_gives_a_network(self, names: AllowedTargets, factory: str) -> None:
        assert isinstance(instantiate(node(f"biolab.net.{factory}", width=2), nn.Module, "model", names), nn.Module)

    def test_a_function_of_torchvision(self) -> None:
        made = instantiate(
            node("torchvision.models.get_model", name="squeezenet1_1"), nn.Module, "model", AllowedTargets()
        )
        assert isinstance(made, nn.Module)

    def test_nodes_within_nodes(self, names: AllowedTargets) -> None:
        norm = {"_target_": "torch.nn.LayerNorm", "_partial_": True, "eps": 0.1}
        parts = [{"_target_": "torch.nn.Linear", "in_features": 1, "out_features": 2}]
        net = instantiate(node("biolab.net.Net", width=1, norm=norm, parts=parts), nn.Module, "model", names)
        assert isinstance(net.given["norm"], partial)
        assert net.given["norm"](3).eps == 0.1
        assert net.given["parts"][0].out_features == 2

    def test_records_of_packages_that_are_known(self, names: AllowedTargets) -> None:
        stem = {"_target_": "torchvision.models.vision_transformer.ConvStemConfig", "out_channels": 8, "kernel_size": 3}
        policy = {"_target_": "torch.distributed.fsdp.MixedPrecisionPolicy", "output_dtype": None}
        given = instantiate(
            node("biolab.net.Net", width=1, norm=[stem | {"stride": 2}, policy]), nn.Module, "model", names
        )
        stem, policy = given.given["norm"]
        assert (stem.out_channels, stem.stride, policy.output_dtype) == (8, 2, None)

    def test_a_configuration_of_transformers(self, names: AllowedTargets, monkeypatch: pytest.MonkeyPatch) -> None:
        # as in its version 4, where it is no dataclass
        package, base, own = (ModuleType(f"transformers{rest}") for rest in ("", ".configuration_utils", ".models"))
        base.PretrainedConfig = type("PretrainedConfig", (), {"__module__": base.__name__})  # type: ignore[attr-defined]
        kind = type("BertConfig", (base.PretrainedConfig,), {"__module__": own.__name__, "__init__": _keep})
        package.BertConfig = kind  # type: ignore[attr-defined]
        for module in (package, base, own):
            monkeypatch.setitem(sys.modules, module.__name__, module)
        config = {"_target_": "transformers.BertConfig", "hidden_size": 16}
        given = instantiate(node("biolab.net.Net", width=1, norm=config), nn.Module, "model", names).given["norm"]
        assert given.hidden_size == 16

    @pytest.mark.parametrize(
        ("target", "said"),
        [
            ("torch.package.PackageImporter", "no Module, Task, Data, ParallelStyle, transform or dataclass"),
            ("torch.distributed.nn.RemoteModule", "that keeps to itself; if you know what it does"),
            ("torchvision.datasets.CIFAR10", "trust=[torchvision]"),
            ("torch.package.PackageImporter", "trust=[torch]"),
            ("torch.distributed.checkpoint.FileSystemWriter", "trust=[torch]"),
            ("torch.nn.init.zeros_", "it is a function; a class may be that is a Module"),
        ],
    )
    def test_what_others_may_not_be_says_what_to_write(self, names: AllowedTargets, target: str, said: str) -> None:
        message = refusal(node("biolab.net.Net", width=1, norm={"_target_": target}), nn.Module, "model", names)
        assert message.startswith("model.norm: torch")
        assert said in message

    def test_data_sets_that_hold_what_they_are_given(self, names: AllowedTargets) -> None:
        parts = {"_target_": "torch.utils.data.ConcatDataset", "datasets": [[1, 2], [3]]}
        given = instantiate(node("biolab.net.Net", width=1, norm=parts), nn.Module, "model", names).given
        assert list(given["norm"]) == [1, 2, 3]

    def test_what_the_command_line_trusts_may_be_inside(self, names: AllowedTargets) -> None:
        trusting = replace(names, trust=("torch",))
        inner = {"_target_": "torch.distributions.Normal", "loc": 0.0, "scale": 1.0}
        assert "trust=[torch]" in refusal(node("biolab.net.Net", width=1, norm=inner), nn.Module, "model", names)
        given = instantiate(node("biolab.net.Net", width=1, norm=inner), nn.Module, "model", trusting).given
        assert float(given["norm"].mean) == 0

    def test_positions(self) -> None:
        made = instantiate(node("torch.nn.Linear", _args_=[2], out_features=3), nn.Module, "model", AllowedTargets())
        assert (made.in_features, made.out_features) == (2, 3)

    def test_more_positions_than_names(self) -> None:
        layers = [{"_target_": "torch.nn.ReLU"}, {"_target_": "torch.nn.Tanh"}]
        made = instantiate(node("torch.nn.Sequential", _args_=layers), nn.Module, "model", AllowedTargets())
        assert [type(layer) for layer in made] == [nn.ReLU, nn.Tanh]

    def test_a_strategy_and_the_function_that_chooses_one(self) -> None:
        for target in ("trainer.strategies.single.Single", "trainer.strategies.auto.auto"):
            made = instantiate(node(target, sync_bn=True), Strategy, "strategy", AllowedTargets(), machine=Machine())
            assert isinstance(made, Single)
            assert made.sync_bn

    def test_a_sink_is_one_by_its_class(self, names: AllowedTargets) -> None:
        instantiate(node("trainer.records.console.Console"), Sink, "log.console", AllowedTargets())
        assert "not a Sink" in refusal(node("biolab.net.Elastic", amount=1), Sink, "log.mine", names)
        assert "log.console=null: nothing can be built" in refusal(None, Sink, "log.console", names)

    def test_facts_of_data_go_to_those_who_name_them(self, names: AllowedTargets) -> None:
        facts = {"num_classes": 10, "channels": 3, "image_size": None}
        assert instantiate(node("biolab.net.Cells", **facts), Data, "data", names).classes == 2
        assert instantiate(node("biolab.net.Counting", **facts), Data, "data", names).facts == (10, 3)
        # only data has facts
        assert "model.num_classes" in refusal(node("biolab.net.Net", width=1, **facts), nn.Module, "model", names)

    def test_a_schedule(self) -> None:
        made = instantiate(node("trainer.learning.schedule.Cosine", warmup=3), Schedule, "schedule", AllowedTargets())
        assert made == Cosine(warmup=3)

    def test_what_is_wrong_in_any_group_is_told_before_one_is_built(self, names: AllowedTargets) -> None:
        cfg = OmegaConf.create(
            {
                "strategy": {"_target_": "trainer.strategies.single.Single"},
                "model": {"_target_": "biolab.net.Broken"},
                "schedule": {"_target_": "trainer.learning.schedule.Cosine", "reference_batch": 1.5},
                "data": {"_target_": "biolab.net.Cells", "classes": "two"},
            }
        )
        kinds = {"strategy": Strategy, "model": nn.Module, "schedule": Schedule, "data": Data}
        with pytest.raises(Refusal) as caught:
            check_groups(cfg, kinds, names)
        assert str(caught.value).splitlines() == [
            "schedule.reference_batch=1.5: Cosine expects a whole number or null",
            "data.classes=two: Cells expects a whole number",
        ]


class TestOptimizer:
    sgd: dict[str, Any] = {"lr": 0.1, "decay": "weights", "fused": None}  # noqa: RUF012

    def test_it_is_made_from_groups_alone(self) -> None:
        make = make_factory(node("torch.optim.SGD", **self.sgd), Optimizer, "optimizer", AllowedTargets(), fused=True)
        made = make([{"params": [nn.Parameter(torch.zeros(1))], "weight_decay": 0.5}])
        assert isinstance(made, torch.optim.SGD)
        group = made.param_groups[0]
        assert (group["lr"], group["fused"], group["weight_decay"]) == (0.1, True, 0.5)

    def test_lists_become_the_tuples_it_asks_for(self) -> None:
        make = make_factory(node("torch.optim.AdamW", betas=[0.5, 0.6]), Optimizer, "optimizer", AllowedTargets())
        assert make([nn.Parameter(torch.zeros(1))]).defaults["betas"] == (0.5, 0.6)

    @pytest.mark.parametrize(
        ("target", "values", "said"),
        [
            ("torch.optim.SGD", {"lr": -1.0}, "SGD cannot be built with lr=-1.0: Invalid learning rate"),
            ("torch.optim.SGD", {"lrr": 1.0}, "optimizer.lrr: SGD takes no such key; did you mean 'lr'"),
            ("torch.optim.SGD", {"momentum": "much"}, "optimizer.momentum=much: SGD expects a number"),
            ("torch.optim.SGD", {"nesterov": 1}, "true or false"),
            ("torch.optim.SGD", {"params": []}, "optimizer.params"),
            ("torch.optim.AdamW", {"betas": [0.9]}, "optimizer.betas"),
            ("torch.optim.SDG", {}, "'SGD'"),
            ("torch.nn.Linear", {}, "not a Optimizer"),
            ("torch.optim.lr_scheduler.StepLR", {}, "not a Optimizer"),
        ],
    )
    def test_what_cannot_work_is_said_before_any_step(self, target: str, values: dict[str, Any], said: str) -> None:
        with pytest.raises(Refusal) as caught:
            make_factory(node(target, **values), Optimizer, "optimizer", AllowedTargets())
        assert said in str(caught.value)


@pytest.mark.parametrize(
    ("values", "said"),
    [
        ({"widht": 1}, "model.widht: Net takes no such key; did you mean 'width'"),
        ({}, "model.width: Net needs it"),
        ({"width": "big"}, "model.width=big: Net expects a whole number"),
        ({"width": None}, "model.width=null"),
        ({"width": True}, "model.width=true"),
        ({"width": 1.5}, "model.width=1.5"),
        ({"width": 1, "rate": "fast"}, "a number"),
        ({"width": 1, "deep": 1}, "true or false"),
        ({"width": 1, "sizes": 3}, "a list"),
        ({"width": 1, "sizes": ["a"]}, "a list"),
        ({"width": 1, "pair": [1, 2, 3]}, "a list of 2 or null"),
        ({"width": 1, "mode": "c"}, "one of a, b"),
        ({"width": 1, "parts": [3]}, "a list"),
        ({"width": 1, "_convert_": "none"}, "only _target_"),
        ({"width": 1, "_call_": True}, "only _target_"),
        ({"width": 1, "_partial_": "yes"}, "_partial_ (true or false)"),
    ],
    ids=str,
)
def test_arguments_are_held_against_the_signature(names: AllowedTargets, values: dict[str, Any], said: str) -> None:
    assert said in refusal(node("biolab.net.Net", **values), nn.Module, "model", names)


def test_what_cannot_be_known_is_taken(names: AllowedTargets) -> None:
    instantiate(node("biolab.net.Net", width=1, norm="batch", depth=None), nn.Module, "model", names)


def test_all_wrong_arguments_are_told_together(names: AllowedTargets) -> None:
    message = refusal(node("biolab.net.Net", widht=1, rate="x", mode="c"), nn.Module, "model", names)
    assert len(message.splitlines()) == 4


def test_of_very_many_the_first_are_told_and_how_many_more(names: AllowedTargets) -> None:
    cfg = OmegaConf.create(
        {"model": {"_target_": "biolab.net.Net", "width": 1, **{f"key{at}": 1 for at in range(1000)}}}
    )
    with pytest.raises(Refusal) as caught:
        check_groups(cfg, {"model": nn.Module}, names)
    first, *_, last = lines = str(caught.value).splitlines()
    assert len(lines) == 11
    assert first.startswith("model.key0: Net takes no such key")
    assert last == "… and 990 more"


def test_a_key_behind_kwargs_is_refused_by_the_callee(names: AllowedTargets) -> None:
    instantiate(node("biolab.net.Loose", width=1), nn.Module, "model", names)
    assert "model.widht" in refusal(node("biolab.net.Loose", width=1, widht=1), nn.Module, "model", names)


def test_a_secret_is_in_no_message(names: AllowedTargets, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SECRET_TOK", "tok123")
    message = refusal(node("biolab.net.Net", width="${oc.env:SECRET_TOK}"), nn.Module, "model", names)
    assert "${oc.env:SECRET_TOK}" in message
    assert "tok123" not in message


class TestErrorsOfTheCallee:
    def test_its_own_error_stays_with_its_traceback(self, names: AllowedTargets) -> None:
        with pytest.raises(ZeroDivisionError, match="my own mistake") as caught:
            instantiate(node("biolab.net.Broken"), nn.Module, "model", names)
        assert Path(caught.traceback[-1].path).name == "net.py"
        assert caught.value.__notes__ == ["while building model from the configuration: biolab.net.Broken"]

    def test_values_that_a_constructor_does_not_take_are_the_configuration_s(
        self, names: AllowedTargets, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setenv("SECRET_TOK", "tok123")
        given = node("biolab.net.Picky", width=-3, token="${oc.env:SECRET_TOK}")
        message = refusal(given, nn.Module, "model", names)
        said = "model: biolab.net.Picky cannot be built with width=-3, token=${oc.env:SECRET_TOK}: "
        assert message.startswith(said)
        assert "negative dimension -3" in message
        assert re.search(r"\(\S+biolab/net.py, line \d+\)$", message)

    @pytest.mark.parametrize(
        ("target", "values", "said"),
        [
            ("recipes.vision.classification.Classification", {"label_smoothing": 3.0}, "between 0 and 1"),
            ("recipes.vision.cnn.CNN", {"width": 4, "num_classes": 2, "channels": 1, "image_size": 8}, "at least 8"),
        ],
    )
    def test_recipes_say_what_they_take(self, target: str, values: dict[str, Any], said: str) -> None:
        assert said in refusal(
            node(target, **values), Task if "label" in str(values) else nn.Module, "it", AllowedTargets()
        )

    def test_what_a_lab_cannot_import_is_its_own_error(self, names: AllowedTargets) -> None:
        with pytest.raises(ModuleNotFoundError, match="not_installed_anywhere") as caught:
            instantiate(node("biolab.torn.Net"), nn.Module, "model", names)
        assert "biolab.torn" in caught.value.__notes__[0]

    def test_a_name_that_is_not_there(self, names: AllowedTargets) -> None:
        assert "'Net'" in refusal(node("biolab.net.Ne"), nn.Module, "model", names)
        assert "there is no biolab.nett" in refusal(node("biolab.nett.Net"), nn.Module, "model", names)
        assert "installed" in refusal(node("timm.nowhere.at_all"), nn.Module, "model", names) or "timm" in sys.modules

    def test_a_lab_that_is_not_below_the_current_folder(self, tmp_path: Path) -> None:
        conf = tmp_path / "far_away" / "conf"
        conf.mkdir(parents=True)
        assert f"start in {tmp_path}" in refusal(
            node("far_away.net.Net"), nn.Module, "model", AllowedTargets(folders=(conf,))
        )


@pytest.mark.parametrize(
    ("target", "kind", "where", "said"),
    [
        ("biolab.net.Cells", Task, "task", "not a Task"),
        ("biolab.net.Learn", Data, "data", "not a Data"),
        ("biolab.net.Elastic", nn.Module, "model", "not a Module"),
        ("biolab.net.number_of", nn.Module, "model", "returns int"),
        ("biolab.net.wrong", nn.Module, "model", "returned a dict"),
        ("biolab.net.make", Task, "task", "does not say"),
        ("biolab.net.number", nn.Module, "model", "not a class or function"),
        ("biolab.net", nn.Module, "model", "not a class or function"),
        ("torch.nn.Linear", Strategy, "strategy", "not a Strategy"),
        ("trainer.learning.schedule.Schedule", Schedule, "schedule", "abstract"),
        ("trainer.strategies.auto.auto", nn.Module, "model", "returns Strategy"),
        (None, nn.Module, "model", "must say what to build"),
        (3, nn.Module, "model", "is not the name"),
        ("net", nn.Module, "model", "is not the name"),
        ("biolab..net", nn.Module, "model", "is not the name"),
    ],
)
def test_the_kind_is_checked(names: AllowedTargets, target: Any, kind: type, where: str, said: str) -> None:
    given = OmegaConf.create({} if target is None else {"_target_": target})
    assert said in refusal(given, kind, where, names)


HOSTILE: list[tuple[str, dict[str, Any]]] = [
    ("os.system", {"command": "touch {canary}"}),
    ("posix.system", {"command": "touch {canary}"}),
    ("subprocess.Popen", {"args": ["touch", "{canary}"]}),
    ("subprocess.run", {"_args_": [["touch", "{canary}"]]}),
    ("builtins.eval", {"_args_": ["open('{canary}', 'w')"]}),
    ("builtins.exec", {"_args_": ["open('{canary}', 'w')"]}),
    ("builtins.open", {"file": "{canary}", "mode": "w"}),
    ("shutil.copyfile", {"src": "{payload}", "dst": "{canary}"}),
    ("code.InteractiveInterpreter.runsource", {"_args_": [None, "open('{canary}', 'w')"]}),
    ("pathlib.Path.touch", {"_args_": ["{canary}"]}),
    ("importlib.import_module", {"name": "outside"}),
    ("runpy.run_path", {"path_name": "outside.py"}),
    ("functools.partial", {"_args_": [{"_target_": "os.system", "command": "touch {canary}"}]}),
    ("outside.Net", {}),
    ("torch.load", {"f": "{payload}", "weights_only": False}),
    ("torch.serialization.load", {"f": "{payload}", "weights_only": False}),
    ("torch.hub.load", {"repo_or_dir": "{folder}", "model": "net", "source": "local"}),
    ("torch.os.system", {"command": "touch {canary}"}),
    ("torch.serialization.os.system", {"command": "touch {canary}"}),
    ("torch.serialization.pickle.loads", {"_args_": ["x"]}),
    ("torch.save", {"obj": 1, "f": "{canary}"}),
    ("torch.utils.cpp_extension.load", {"name": "x", "sources": []}),
    (
        "torch.distributed.elastic.multiprocessing.subprocess_handler.SubprocessHandler",
        {
            "entrypoint": "touch",
            "args": ["{canary}"],
            "env": {},
            "stdout": None,
            "stderr": None,
            "local_rank_id": 0,
            "numa_options": None,
        },
    ),
    ("torch.package.PackageExporter", {"f": "{canary}"}),
    ("torch.utils.tensorboard.SummaryWriter", {"log_dir": "{canary}"}),
    ("torch.utils.cpp_extension.subprocess.run", {"_args_": [["touch", "{canary}"]]}),
    ("torch.nn.Module.__init__.__globals__", {}),
    ("torchvision.datasets.CIFAR10", {"root": "{canary}", "download": True}),
    ("torchvision.datasets.utils.download_url", {"url": "file:///etc/hosts", "root": "{folder}"}),
    ("biolab.net.os.system", {"command": "touch {canary}"}),
    ("biolab.net.system", {"command": "touch {canary}"}),
    ("biolab.net.__builtins__", {}),
    ("trainer.launch.safe_files.os.remove", {"path": "{payload}"}),
    ("trainer.__main__.main", {}),
    ("trainer.launch.failure.exit_process", {"code": 0}),
]


@pytest.mark.parametrize(("target", "values"), HOSTILE, ids=[target for target, _ in HOSTILE])
@pytest.mark.parametrize("place", ["model", "inside", "partly", "optimizer"])
def test_nothing_hostile_is_called(
    names: AllowedTargets, tmp_path: Path, target: str, values: dict[str, Any], place: str
) -> None:
    canary, payload = tmp_path / "canary", tmp_path / "payload.pt"
    (tmp_path / "hubconf.py").write_text(f"open({str(canary)!r}, 'w')\n")
    payload.write_bytes(b"cos\nsystem\n(S'touch " + str(canary).encode() + b"'\ntR.")
    filled = fill({"_target_": target, **values}, canary=str(canary), payload=str(payload), folder=str(tmp_path))
    inner = {"_partial_": True} | filled if place == "partly" else filled
    attempts = {
        "model": lambda: instantiate(OmegaConf.create(filled), nn.Module, "model", names),
        "optimizer": lambda: make_factory(OmegaConf.create(filled), Optimizer, "optimizer", names),
    }
    within = node("biolab.net.Net", width=1, norm={"deep": [inner]})
    with pytest.raises(Refusal):
        attempts.get(place, lambda: instantiate(within, nn.Module, "model", names))()
    assert not canary.exists()
    assert payload.exists()
    assert "outside" not in sys.modules


def fill(value: Any, **places: str) -> Any:
    """The same value with {canary} and its like replaced by paths."""
    if isinstance(value, dict):
        return {key: fill(item, **places) for key, item in value.items()}
    if isinstance(value, list):
        return [fill(item, **places) for item in value]
    return value.format(**places) if isinstance(value, str) else value


class TestTrust:
    def test_a_package_named_on_the_command_line(self) -> None:
        target = node("unittest.mock.Mock")
        assert "trust=[unittest]" in refusal(target, nn.Module, "model", AllowedTargets())
        assert "not a Module" in refusal(
            target, nn.Module, "model", AllowedTargets(trust=("unittest",))
        )  # known, but of no kind

    def test_a_name_without_its_lab_is_told_the_whole_one(self, names: AllowedTargets) -> None:
        assert "write biolab.net.Net" in refusal(node("net.Net"), nn.Module, "model", names)

    def test_trust_does_not_reach_through_a_package(self) -> None:
        names = AllowedTargets(trust=("shutil",))
        assert "is really posix.system" in refusal(node("shutil.os.system"), nn.Module, "model", names)
        assert "does not say" in refusal(node("shutil.copyfile"), nn.Module, "model", names)

    def test_what_is_installed_does_not_lie_beside_a_lab(self, tmp_path: Path) -> None:
        home = Path(torch.__file__).parents[2]  # a lab in the folder that holds site-packages
        assert "may not be called" in refusal(
            node("yaml.load"), nn.Module, "model", AllowedTargets(folders=(home / "conf",))
        )
        usr = AllowedTargets(folders=(Path("/usr/conf"),))
        assert "may not be called" in refusal(node("shutil.rmtree"), nn.Module, "model", usr)


def test_types_are_known_of_fields_that_a_dataclass_takes_over_from_another_file() -> None:
    node = OmegaConf.create({"_target_": "trainer.strategies.fsdp.FSDP", "activation_checkpointing": "all"})
    with pytest.raises(Refusal, match=r"strategy\.activation_checkpointing=all: FSDP expects one of none, units"):
        instantiate(node, Strategy, "strategy", AllowedTargets(), machine=Machine())
