"""scripts/train, scripts/test: set up once, start the processes, end as the run did; scripts/bench leaves figures."""

import os
import shutil
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from scripts import launch

SCRIPTS = Path(__file__).resolve().parent.parent / "scripts"


# --- the words


@pytest.mark.parametrize(
    ("words", "count", "whole"),
    [
        ("", 1, "experiment=digits strategy=ddp"),
        ("+experiment=mine", 1, "strategy=ddp +experiment=mine"),
        ("--config-dir lab/conf model=unet", 1, "--config-dir lab/conf strategy=ddp model=unet"),
        ("--cfg job", 4, "--cfg job experiment=digits strategy=ddp processes=4"),
        ("-m seed=1,2", 4, "-m experiment=digits strategy=ddp processes=4 seed=1,2"),
        ("model=mlp processes=3", 4, "strategy=ddp model=mlp processes=3"),
        ("run.dir=x job=predict", 2, "strategy=ddp processes=2 run.dir=x job=predict"),
    ],
)
def test_what_the_words_leave_open_is_filled_in(words: str, count: int, whole: str) -> None:
    assert launch.with_defaults(words.split(), count) == whole.split()


def test_how_many_processes(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.delenv("NPROC", raising=False)
    assert [launch.processes([word]) for word in ("seed=1", "strategy=single", "--help")] == [2, 1, 1]
    monkeypatch.setenv("NPROC", "3")
    assert [launch.processes([word]) for word in ("seed=1", "strategy=single", "--help")] == [3, 3, 1]
    for wrong in ("0", "-1", "two", "1.5"):
        monkeypatch.setenv("NPROC", wrong)
        with pytest.raises(SystemExit, match="2"):
            launch.processes([])
        assert f"NPROC={wrong}" in capsys.readouterr().err


# --- the benchmark


@pytest.mark.long
def test_figures_come_out_of_the_benchmark() -> None:
    done = subprocess.run([SCRIPTS / "bench", "--quick"], capture_output=True, text=True, timeout=240)
    assert done.returncode == 0, done.stderr
    rows = [line.split(" | ") for line in done.stdout.splitlines() if line.startswith(("| raw ", "| ours "))]
    assert [row[0] for row in rows] == ["| raw", "| ours"] * 2
    assert all(row[1].endswith("(1.00)") for row in rows[::2])
    assert all(0.1 < float(row[-2]) < 1 for row in rows)  # both have learned something


# --- how a run ended

STAND_IN = """
import os, signal, sys

signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGTERM})
print(*sys.argv[1:], flush=True)
end = sys.argv[-1].removeprefix("ending=")
if end == "stopped":
    signal.sigwait({signal.SIGTERM})
    sys.exit(75)
if end == "killed":
    os.kill(os.getpid(), signal.SIGKILL)
sys.exit(int(end))
"""


def start(cwd: Path, word: str) -> subprocess.Popen[str]:
    """Launch a stand-in for the run: `python -m trainer` finds the folder that it is started in first."""
    (cwd / "trainer").mkdir()
    (cwd / "trainer" / "__init__.py").touch()  # the installed package would win over a bare folder
    (cwd / "trainer" / "__main__.py").write_text(STAND_IN)
    command = [sys.executable, "-P", str(SCRIPTS / "launch.py"), word]
    env = {name: value for name, value in os.environ.items() if name != "NPROC"}
    return subprocess.Popen(command, cwd=cwd, env=env, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)


def test_the_exit_code_is_the_runs_own(tmp_path: Path) -> None:
    for word, code in (("2", 2), ("killed", -signal.SIGKILL), ("stopped", 75)):
        (place := tmp_path / word).mkdir()
        process = start(place, f"ending={word}")
        assert process.stdout is not None
        assert process.stdout.readline() == f"experiment=digits strategy=ddp processes=2 ending={word}\n"
        if word == "stopped":
            process.send_signal(signal.SIGTERM)
        _, errors = process.communicate(timeout=120)
        assert (process.returncode, errors) == (code, "")


# --- the set-up, with a product that needs nothing from the network

BACKEND = """
from pathlib import Path
from zipfile import ZipFile

def build_editable(folder, config_settings=None, metadata_directory=None):
    info = "tiny-1.0.dist-info"
    with ZipFile(Path(folder) / "tiny-1.0-py3-none-any.whl", "w") as wheel:
        wheel.writestr(f"{info}/METADATA", "Metadata-Version: 2.1\\nName: tiny\\nVersion: 1.0\\n")
        wheel.writestr(f"{info}/WHEEL", "Wheel-Version: 1.0\\nRoot-Is-Purelib: true\\nTag: py3-none-any\\n")
        wheel.writestr(f"{info}/RECORD", "")
    return "tiny-1.0-py3-none-any.whl"

build_wheel = build_editable
"""


LAUNCH = "import sys; print(sys.prefix, *sys.argv[1:])"


@pytest.fixture
def checkout(tmp_path: Path) -> Path:
    """A checkout that sets up in seconds, in a path with a space; training prints its words."""
    folder = tmp_path / "a checkout"
    shutil.copytree(SCRIPTS, folder / "scripts", ignore=shutil.ignore_patterns("__pycache__"))
    (folder / "scripts" / "launch.py").write_text(LAUNCH)
    build = '[build-system]\nrequires = []\nbuild-backend = "backend"\nbackend-path = ["."]\n'
    (folder / "pyproject.toml").write_text(build)
    (folder / "constraints.txt").touch()
    (folder / "backend.py").write_text(BACKEND)
    return folder


def bare() -> dict[str, str]:
    """The environment of a bare machine: a Python on the PATH, and nothing active."""
    base = Path(os.path.realpath(sys.executable))
    folder = base.parent
    return {"PATH": f"{folder}:/usr/bin:/bin", "HOME": "/nonexistent", "PIP_NO_INDEX": "1"}


def train(checkout: Path, *words: str) -> subprocess.Popen[str]:
    command = [str(checkout / "scripts" / "train"), *words]
    return subprocess.Popen(
        command, cwd="/", env=bare(), stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, start_new_session=True
    )


def finish(process: subprocess.Popen[str]) -> tuple[str, str]:
    out, errors = process.communicate(timeout=120)
    assert process.returncode == 0, errors
    return out, errors


@pytest.mark.long
def test_set_up_once_for_all_who_call_and_again_where_requirements_change(checkout: Path) -> None:
    both = [train(checkout, "a word"), train(checkout, "a word")]
    outputs = [finish(process) for process in both]
    assert [out for out, _ in outputs] == [f"{checkout / '.venv'} a word\n"] * 2
    assert sum("set up in" in errors for _, errors in outputs) == 1
    before = (checkout / ".venv" / "ready.json").stat()
    assert finish(train(checkout)) == (f"{checkout / '.venv'}\n", "")
    assert (checkout / ".venv" / "ready.json").stat() == before
    (checkout / "constraints.txt").write_text("torch==2.15.0\n")
    assert "set up in" in finish(train(checkout))[1]


@pytest.mark.long
def test_what_was_interrupted_is_set_up_anew(checkout: Path) -> None:
    (checkout / "backend.py").write_text("import os, signal\nos.kill(os.getpgid(0) * -1, signal.SIGKILL)\n")
    process = train(checkout)
    process.communicate(timeout=120)
    assert process.returncode == -signal.SIGKILL
    (checkout / ".venv" / "half a package").touch()
    (checkout / "backend.py").write_text(BACKEND)
    finish(train(checkout))
    assert not (checkout / ".venv" / "half a package").exists()


def test_no_python_that_is_new_enough(tmp_path: Path) -> None:
    for tool in ("sh", "readlink", "dirname"):
        found = shutil.which(tool)
        assert found is not None
        (tmp_path / tool).symlink_to(found)
    (tmp_path / "python3").write_text("#!/bin/sh\n[ $1 = --version ] && echo Python 3.9.2\n")
    (tmp_path / "python3").chmod(0o755)
    shutil.copytree(SCRIPTS, tmp_path / "checkout" / "scripts")
    command = [tmp_path / "checkout" / "scripts" / "test"]
    process = subprocess.run(command, env={"PATH": str(tmp_path)}, capture_output=True, text=True)
    assert process.returncode == 2
    assert process.stderr == "scripts/test: needs Python 3.11 or newer as python3 on the PATH, found: Python 3.9.2.\n"
