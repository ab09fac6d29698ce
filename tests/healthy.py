"""Networks that are right, under `job=verify`: how far rounding takes each, and how near it comes to an alarm.

    python -m tests.healthy                       all of them, more than half an hour on two cores
    python -m tests.healthy resnet18 vae          two of them
    python -m tests.healthy --precision bf16      in another precision than fp32, beside fp64
    python -m tests.healthy --write               and write the tables into docs/verify.md

Each row is what `python -m trainer processes=N job=verify strategy=…` does, in processes that stay.
"""

from __future__ import annotations

import json
import sys
import time
from argparse import ArgumentParser
from collections.abc import Iterable, Sequence
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from tests.commands import ROOT, TRANSFORMER
from tests.inside import product
from tests.planted.kinds import RIGHT
from tests.planted.plant import NET, write_lab
from tests.processes import Processes
from tests.test_verify import LISTS
from trainer.launch.rendezvous import Launch
from trainer.messages import FatalRunError, Refusal

PAGE = ROOT / "docs" / "verify.md"
BEGIN, END = "<!-- written by python -m tests.healthy -->", "<!-- end of healthy networks -->"
BEGIN_FLOORS, END_FLOORS = "<!-- floors, by python -m tests.healthy -->", "<!-- end of floors -->"
HEAD = ["network", "strategy", "precision", "verdict", "gap in fp64", "floor", "of the limit"]
HEAD += ["gap in the precision", "floor", "of the limit", "modules", "seconds"]
FLOORS = ["precision", "proofs", "gap", "floor", "of the limit", "where"]
TESTS, LABS = ROOT / "tests", ROOT / "tests" / "labs"
SMALL = ["data=synthetic_images", "data.size=48", "loop.global_batch=8", "strategy.sync_bn=true"]
TEXT = ["data=synthetic_tokens", "data.length=16", "task=language", "loop.global_batch=8"]
LLAMA = ["model=llama", "model.width=32", "model.depth=2", "model.heads=4", "model.groups=2", "model.inner=64"]
EVERYWHERE = ["ddp", "fsdp", "zero1"]
PLANNED = [*EVERYWHERE, "tp", "pp"]
TORCHVISION = "resnet18 mobilenet_v3_small shufflenet_v2_x0_5 squeezenet1_1 efficientnet_b0 mnasnet0_5"
TIMM = "byobnet coatnet convnext convnext3 efficientnet efficientnet_gn efficientnet_evos mambaout maxvit nfnet resnet"
TIMM += " vit vit2 vit_relpos"
FOREIGN = "vae dcgan ddpm clip bert t5 swin tabular graph lightning_module experts"
OF_LABS = "segmentation masked distillation contrast gan recurrent graphs"
KINDS = ["versioned", "masked", "in_place", "low_rank", "places", "narrow", *RIGHT]


def networks(home: Path) -> dict[str, tuple[Path, list[str], list[str]]]:
    """Name → the folder in which its words are typed, the words, strategies. home: where `conf` of tests/planted is."""
    return {
        "mlp": (TESTS, ["model=mlp", "model.width=32", "loop.global_batch=24"], EVERYWHERE),
        "cnn": (TESTS, ["model=cnn", "loop.global_batch=24"], EVERYWHERE),
        "vit_tiny": (TESTS, [*TRANSFORMER, "model.dropout=0.1", "loop.global_batch=24"], PLANNED),
        "gpt_nano": (TESTS, [*TEXT, "model=gpt_nano"], [*PLANNED, "cp"]),
        "llama": (TESTS, [*LLAMA, *TEXT, "model.tied=false"], [*PLANNED, "cp"]),
        **{
            name: (TESTS, ["model=torchvision", f"model.name={name}", "data.image_size=32", *SMALL], EVERYWHERE)
            for name in TORCHVISION.split()
        },
        **{
            f"timm {name}": (TESTS, ["model=timm", f"model.name=test_{name}", "data.image_size=64", *SMALL], EVERYWHERE)
            for name in TIMM.split()
        },
        **{
            name: (
                TESTS,
                ["--config-dir", "foreign/conf", f"experiment={name}", "strategy.sync_bn=true"],
                ["fsdp"] if name == "experts" else ["ddp", "fsdp"],
            )
            for name in FOREIGN.split()
        },
        **{
            f"lab {name}": (
                LABS,
                ["--config-dir", f"{name}/conf", f"experiment={name}", "strategy.sync_bn=true"],
                ["ddp", "fsdp"],
            )
            for name in OF_LABS.split()
        },
        **{f"net {kind}": (home, [*NET, f"+model.kind={kind}"], EVERYWHERE) for kind in KINDS},
        "net listed": (home, [*NET, *LISTS, "data=listed"], EVERYWHERE),
        "net triples": (home, [*NET, "model=of_nodes", "data=triples"], EVERYWHERE),
    }


