"""TensorBoard event files: the figures of metrics.jsonl over the step, pictures, the configuration."""

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from torch import Tensor

if TYPE_CHECKING:
    from torch.utils.tensorboard import SummaryWriter

_NO_CURVE = ("kind", "step", "epoch", "samples", "time")
_SHOWN = 32  # images of a batch


class TensorBoard:
    """Curves in <run>/tensorboard. Evaluation has the same tags in a sub-run of its own, so both lie on one chart."""

    def __init__(self) -> None:
        self._step = 0

    def open(self, folder: Path, step: int, steps: int | None, epochs: int | None) -> None:
        """Make the writers; what an earlier attempt wrote after `step` is taken back."""
        from torch.utils.tensorboard import SummaryWriter

        self._step = step
        purge = step + 1 if step else 0
        self._train = SummaryWriter(str(folder / "tensorboard"), purge_step=purge)
        self._eval = SummaryWriter(str(folder / "tensorboard" / "eval"), purge_step=purge)

    def start(self, fact: str) -> None:
        """Sentences are for the console."""

    def train(self, line: Mapping[str, Any]) -> None:
        """Add a point to every training curve."""
        _add(self._train, line)

    def eval(self, line: Mapping[str, Any]) -> None:
        """Add a point to every evaluation curve."""
        _add(self._eval, line)

    def images(self, tag: str, images: Tensor, step: int) -> None:
        """Show images (B, C, H, W) in a grid; darkest to brightest value is black to white."""
        shown = images[:_SHOWN].float().cpu()
        shown = shown[:, :3] if shown.shape[1] >= 3 else shown[:, :1]
        low, high = shown.min(), shown.max()
        self._train.add_images(tag, (shown - low) / (high - low).clamp_min(1e-12), step)
        self._train.flush()

    def text(self, tag: str, text: str) -> None:
        """Keep a text, its lines as they are."""
        self._train.add_text(tag, "\n".join(f"    {line}" for line in text.splitlines()), self._step)

    def flush(self) -> None:
        """Write to the files what is still in memory."""
        self._train.flush()
        self._eval.flush()

    def close(self) -> None:
        """End the files."""
        if hasattr(self, "_train"):
            self._train.close()
            self._eval.close()


def _add(writer: "SummaryWriter", line: Mapping[str, Any]) -> None:
    """One point a figure. Flushed, so that a kill loses none; a NaN is drawn as a NaN."""
    for name, value in line.items():
        if name not in _NO_CURVE and isinstance(value, (int, float)):
            writer.add_scalar(name, value, line["step"], walltime=line.get("time"))
    writer.flush()
