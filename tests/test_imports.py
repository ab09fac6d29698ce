"""The house rules: who may import whom, and what must not be written at all."""

import ast
import io
import re
import subprocess
import sys
import tokenize
from collections.abc import Iterator
from graphlib import CycleError, TopologicalSorter
from pathlib import Path

import pytest

CHECKOUT = Path(__file__).resolve().parent.parent
PRODUCT = sorted(path for name in ("trainer", "recipes") for path in (CHECKOUT / name).rglob("*.py"))
CONCRETE = {"Single", "DP", "DDP", "TP", "FSDP", "PP", "Zero1"}


def imports(path: Path) -> Iterator[str]:
    """Every module or name that a file imports, also inside functions, as `package.module.name`."""
    package = path.relative_to(CHECKOUT).parent.parts
    for node in ast.walk(ast.parse(path.read_text(), str(path))):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            above = package[: len(package) - node.level + 1] if node.level else ()
            module = ".".join([*above, *([node.module] if node.module else [])])
            yield from (f"{module}.{alias.name}" for alias in node.names)


def starts(name: str, *modules: str) -> bool:
    """Is the name one of these modules, or inside one?"""
    return any(name == module or name.startswith(module + ".") for module in modules)


def strangers(folder: str, allowed: tuple[str, ...]) -> list[str]:
    """The product's own names that files of this folder import and should not."""
    return [
        f"{path.relative_to(CHECKOUT)}: {name}"
        for path in PRODUCT
        if path.is_relative_to(CHECKOUT / folder)
        for name in imports(path)
        if starts(name, "trainer", "recipes") and not starts(name, *allowed)
    ]


def test_the_walk_sees_imports(tmp_path: Path) -> None:
    assert len(PRODUCT) > 20
    assert {"trainer.learning.parallel_plan.Plan", "trainer.learning.task.Task"} <= set(
        imports(CHECKOUT / "recipes/vision/classification.py")
    )
    assert strangers("recipes", ()) != []


def test_the_framework_never_imports_the_recipes() -> None:
    assert strangers("trainer", ("trainer",)) == []


def test_recipes_see_only_the_open_side_of_the_framework() -> None:
    modules = (
        "learning.task",
        "learning.parallel_plan",
        "parallel.context_parallel",
        "data.data",
        "data.rng",
        "messages",
        "records.weight_files",
    )
    names = (
        "BadData",
        "Data",
        "Joined",
        "Plan",
        "ParallelModel",
        "Preparation",
        "Refusal",
        "Schedule",
        "Sink",
        "Strategy",
        "Task",
        "gather",
    )
    assert strangers("recipes", ("recipes", *(f"trainer.{name}" for name in (*modules, *names)))) == []


# The rooms of trainer/ from the door down: who stands above may import who stands below, never the other way round.
_DOOR = ("__main__", "api", "sweeps", "verify", "jobs", "configuration")
_LOOP = ("loop", "records", "strategies")
_GROUND = ("parallel", "learning", "data", "launch", "messages")
FLOORS = (*_DOOR, *_LOOP, *_GROUND)


def rooms(path: Path) -> Iterator[tuple[str, str]]:
    """The room of a file and those of what it imports; the package itself, with its version, is below all."""
    own = path.relative_to(CHECKOUT / "trainer").parts[0].removesuffix(".py")
    parts = (name.split(".") for name in imports(path) if starts(name, "trainer"))
    yield from ((own, part[1]) for part in parts if part[1:] not in ([], ["__version__"]))


def test_arrows_between_the_rooms_only_go_down() -> None:
    inside = [path for path in PRODUCT if path.is_relative_to(CHECKOUT / "trainer") and path.name != "__init__.py"]
    assert {path.relative_to(CHECKOUT / "trainer").parts[0].removesuffix(".py") for path in inside} == set(FLOORS)
    up = [
        f"{path.relative_to(CHECKOUT)} → {other}"
        for path in inside
        for own, other in rooms(path)
        if FLOORS.index(own) > FLOORS.index(other)
    ]
    assert up == []