def verified(launch: Launch, place: Path, words: list[str]) -> str:
    """What `job=verify` ends with: its exit code, or what it refuses."""
    sys.path[:0] = [str(place), str(ROOT / "tests")]
    try:
        return str(product(launch, place, ["job=verify", *words]))
    except (Refusal, FatalRunError) as ended:
        return " ".join(str(ended).split())
    finally:
        del sys.path[:2]


def rows(processes: Processes, home: Path, name: str, words: Sequence[str], only: str) -> Iterable[dict[str, Any]]:
    """The reference of a network, then a row for each of its strategies."""
    place, own, strategies = networks(home)[name]
    stem = home / "".join(letter if letter.isalnum() else "-" for letter in name)
    file, words = f"job.record={stem}.safetensors", [*own, *words, "loader.workers=0"]
    (said,) = processes.run(1, verified, place, [*words, f"run.dir={stem}.alone", file])
    for strategy in strategies if said == "0" else []:
        if only in ("", strategy):
            divided = ["loop.micro_batches=2"] if strategy == "pp" else []
            out, start = Path(f"{stem}.{strategy}"), time.monotonic()
            to = [f"strategy={strategy}", *divided, f"job.reference={stem}.safetensors", f"run.dir={out}"]
            said = processes.run(2, verified, place, [*words, *to])[0]
            report = out / "verify" / "verify.json"
            data = json.loads(report.read_text()) if report.is_file() else {"verdict": said}
            yield {"network": name, "strategy": strategy, "seconds": time.monotonic() - start, **data}
    if said not in "01":
        yield {"network": name, "strategy": "reference", "seconds": 0.0, "verdict": said}


def cells(row: dict[str, Any], precision: str) -> list[str]:
    """A row of the first table: what came nearest to its limit in fp64, and in the precision of the run."""
    own = (row.get("rounding") or {}).get("nearest", {})
    near = [max(places.values(), key=lambda one: one["part"]) for places in (row.get("nearest"), own) if places]
    said = [f"{one['gap']:.1e} | {one['floor']:.1e} | {one['part']:.2g}" for one in near] + ["- | - | -"] * (
        2 - len(near)
    )
    modules = " of ".join(map(str, row.get("modules", ["?"])))
    verdict = row["verdict"].partition(":")[0]
    return [row["network"], row["strategy"], precision, verdict, *said, modules, f"{row['seconds']:.0f}"]


def write(rows: Sequence[Sequence[str]]) -> None:
    """Put these rows into the page, in the place of those of the same network, strategy and precision."""
    text = PAGE.read_text()
    before, rest = text.split(BEGIN)
    old, after = rest.split(END)
    table = [[cell.strip() for cell in line.strip("| ").split(" | ")] for line in old.splitlines() if line[:2] == "| "]
    kept = {tuple(row[:3]): row for row in table if row[0] not in ("network", "---")}
    kept |= {tuple(row[:3]): [cell for each in row for cell in each.split(" | ")] for row in rows}
    lines = [f"| {' | '.join(row)} |" for row in (HEAD, ["---"] * len(HEAD), *kept.values())]
    worst = []
    for name, columns in (("fp64", (4, 5, 6)), ("fp32", (7, 8, 9)), ("bf16", (7, 8, 9)), ("fp16", (7, 8, 9))):
        of = [row for row in kept.values() if name in ("fp64", row[2]) and row[columns[2]] != "-"]
        if of:
            most = max(of, key=lambda row: float(row[columns[2]]))
            worst.append([name, str(len(of)), *(most[column] for column in columns), f"{most[0]}, {most[1]}"])
    floors = [f"| {' | '.join(row)} |" for row in (FLOORS, ["---"] * len(FLOORS), *worst)]
    after, _, last = after.partition(BEGIN_FLOORS)
    last = last.partition(END_FLOORS)[2]
    shown = "\n".join(["", "", *lines, "", ""])
    PAGE.write_text(
        before + BEGIN + shown + END + after + BEGIN_FLOORS + "\n\n" + "\n".join(floors) + "\n\n" + END_FLOORS + last
    )


def main(arguments: Sequence[str]) -> None:
    """Run the command line above."""
    parser = ArgumentParser()
    parser.add_argument("networks", nargs="*")
    parser.add_argument("--precision", default="fp32")
    parser.add_argument("--strategy", default="")
    parser.add_argument("--write", action="store_true")
    asked = parser.parse_args(arguments)
    group = Processes()
    with TemporaryDirectory() as place:
        home = Path(place)
        write_lab(home)
        for name in asked.networks or networks(home):
            for row in rows(group, home, name, [f"precision={asked.precision}"], asked.strategy):
                print(row["network"], row["strategy"], f"{row['seconds']:.1f}", row["verdict"], flush=True)
                if asked.write:
                    write([cells(row, asked.precision)])
    group.close()


if __name__ == "__main__":
    main(sys.argv[1:])
