"""TensorBoard event files: the figures of metrics.jsonl over the step, in groups; pictures; the configuration."""

from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from time import monotonic
from typing import TYPE_CHECKING, Any

from torch import Tensor

from trainer.launch.devices import memory_usage
from trainer.launch.safe_files import make_folder, refuse_full_disk
from trainer.messages import format_count
from trainer.parallel.tensor_statistics import Histogram
from trainer.records.image_plots import plot_confusion_matrix, plot_image_grid
from trainer.records.resume_rules import parse_config
from trainer.records.sinks import Line, Sink, WriteDeferred, measured_values

if TYPE_CHECKING:
    from torch.utils.tensorboard import SummaryWriter

# The groups of what every training line has; whatever else it has is a part of the loss.
_SPEED = dict.fromkeys(("samples_per_s", "tokens_per_s", "step_s", "utilisation"), "speed")
_GROUPS = {"lr": "optimizer", "grad_norm": "optimizer", **_SPEED}
# What runs are compared by; the rest of a configuration says where things go and how they are read.
_COMPARED_KEYS = (
    "model",
    "task",
    "data",
    "optimizer",
    "schedule",
    "strategy",
    "loop",
    "ema",
    "seed",
    "precision",
    "init_from",
)
_GIB = 2**30
_MAX_SHARE = 0.05  # of the time, at most, goes into drawing
_MAX_WAITING = 50_000  # lines that wait for room on the disk


class TensorBoard(Sink):
    """Curves in <run>/tensorboard. Evaluation has the same tags in a sub-run of its own, so both lie on one chart."""

    def open(self, folder: Path, step: int, steps: int | None, epochs: int | None) -> None:
        """Make the writers; what an earlier attempt wrote after `step` is taken back."""
        from torch.utils.tensorboard import SummaryWriter

        self._folder, self._step, self._name = folder, step, f"{folder.parent.name}/{folder.name}"
        self._waiting: deque[tuple[SummaryWriter, dict[str, float], Line]] = deque(maxlen=_MAX_WAITING)
        # readers then forget what a dead attempt wrote of later steps: event files cannot be cut
        purge = step + 1 if step else 0
        make_folder(folder / "tensorboard" / "eval")  # its writers would follow a link
        self._train = SummaryWriter(str(folder / "tensorboard"), purge_step=purge)
        self._eval = SummaryWriter(str(folder / "tensorboard" / "eval"), purge_step=purge)
        self._images = _ImageQueue(self._train)

    def train(self, line: Line) -> None:
        """Add a point to every training curve, and to those of the main rank's memory."""
        metrics = {_chart_name(_GROUPS.get(name, "loss"), name): value for name, value in measured_values(line)}
        metrics |= {f"memory/{place}_gib": size / _GIB for place, size in memory_usage().items()}
        self._add(self._train, metrics, line)

    def eval(self, line: Line) -> None:
        """Add a point to every evaluation curve; the last word of a figure is its group: ema_accuracy by accuracy."""
        metrics = {_chart_name(name.rsplit("_", 1)[-1], name): value for name, value in measured_values(line)}
        self._add(self._eval, metrics, line)

    def _add(self, writer: "SummaryWriter", metrics: dict[str, float], line: Line) -> None:
        """One point a figure. Flushed, so that a kill loses none; a NaN is drawn as a NaN."""
        self._waiting.append((writer, metrics, line))
        self._write_waiting()

    def _write_waiting(self) -> None:
        """Write the points that wait, in their order; Waiting where there is no room."""
        # looked at before a byte goes out: half an event would end the thread that writes, and what readers see
        try:
            refuse_full_disk(self._folder)
        except OSError as error:
            waiting = format_count(len(self._waiting), "line")
            raise WriteDeferred(
                f"{self._folder / 'tensorboard'}: {error.strerror}; waiting for room: {waiting}"
            ) from error
        while self._waiting:
            writer, metrics, line = self._waiting.popleft()
            for tag, value in metrics.items():
                writer.add_scalar(tag, value, line["step"], walltime=line.get("time"))
            writer.flush()

    def images(self, tag: str, images: Tensor, step: int, words: Sequence[str] = ()) -> None:
        """Show images (B, C, H, W) in a grid, with words below them."""
        refuse_full_disk(self._folder)
        self._images.show(_chart_name("pictures", tag), partial(plot_image_grid, images, words), step)

    def confusion(self, tag: str, counts: Tensor, step: int, names: Sequence[str] = ()) -> None:
        """Show a confusion matrix as a picture."""
        refuse_full_disk(self._folder)
        self._images.show(_chart_name("pictures", tag), partial(plot_confusion_matrix, counts, names), step)

    def histograms(self, kind: str, histograms: Mapping[str, Histogram], step: int) -> None:
        """Show how numbers are distributed, by parameter."""
        refuse_full_disk(self._folder)
        for name, histogram in histograms.items():
            # the bins are equally wide; a histogram of one number has width 0
            width = (histogram.high - histogram.low) / len(histogram.counts) or 1e-12
            self._train.add_histogram_raw(
                _chart_name(kind, name),
                min=histogram.low,
                max=histogram.high,
                num=sum(histogram.counts),
                sum=histogram.sum,
                sum_squares=histogram.squares,
                bucket_limits=[histogram.low + width * (bin + 1) for bin in range(len(histogram.counts))],
                bucket_counts=histogram.counts,
                global_step=step,
            )
        self._train.flush()

    def text(self, tag: str, text: str) -> None:
        """Keep a text, its lines as they are; the configuration also as what runs are compared by."""
        refuse_full_disk(self._folder)
        from tensorboard.plugins.hparams.summary_v2 import hparams_pb

        self._train.add_text(tag, _as_code_block(text), self._step)
        if tag == "configuration":
            # their figures the reader takes from the curves: the last point of each
            writer: Any = self._train.file_writer  # torch calls it None, which it is after the last call alone
            writer.add_summary(hparams_pb(dict(_compared_values(parse_config(text), _COMPARED_KEYS)), self._name))

    def sample(self, text: str, step: int) -> None:
        """Keep what a language model has written."""
        refuse_full_disk(self._folder)
        self._eval.add_text("sample", _as_code_block(text), step)
        self._eval.flush()

    def flush(self) -> None:
        """Write to the files what is still in memory."""
        self._write_waiting()
        self._train.flush()
        self._eval.flush()

    def close(self) -> None:
        """End the files."""
        if hasattr(self, "_train"):
            try:
                self._write_waiting()
                self._images.catch_up()
            finally:
                self._train.close()
                self._eval.close()


