"""TensorBoard event files: the figures of metrics.jsonl over the step, pictures, the configuration."""

from pathlib import Path
from typing import TYPE_CHECKING

from torch import Tensor

from trainer.records.log import NO_FIGURES, Line, Sink

if TYPE_CHECKING:
    from torch.utils.tensorboard import SummaryWriter

_SHOWN = 32  # images of a batch


class TensorBoard(Sink):
    """Curves in <run>/tensorboard. Evaluation has the same tags in a sub-run of its own, so both lie on one chart."""

    def open(self, folder: Path, step: int, steps: int | None, epochs: int | None) -> None:
        """Make the writers; what an earlier attempt wrote after `step` is taken back."""
        from torch.utils.tensorboard import SummaryWriter

        self._step = step
        # readers then forget what a dead attempt wrote of later steps: event files cannot be cut
        purge = step + 1 if step else 0
        self._train = SummaryWriter(str(folder / "tensorboard"), purge_step=purge)
        self._eval = SummaryWriter(str(folder / "tensorboard" / "eval"), purge_step=purge)

    def train(self, line: Line) -> None:
        """Add a point to every training curve."""
        _add(self._train, line)

    def eval(self, line: Line) -> None:
        """Add a point to every evaluation curve."""
        _add(self._eval, line)

    def images(self, tag: str, images: Tensor, step: int) -> None:
        """Show images (B, C, H, W) in a grid; darkest to brightest value is black to white."""
        shown = images[:_SHOWN].float().cpu()  # (B, C, H, W)
        # as RGB or grey, whatever a data set has for channels
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


def _add(writer: "SummaryWriter", line: Line) -> None:
    """One point a figure. Flushed, so that a kill loses none; a NaN is drawn as a NaN."""
    for name, value in line.items():
        if name not in NO_FIGURES and isinstance(value, (int, float)):
            writer.add_scalar(name, value, line["step"], walltime=line.get("time"))
    writer.flush()
