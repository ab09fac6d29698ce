"""Turn texts into token shards that data=tokens reads: python scripts/prepare_tokens.py OUT TEXT [TEXT ...]

    python scripts/prepare_tokens.py book book.txt                        bytes, no tokenizer needed
    python scripts/prepare_tokens.py corpus *.jsonl --tokenizer gpt2      the column `text` of each line, by a tokenizer
    python scripts/prepare_tokens.py wiki --dataset FOLDER_OR_NAME --tokenizer gpt2

A .txt file is one document, a line of a .jsonl file is one (both also as .gz), and so is a row of a Hugging Face data
set. One document in `1 / --held` is held back for evaluation; of a single document its end. Texts may be far larger
than memory: rows are read one at a time, and a .txt file in pieces of some MB, which a tokenizer sees one by one.
"""

from __future__ import annotations

import argparse
import gzip
import json
import sys
import zlib
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from itertools import chain
from pathlib import Path
from typing import Any

import numpy
from numpy.typing import ArrayLike

CHECKOUT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(CHECKOUT))

from recipes.hub import located  # noqa: E402 - found through the line above
from recipes.language.shards import INDEX, Writer  # noqa: E402
from recipes.text.tokenizer import loaded  # noqa: E402
from trainer.messages import Refusal, first_line  # noqa: E402

Encode = Callable[[str], ArrayLike]  # the tokens of a piece of text
Document = Iterable[str]  # its pieces, in order; they can be read again
END = 256  # behind a document of bytes
PIECE = 2**20  # characters of a text that are read at once


def main() -> None:
    """Read the words, write the folder."""
    asked = words()
    encode, ending, vocabulary, name = encoder(asked.tokenizer)
    out = Path(asked.out)
    out.mkdir(parents=True, exist_ok=True)
    if (out / INDEX).exists():
        raise Refusal(f"{out} holds tokens already; give another folder, or remove it")
    writers = {split: Writer(out, split, vocabulary, asked.shard) for split in ("train", "evaluation")}
    count = 0
    for document, split in parted(documents(asked), asked.held):
        writers[split].begin()
        for piece in document:
            writers[split].add(encode(piece), len(piece.encode()))
        writers[split].add(ending, 0)
        count += 1
    index: dict[str, Any] = {
        "vocab_size": vocabulary,
        "tokenizer": name,
        "splits": {split: writer.described() for split, writer in writers.items()},
    }
    (out / INDEX).write_text(json.dumps(index, indent=1) + "\n", encoding="utf-8")
    for split, said in index["splits"].items():
        print(f"{split:<11} {said['tokens']:,} tokens of {said['bytes']:,} bytes in {len(said['shards'])} shards")
    print(f"written     {out}: {count:,} documents; python -m trainer data=tokens data.folder={out} …")


