"""Fashion-MNIST: 70,000 grey pictures of clothes, 28×28 pixels, in ten classes."""

from __future__ import annotations

from pathlib import Path

from recipes.vision.augment import Augment
from recipes.vision.cached import cached
from recipes.vision.idx import read_idx
from recipes.vision.images import Images
from recipes.vision.pictures import Pictures
from trainer.messages import Refusal, expand_home

_FILES = {part: (f"{part}-images-idx3-ubyte.gz", f"{part}-labels-idx1-ubyte.gz") for part in ("train", "t10k")}
_NAMES = [name for pair in _FILES.values() for name in pair]
_CLASSES = ("T-shirt", "trouser", "pullover", "dress", "coat", "sandal", "shirt", "sneaker", "bag", "ankle boot")
_DEBIAN = Path("/usr/share/datasets/fashion-mnist")


class FashionMNIST(Pictures):
    """Fashion-MNIST (1, 28, 28) from its four files: in `root`, else from Debian's package, else downloaded once."""

    num_classes, stored = 10, (1, 28)
    class_names = _CLASSES

    def __init__(self, augment: Augment, root: str | None = None) -> None:
        super().__init__(augment)
        self.folder = expand_home(root) if root else _find()
        missing = [name for name in _NAMES if not (self.folder / name).is_file()]
        if missing:
            raise Refusal(f"{self.folder} lacks {', '.join(missing)}; Fashion-MNIST is {_four()} in one folder")

    def _read(self, training: bool) -> Images:
        """The 60,000 training images, or the 10,000 test images."""
        return _pair(self.folder, "train" if training else "t10k")


def _pair(folder: Path, part: str) -> Images:
    image_file, label_file = (folder / name for name in _FILES[part])
    images, labels = read_idx(image_file, 28, 28), read_idx(label_file)
    if len(images) != len(labels):
        raise Refusal(
            f"{image_file} holds {len(images)} images, but {label_file} {len(labels)} labels; expected as many"
        )
    if len(labels) and labels.max() > 9:
        raise Refusal(f"{label_file} holds the label {int(labels.max())}; expected 0..9")
    return Images(images[:, None], labels.long())


def _find() -> Path:
    """The folder with the four files: Debian's, or the cache, filled by the first process that comes."""
    if all((_DEBIAN / name).is_file() for name in _NAMES):
        return _DEBIAN
    folder = Path("FashionMNIST", "raw")  # where torchvision puts them under its root
    remedy = (
        f"put {_four()} into one folder and say data.root=FOLDER, or install Debian's package dataset-fashion-mnist"
    )
    return cached("Fashion-MNIST", [folder / name for name in _NAMES], _download, remedy) / folder


def _download(cache: Path) -> None:
    from torchvision.datasets import FashionMNIST as Source  # here, because the import takes seconds

    Source(str(cache), train=True, download=True)


def _four() -> str:
    return ", ".join(_NAMES[:-1]) + " and " + _NAMES[-1]
