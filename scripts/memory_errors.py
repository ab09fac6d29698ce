"""What job=plan says of memory beside what processes take: the table of errors in docs/plan.md.

python scripts/memory_errors.py                                            every row
python scripts/memory_errors.py --networks vit,gpt --processes 2 -- ddp fsdp   some of them
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from statistics import median
from tempfile import TemporaryDirectory
from typing import Any, NamedTuple

from memory_runs import plan, train

MIB = 2**20
COMMON = (
    "trust=[memory_runs] optimizer=adamw schedule=constant precision=fp32 device=cpu log=[] loop.steps=2"
    " loop.global_batch=8"
)
IMAGES = "data=synthetic_images data.size=64 data.evaluation_size=0 task._target_=memory_runs.Watched"
TOKENS = "data=synthetic_tokens data.size=64 data.evaluation_size=0"
SENTENCES = f"{TOKENS} task=language task._target_=memory_runs.WatchedTokens"
BERT = {"model_type": "bert", "hidden_size": 512, "num_hidden_layers": 8, "num_attention_heads": 8}
BERT |= {"intermediate_size": 2048, "vocab_size": 8192, "max_position_embeddings": 256}


class Network(NamedTuple):
    """A network of the table."""

    arguments: str
    imports: str = ""  # what it is made of beside this project


TINY = Network(f"model=gpt_nano model.width=32 data.length=32 {SENTENCES}")
NETWORKS = {
    "vit": Network(f"model=vit_small model.width=512 model.depth=12 model.heads=8 model.patch_size=4 {IMAGES}"),
    "cnn": Network(f"model=cnn model.width=128 {IMAGES}"),
    "resnet50": Network(f"model=resnet50 {IMAGES}", "torchvision"),
    "gpt": Network(f"model=gpt_nano model.width=512 model.depth=8 model.heads=8 data.length=256 {SENTENCES}"),
    "timm": Network(f"model=timm model.name=convnext_tiny data.image_size=64 {IMAGES}", "timm"),
    "transformers": Network(
        "model=hf_classifier model.path={folder} model.num_classes=10 model.pool=cls model.freeze=[] data.length=128"
        f" data.vocab_size=8192 data._target_=memory_runs.TokenClasses +data.num_classes=10 {TOKENS}"
        " task=classification task._target_=memory_runs.Watched",
        "transformers.models.bert.modeling_bert",
    ),
}
WORDS = (
    "model=gpt2 model.width=256 model.depth=4 model.heads=4 model.context=512 data.length=512 data.vocab_size=50257"
    f" {SENTENCES}"
)
# the scores of a large vocabulary, as a whole and in chunks
VOCABULARY = {"scores": Network(WORDS), "chunks": Network(f"{WORDS} task.loss_chunk=512")}


class Error(NamedTuple):
    """A row: bytes of the rank that holds most."""

    network: str
    arguments: str
    processes: int
    planned: int
    measured: int

    @property
    def error(self) -> float:
        """Of what was measured, in percent."""
        return 100 * (self.planned / self.measured - 1)

    def __str__(self) -> str:
        sizes = f"{self.planned / MIB:.0f} | {self.measured / MIB:.0f} | {self.error:+.1f} %"
        return f"| {self.network} | {self.arguments} | {self.processes} | {sizes} |"


def compare(networks: Sequence[str], strategies: Sequence[str], processes: Sequence[int]) -> None:
    """Print the table, row by row, and the median and the largest of the errors."""
    print("| network | strategy | processes | planned | measured | error |")
    print("|" + 6 * " --- |", flush=True)
    errors: list[Error] = []
    with bert_folder() as folder:
        for error in measured_errors(networks, strategies, processes, folder):
            print(error, flush=True)
            errors.append(error)
    sizes = sorted(abs(error.error) for error in errors)
    print(f"\n{len(sizes)} rows: median {median(sizes):.1f} %, worst {sizes[-1]:.1f} %")


@contextmanager
def bert_folder() -> Iterator[str]:
    """A folder with the sizes of a BERT, which transformers builds a network from."""
    with TemporaryDirectory() as folder:
        (Path(folder) / "config.json").write_text(json.dumps(BERT))
        yield folder


def measured_errors(
    networks: Sequence[str], strategies: Sequence[str], processes: Sequence[int], folder: str
) -> Iterator[Error]:
    """The rows. Each strategy's own needs (its groups, its code) are those of a tiny network, beyond its tensors."""
    own: dict[tuple[str, int], int] = {}  # bytes, by the arguments and the number of processes
    tiny = {key(row): row["peak"] for row in plan(f"{TINY.arguments} {COMMON}", processes, strategies)}
    for name in networks:
        network = (NETWORKS | VOCABULARY)[name]
        arguments = f"{network.arguments.format(folder=folder)} {COMMON}"
        for row in plan(arguments, processes, strategies):
            if key(row) not in own:
                own[key(row)] = grown(f"{TINY.arguments} {COMMON} {row['words']}", row["processes"]) - tiny[key(row)]
            more = grown(f"{arguments} {row['words']}", row["processes"], network.imports) - own[key(row)]
            yield Error(name, row["words"].removeprefix("strategy="), row["processes"], row["peak"], more)


def key(row: dict[str, Any]) -> tuple[str, int]:
    """What a row of two networks has in common."""
    return row["words"], row["processes"]


def grown(arguments: str, processes: int, imports: str = "") -> int:
    """Bytes by which the rank that grew most did so, in the steps, since before it had a network or a group."""
    return max(figures.peak - figures.empty for figures in train(arguments, processes, imports, exact=True))


def main() -> None:
    """Print the rows that are asked for."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("strategies", nargs="*", help="only these")
    parser.add_argument("--networks", default=",".join(NETWORKS), help="default: %(default)s; or scores,chunks")
    parser.add_argument("--processes", type=int, nargs="+", default=[1, 2, 4])
    asked = parser.parse_args()
    compare(asked.networks.split(","), asked.strategies, asked.processes)


if __name__ == "__main__":
    main()