def words() -> argparse.Namespace:
    """What was asked for."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("out", help="the folder to write")
    parser.add_argument("texts", nargs="*", help=".txt, .jsonl, and both as .gz")
    parser.add_argument("--dataset", help="a Hugging Face data set: a folder of save_to_disk, or a name on the hub")
    parser.add_argument("--tokenizer", help="a tokenizer's folder, or its name on the hub; default: bytes")
    parser.add_argument("--column", default="text", help="the field or column of the text; default: %(default)s")
    parser.add_argument("--held", type=float, default=0.01, help="the part held back; default: %(default)s")
    parser.add_argument("--shard", type=int, default=100_000_000, help="tokens of a full file; default: %(default)s")
    asked = parser.parse_args()
    if not asked.texts and not asked.dataset:
        parser.error("give texts, or --dataset")
    if not 0 <= asked.held <= 0.5:
        parser.error(f"--held is {asked.held}; it is a part of the documents, from 0 to 0.5")
    if asked.shard < 1:
        parser.error(f"--shard is {asked.shard}; it is a number of tokens, 1 or more")
    return asked


def encoder(name: str | None) -> tuple[Encode, list[int], int, str | None]:
    """What makes tokens of a piece of text, what ends a document, how many different tokens, and what it is called."""
    if name is None:
        return lambda text: numpy.frombuffer(text.encode(), numpy.uint8), [END], END + 1, None
    tokenizer = loaded(name, "--tokenizer ")
    # the index keeps the name, and a run may begin in another folder
    name = str(Path(name).expanduser().resolve()) if Path(name).expanduser().is_dir() else name
    end = [] if tokenizer.eos_token_id is None else [tokenizer.eos_token_id]
    return lambda text: tokenizer(text, add_special_tokens=False)["input_ids"], end, len(tokenizer), name


def parted(found: Iterator[Document], held: float) -> Iterator[tuple[Document, str]]:
    """Every document and its split: one in `1 / held` is held back; of a single one its end."""
    first, second = next(found, None), next(found, None)
    if first is None:
        raise Refusal("there is no text to read")
    if second is None:
        size = sum(len(piece) for piece in first)
        cut = size - int(held * size)
        yield portion(first, 0, cut), "train"
        if cut < size:
            yield portion(first, cut, size), "evaluation"
        return
    every = round(1 / held) if held else 0
    for number, document in enumerate(chain((first, second), found), 1):
        yield document, "evaluation" if every and number % every == 0 else "train"


def portion(document: Document, start: int, stop: int) -> Iterator[str]:
    """The characters from `start` to `stop` of a document, piece by piece."""
    at = 0
    for piece in document:
        if own := piece[max(0, start - at) : max(0, stop - at)]:
            yield own
        at += len(piece)


class Text:
    """A .txt file as one document, read in pieces that end with a line where they can."""

    def __init__(self, path: Path) -> None:
        self._path = path

    def __iter__(self) -> Iterator[str]:
        """Its pieces, from the beginning."""
        with reading(self._path) as file:
            # to the end of a line, unless that is far
            while piece := file.read(PIECE) + file.readline(PIECE):
                yield piece


@contextmanager
def reading(path: Path) -> Iterator[Any]:
    """A file of text, opened; one that ends with .gz is unpacked on the way."""
    try:
        with (gzip.open if path.suffix == ".gz" else open)(path, "rt", encoding="utf-8") as file:
            yield file
    except (OSError, EOFError, zlib.error, UnicodeDecodeError) as error:
        raise Refusal(f"{path} cannot be read as UTF-8 text: {error}") from error


def documents(asked: argparse.Namespace) -> Iterator[Document]:
    """Every document, read one at a time."""
    for path in map(Path, asked.texts):
        if ".jsonl" in path.suffixes:
            with reading(path) as file:
                for number, line in enumerate(file, 1):
                    if line.strip():
                        yield [text_of(parsed(line), asked.column, f"{path}, line {number},")]
        else:
            yield Text(path)
    if asked.dataset:
        import datasets

        where = located(asked.dataset, "--dataset ")
        local = Path(where).is_dir()
        try:
            rows = datasets.load_from_disk(where) if local else datasets.load_dataset(where, split="train")
            rows = rows["train"] if isinstance(rows, datasets.DatasetDict) else rows
        except Exception as error:  # as for tokenizers
            raise Refusal(f"--dataset {asked.dataset} cannot be loaded: {first_line(error)}") from error
        yield from ([text_of(row, asked.column, f"a row of {asked.dataset}")] for row in rows)


def parsed(line: str) -> Any:
    """The row that a line of JSON holds; None: it holds none."""
    try:
        return json.loads(line)
    except ValueError:
        return None


def text_of(row: Any, column: str, where: str) -> str:
    """The text of a row; the end where it has none."""
    if not isinstance(row, dict) or not isinstance(row.get(column), str):
        there = f"it has {', '.join(row)}: --column NAME" if isinstance(row, dict) else "it is no JSON object"
        raise Refusal(f"{where} has no text in {column!r}; {there}")
    return row[column]


if __name__ == "__main__":
    try:
        main()
    except Refusal as refusal:
        sys.exit(str(refusal))