class _ImageQueue:
    """Draws pictures of steps, unless those before have just cost too much: then the last ones wait for the end.

    So short evaluations that follow each other at once are not held up; of long ones every one has its pictures.
    """

    def __init__(self, writer: "SummaryWriter") -> None:
        self._writer = writer
        self._waiting: dict[str, tuple[Callable[[], Any], int]] = {}  # by tag: what draws it, and its step
        self._step, self._later = -1, False  # of the last pictures: their step, and whether they wait
        self._ready = 0.0  # the clock's time from which on pictures are drawn at once again

    def show(self, tag: str, draw: Callable[[], Any], step: int) -> None:
        """Draw now or later; later, a newer one of this tag takes its place."""
        if step != self._step:  # all pictures of a step wait, or none
            self._step, self._later = step, monotonic() < self._ready
        self._waiting[tag] = (draw, step)
        if not self._later:
            self._draw(tag)

    def catch_up(self) -> None:
        """Draw all that waits."""
        for tag in list(self._waiting):
            self._draw(tag)

    def _draw(self, tag: str) -> None:
        began, (draw, step) = monotonic(), self._waiting.pop(tag)
        # (height, width, 3) of uint8
        self._writer.add_image(tag, draw(), step, dataformats="HWC")
        self._writer.flush()
        # drawing took some time: the next images wait until that is a small part of all time
        self._ready = max(self._ready, began) + (monotonic() - began) / _MAX_SHARE


def _as_code_block(text: str) -> str:
    """A text as Markdown that changes nothing of it: four spaces before each line."""
    return "\n".join(f"    {line}" for line in text.splitlines())


def _chart_name(group: str, name: str) -> str:
    """The name of a chart; one that comes with a group keeps it."""
    return name if "/" in name else f"{group}/{name}"


def _compared_values(tree: Mapping[str, Any], keys: Iterable[str], prefix: str = "") -> Iterator[tuple[str, Any]]:
    """Dotted keys and their values; a group's option as the name of its class."""
    for key in keys:
        value = tree.get(key)
        if isinstance(value, Mapping):
            yield from _compared_values(value, value, f"{prefix}{key}.")
        elif key == "_target_":
            if prefix.count(".") == 1:  # what a group's own parts are made of is no setting
                yield prefix.removesuffix("."), str(value).rsplit(".", 1)[-1]
        elif value is not None:
            yield prefix + key, value if isinstance(value, bool | int | float | str) else str(value)
