"""A notebook as Jupyter runs it, without a browser: cells that train, are refused, are interrupted, and go on."""

from __future__ import annotations

import os
import re
import signal
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from tests.run import PATIENCE, SMALL, Command, status

pytest.importorskip("ipykernel", reason="a notebook needs ipykernel: pip install -e '.[test]'")
from jupyter_client.blocking import BlockingKernelClient
from jupyter_client.connect import write_connection_file

WORDS = [*SMALL, "device=cpu", "log=[console]", "loop.global_batch=120", "loop.steps=12"]
ENDLESS = [*WORDS, "loop.steps=1000000", "loop.eval_every=null", "schedule=constant"]
STEP = re.compile(r"^epoch .* step ", re.MULTILINE)
COLOUR = re.compile(r"\x1b\[[0-9;]*m")


@dataclass
class Said:
    """What a cell shows."""

    text: str = ""  # of both streams
    value: str = ""  # of its last line
    error: str = ""  # its name
    trace: list[str] = field(default_factory=list)


class Notebook:
    """A kernel, and cells that are sent to it one after the other."""

    def __init__(self, place: Path) -> None:
        file = str(place / "kernel.json")
        write_connection_file(file)
        own = {"IPYTHONDIR": str(place / "ipython")}
        self.kernel = Command([sys.executable, "-m", "ipykernel_launcher", "-f", file], place, own)
        self.client = BlockingKernelClient(connection_file=file)
        self.client.load_connection_file()
        self.client.start_channels()
        self._wait()

    def _wait(self) -> None:
        """Until the kernel answers; a client that has not started it takes one that still imports for a dead one."""
        until = time.monotonic() + PATIENCE
        while True:
            try:
                return self.client.wait_for_ready(timeout=PATIENCE)
            except RuntimeError:
                assert self.kernel.process.poll() is None, self.kernel.screen
                assert time.monotonic() < until, self.kernel.screen

    def cell(self, code: str, interrupted: bool = False) -> Said:
        """Run a cell to its end. interrupted: with its first training line somebody presses the button."""
        said = Said()

        def hear(message: dict[str, Any]) -> None:
            nonlocal interrupted
            content = message["content"]
            said.text += content["text"] if message["msg_type"] == "stream" else ""
            if message["msg_type"] == "execute_result":
                said.value = content["data"]["text/plain"]
            if message["msg_type"] == "error":
                said.error, said.trace = content["ename"], COLOUR.sub("", "\n".join(content["traceback"])).splitlines()
            if interrupted and STEP.search(said.text):
                interrupted = False
                os.kill(self.kernel.pid, signal.SIGINT)

        self.client.execute_interactive(code, output_hook=hear, timeout=PATIENCE, allow_stdin=False)
        return said

    def close(self) -> str:
        """End the kernel; what the terminal shows that the server was started in."""
        self.client.shutdown()
        ended = self.kernel.end()
        self.client.stop_channels()
        assert (ended.code, ended.left) == (0, []), ended.out
        return ended.out


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("notebook")


@pytest.fixture(scope="module")
def notebook(place: Path) -> Iterator[Notebook]:
    one = Notebook(place)
    one.cell(f"import trainer\nWORDS, ENDLESS = {WORDS}, {ENDLESS}")
    yield one
    # what a run says belongs into its cell, and nowhere else
    assert not STEP.search(one.close())


def test_cells_train_one_after_the_other(notebook: Notebook) -> None:
    first = notebook.cell("result = trainer.run([*WORDS, 'run.name=first'])\nresult.state")
    assert first.value == "'completed'", first
    assert len(STEP.findall(first.text)) == 12
    assert "completed   step 12" in first.text
    # lines for a page: nothing that only a terminal understands
    assert not {*first.text} & {"\r", "\x1b", "\b"}
    again = notebook.cell("trainer.run([*WORDS, 'run.name=again']).metrics == result.metrics, type(result.network)")
    assert again.value == "(True, recipes.vision.mlp.MLP)", again


def test_a_refusal_is_a_sentence_below_the_call(notebook: Notebook) -> None:
    said = notebook.cell("trainer.run(['model=mpl'])")
    assert said.error == "Refusal"
    assert said.trace[-1].startswith("Refusal: model=mpl: there is no such option; did you mean 'mlp'")
    assert len([line for line in said.trace if re.match(r"(File|Cell) ", line)]) == 2, said.trace
    # what only this process knows
    mine = notebook.cell(
        "from torch import nn\nclass Net(nn.Module): pass\ntrainer.run(['model._target_=__main__.Net'])"
    )
    assert mine.error == "Refusal"
    assert "use mine.Net with trust=[mine]; or give the object itself to a Trainer" in mine.trace[-1]


def test_the_button_stops_and_saves_and_the_kernel_goes_on(notebook: Notebook, place: Path) -> None:
    stopped = notebook.cell("trainer.run([*ENDLESS, 'run.name=stopped']).state", interrupted=True)
    assert (stopped.error, stopped.value) == ("", "'preempted'"), stopped
    ended = status(place / "runs" / "stopped")
    assert (ended["state"], ended["reason"]) == ("preempted", "SIGINT")
    more = f"[*ENDLESS, 'run.name=stopped', 'loop.steps={ended['step'] + 3}']"
    went_on = notebook.cell(f"trainer.run({more}).state")
    assert went_on.value == "'completed'", went_on
    assert f"resuming    step {ended['step']}" in went_on.text


@pytest.mark.long
def test_several_processes_speak_into_the_cell_and_hear_its_button(notebook: Notebook, place: Path) -> None:
    said = notebook.cell("trainer.run([*WORDS, 'run.name=two'], processes=2).state")
    assert said.value == "'completed'", said
    assert len(STEP.findall(said.text)) == 12
    assert "strategy    ddp on 2 processes" in said.text
    assert not {*said.text} & {"\r", "\x1b", "\b"}
    stopped = notebook.cell("trainer.run([*ENDLESS, 'run.name=both'], processes=2).state", interrupted=True)
    assert (stopped.error, stopped.value) == ("", "'preempted'"), stopped
    assert status(place / "runs" / "both")["state"] == "preempted"
    refused = notebook.cell("trainer.run([*WORDS, 'loop.global_batch=101'], processes=2)")
    assert (refused.error, len(refused.trace) < 30) == ("Refusal", True), refused