def test_no_files_import_each_other_in_a_circle() -> None:
    """Imports inside functions and those for types count, too: a reader follows them all the same."""
    modules = {".".join(path.relative_to(CHECKOUT).with_suffix("").parts): path for path in PRODUCT}

    def module_of(name: str) -> str:
        while name and name not in modules:
            name = name.rpartition(".")[0]
        return name

    arrows = {module: {module_of(name) for name in imports(path)} - {module, ""} for module, path in modules.items()}
    try:
        tuple(TopologicalSorter(arrows).static_order())
    except CycleError as error:
        pytest.fail(" → ".join(reversed(error.args[1])))


def test_nobody_but_the_strategies_names_one() -> None:
    named = [
        f"{path.name}: {name}"
        for path in PRODUCT
        if not path.is_relative_to(CHECKOUT / "trainer/strategies")
        for name in imports(path)
        if starts(name, "trainer.strategies")
        and not starts(
            name,
            *(
                f"trainer.strategies.{open}"
                for open in ("base", "candidates", "multi_process", "parallel_model", "machine", "step_timing")
            ),
        )
    ]
    assert named == []


def test_no_strategy_inherits_from_another() -> None:
    for path in (CHECKOUT / "trainer/strategies").glob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.ClassDef):
                assert not CONCRETE & {ast.unparse(base) for base in node.bases}, f"{path.name}: {node.name}"


def test_the_checkpoint_has_never_heard_of_strategies() -> None:
    for path in (*(CHECKOUT / "trainer/records").rglob("*.py"), *(CHECKOUT / "trainer/launch").glob("*.py")):
        assert not [found for found in imports(path) if starts(found, "trainer.strategies")]


def words(path: Path) -> set[str]:
    """The words in a file's names: `data_rank` holds data and rank; comments and strings are prose."""
    tokens = tokenize.generate_tokens(io.StringIO(path.read_text()).readline)
    names = {token.string for token in tokens if token.type == tokenize.NAME}
    return names | {word for name in names for word in name.split("_")}


def test_the_loop_has_no_word_of_parallelism() -> None:
    parallel = {"rank", "world", "mesh", "dist", "distributed", "replica", "replicate", "shard"}
    wrapped = {"isinstance", "hasattr", "getattr", "unwrap", "wrap", "wrapper", "module", "enabled"}
    types = {"DataParallel", "DistributedDataParallel", "DTensor", "FSDP", *CONCRETE, "ddp", "dp", "tp", "fsdp"}
    assert words(CHECKOUT / "trainer/loop/trainer.py") & (parallel | wrapped | types) == set()


# Hydra and OmegaConf end at these: below them a function takes its arguments, not a configuration.
DOOR = {"__main__", "api", "run_parts"}


def test_configuration_stops_at_the_door() -> None:
    inside = [path for path in PRODUCT if path.parent.name != "configuration" and path.stem not in DOOR]
    for path in inside:
        assert not [name for name in imports(path) if starts(name, "hydra", "omegaconf")], path
        assert "cfg" not in words(path), path


def test_one_place_calls_what_the_configuration_names() -> None:
    callers = [path.name for path in PRODUCT if any(starts(name, "hydra.utils.instantiate") for name in imports(path))]
    assert callers in ([], ["instantiate.py"])


# What runs code, or a shell, that a file or a word names.
RUNS_CODE = {
    "eval",
    "exec",
    "os.system",
    "os.popen",
    "pickle.Unpickler",
    "marshal.loads",
    "marshal.load",
    "runpy.run_path",
}


