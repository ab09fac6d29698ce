"""Index the shards below a URL once, for data=shards: python scripts/index_shards.py URL

    python scripts/index_shards.py ~/flowers                          a folder with .tar or .parquet files
    python scripts/index_shards.py s3://bucket/imagenet               every URL that fsspec opens
    python scripts/index_shards.py https://host/flowers 000.tar 001.tar       where a server lists no files

Each shard is read once. A shard that is done is kept: after a kill the same command goes on, and after new shards were
added it reads only those. The index lies below the URL, in shards_index/; where that cannot be written, as on a web
server, in ~/.cache/trainer of this machine, or where --out says (then data.index=OUT).
"""

from __future__ import annotations

import argparse
import sys
from concurrent.futures import ThreadPoolExecutor, as_completed
from hashlib import sha256
from pathlib import Path

import numpy
from safetensors.numpy import load, save

CHECKOUT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(CHECKOUT))

from recipes.shards.index import Arrays, index_place, make_blocks, write_index  # noqa: E402 - found through the line above
from recipes.shards.remote import Remote  # noqa: E402
from recipes.shards.scan import identify, list_shards, scan  # noqa: E402
from recipes.vision.cached import cache_folder  # noqa: E402
from trainer.messages import FatalRunError, Refusal, expand_home, first_line  # noqa: E402

LARGEST_BLOCK = 4 * 2**20  # bytes: a request of that size takes longer than the wait for its first byte
BLOCKS = 2048  # of a smaller set: enough for many lanes


def main() -> None:
    """Read the words, scan what is new, write the index."""
    asked = words()
    root = asked.url if "://" in asked.url else str(expand_home(asked.url).absolute())
    remote = Remote(root)
    names = sorted(asked.shards) or list_shards(remote)
    place = writable_place(root, asked.out)
    shards = scan_all(remote, Parts(place), names, asked)
    class_names = number_classes([words for _, words in shards])
    arrays = [arrays for arrays, _ in shards]
    total = sum(int(part["size"].sum()) for part in arrays)
    blocks, samples = make_blocks(arrays, max(1, min(LARGEST_BLOCK, total // BLOCKS)))
    classes = len(class_names) or int(samples["label"].max()) + 1
    summary = {
        "shards": names,
        "class_names": class_names,
        "num_classes": classes,
        "columns": [asked.image, asked.label],
        "samples": len(samples["label"]),
    }
    named = {f"block.{name}": array for name, array in blocks.items()}
    write_index(place, summary, named | {f"sample.{name}": array for name, array in samples.items()})
    print(f"{len(samples['label']):,} pictures of {classes} classes, {total / 1e9:.3g} GB, in {len(names):,} shards")
    index = "" if asked.out is None else f" data.index={asked.out}"
    print(f"written  {place}; python -m trainer data=shards data.root={asked.url}{index} …")


def words() -> argparse.Namespace:
    """What was asked for."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("url", help="a folder, or a URL: s3://, gs://, az://, https://")
    parser.add_argument("shards", nargs="*", help="paths below it; default: all .tar and .parquet files")
    parser.add_argument("--out", help="where the index is written: a folder or a URL; default: URL/shards_index")
    parser.add_argument("--image", default="image", help="Parquet: the column of pictures; default: %(default)s")
    parser.add_argument(
        "--label", default="cls", help="the ending of the file with the class, or the column; default: cls, label"
    )
    parser.add_argument("--threads", type=int, default=8, help="shards that are read at once; default: %(default)s")
    asked = parser.parse_args()
    if asked.threads < 1:
        parser.error(f"--threads is {asked.threads}; it is 1 or more")
    return asked


class Parts:
    """What is known of each shard, a file for each."""

    def __init__(self, place: str) -> None:
        self._remote = Remote(place)

    def read(self, identity: str) -> tuple[Arrays, list[str]] | None:
        """The part of a shard; None where it has not been scanned."""
        try:
            arrays = load(self._remote.read(self._path(identity)))
        except FileNotFoundError:
            return None
        return arrays, bytes(arrays.pop("names")).decode().split("\n") if "names" in arrays else []

    def write(self, identity: str, arrays: Arrays, names: list[str]) -> None:
        """Keep the part of a shard."""
        text = {"names": numpy.frombuffer("\n".join(names).encode(), numpy.uint8)} if names else {}
        self._remote.write(self._path(identity), save({**arrays, **text}))

    def _path(self, identity: str) -> str:
        return f"parts/{sha256(identity.encode()).hexdigest()[:24]}.safetensors"


def writable_place(root: str, out: str | None) -> str:
    """Where the index is written: the first place that takes a file."""
    places = index_place(root, out if out is None or "://" in out else str(expand_home(out).absolute()), cache_folder())
    for place in places:
        remote = Remote(place, attempts=1)
        files, path = remote.files()
        try:
            remote.write(".writable", b"")
            files.rm_file(f"{path}/.writable")
            return place
        except Exception as error:  # a file system of fsspec says in its own way that it cannot be written
            reason = first_line(error) or type(error).__name__
    raise Refusal(f"{' and '.join(places)} cannot be written: {reason}; --out FOLDER is another place")


def scan_all(
    remote: Remote, parts: Parts, names: list[str], asked: argparse.Namespace
) -> list[tuple[Arrays, list[str]]]:
    """What is known of each shard, in order; those without a part are scanned, some at a time."""

    def part_of(name: str) -> tuple[Arrays, list[str], bool]:
        try:
            identity = f"{identify(remote, name)} {asked.image} {asked.label}"
        except FileNotFoundError as error:
            raise Refusal(f"{remote.root}/{name} is not there") from error
        if (kept := parts.read(identity)) is not None:
            return *kept, True
        arrays, words = scan(remote, name, asked.image, asked.label)
        parts.write(identity, arrays, words)
        return arrays, words, False

    with ThreadPoolExecutor(asked.threads) as pool:
        futures = [pool.submit(part_of, name) for name in names]
        try:
            for done, future in enumerate(as_completed(futures), 1):
                if not future.result()[2]:
                    print(f"indexed {done:,} of {len(names):,} shards", flush=True)
        except BaseException:
            pool.shutdown(wait=False, cancel_futures=True)  # the first problem is enough
            raise
    results = [future.result() for future in futures]
    if kept := sum(known for _, _, known in results):
        print(f"{kept:,} of {len(names):,} shards were indexed already")
    shards = [(arrays, words) for arrays, words, _ in results]
    renumber(shards)
    return shards


def number_classes(words: list[list[str]]) -> list[str]:
    """The names of all classes, in order; none where labels are numbers. Hugging Face's names keep their order."""
    distinct = {tuple(names) for names in words}
    if len(distinct) == 1:
        return list(distinct.pop())
    return sorted({name for names in words for name in names})


def renumber(shards: list[tuple[Arrays, list[str]]]) -> None:
    """Give labels that are words the same numbers in all shards."""
    numbers = {name: number for number, name in enumerate(number_classes([words for _, words in shards]))}
    if numbers and not all(words for _, words in shards):
        raise Refusal("some shards have words for labels, and others numbers: they belong to different sets")
    for arrays, words in shards:
        if words:
            arrays["label"] = numpy.array([numbers[name] for name in words])[arrays["label"]]


if __name__ == "__main__":
    try:
        main()
    except (Refusal, FatalRunError) as problem:
        print(problem, file=sys.stderr)
        sys.exit(2 if isinstance(problem, Refusal) else 1)