def test_no_call_runs_what_a_file_says() -> None:
    for path in (*PRODUCT, *sorted((CHECKOUT / "scripts").rglob("*.py"))):
        for node in ast.walk(ast.parse(path.read_text())):
            if not isinstance(node, ast.Call):
                continue
            called, keys = ast.unparse(node.func), {word.arg: ast.unparse(word.value) for word in node.keywords}
            where = f"{path.relative_to(CHECKOUT)}:{node.lineno}: {called}"
            assert called not in RUNS_CODE, where
            assert not called.startswith(("pickle.load", "yaml.unsafe", "yaml.full")), where
            assert keys.get("shell", "False") == "False", where
            if called == "torch.load":
                assert keys["weights_only"] == "True", where
            if called in ("yaml.load", "yaml.compose"):  # by loaders that make plain values of a file
                assert ast.unparse(node.args[1]) in ("Plain", "yaml.SafeLoader"), where


def test_nobody_asks_whether_a_network_is_wrapped() -> None:
    for path in PRODUCT:
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Call) and ast.unparse(node.func) in {"hasattr", "getattr"}:
                assert "'module'" not in [ast.unparse(argument) for argument in node.args[1:]], path


def test_no_file_is_named_for_nothing() -> None:
    assert {path.stem for path in PRODUCT} & {"utils", "util", "helpers", "common", "misc"} == set()


@pytest.mark.parametrize(
    "module",
    [
        "trainer",
        "trainer.configuration.resource_paths",
        "trainer.messages",
        "trainer.launch.rendezvous",
        "trainer.configuration.compose",
    ],
)
def test_a_typo_is_refused_before_torch_is_paid_for(module: str) -> None:
    code = f"import sys, {module}; print(sorted({{'torch', 'torchvision', 'tensorboard'}} & set(sys.modules)))"
    process = subprocess.run([sys.executable, "-c", code], cwd=CHECKOUT, capture_output=True, text=True)
    assert (process.returncode, process.stdout) == (0, "[]\n"), process.stderr


# ------------------------------------------------------------------------------------------------------------ the tests

TESTS = sorted((CHECKOUT / "tests").rglob("*.py"))
MOST_WIDER, MOST_PATCHES = 15, 40
# Files that need more than one module of the inside, and why.
WIDER = {
    "tests/run.py": "the one that runs the product inside of this process",
}


def inside(path: Path) -> set[str]:
    """The modules of trainer/ that a file imports, but for the public names and those that docs/reference.md lists."""
    page = (CHECKOUT / "docs/reference.md").read_text()
    where = re.findall(
        r"^## (\w+)\n\n(?:`from (trainer[\w.]*) import|Defined in `(trainer[\w.]+)`)", page, re.MULTILINE
    )
    public = {f"{module or home}.{name}" for name, module, home in where}
    public |= {f"trainer.{name}" for name in ("__version__", "api", "api.run", "api.Result")}
    deeper = {name for name in imports(path) if starts(name, "trainer") and name != "trainer" and name not in public}
    return {
        name if (CHECKOUT / (name.replace(".", "/") + ".py")).is_file() else name.rpartition(".")[0] for name in deeper
    }


def test_a_test_imports_the_public_face_and_at_most_the_module_that_it_is_named_for() -> None:
    wider = {str(path.relative_to(CHECKOUT)): inside(path) for path in TESTS}
    wider = {file: modules for file, modules in wider.items() if len(modules) > 1}
    assert wider.keys() - WIDER.keys() == set(), wider
    assert WIDER.keys() - wider.keys() == set(), "no longer wider"
    assert len(WIDER) <= MOST_WIDER


def test_few_tests_patch_the_program() -> None:
    patch = re.compile(r"""\b(?:patch(?:\.object|\.dict)?|setattr|setitem)\(\s*(?:f?"trainer|\w*[a-z_]\w*, ")""")
    found = {str(path.relative_to(CHECKOUT)): len(patch.findall(path.read_text())) for path in TESTS}
    assert sum(found.values()) <= MOST_PATCHES, {file: count for file, count in found.items() if count}


def test_their_page_names_files_that_are_there() -> None:
    page = (CHECKOUT / "tests/README.md").read_text()
    named = set(re.findall(r"`((?:\w+/)*(?:test_\w+\.py|\w+/))`", page))
    assert [name for name in named if not (CHECKOUT / "tests" / name).exists()] == []
    assert len(named) > 10
