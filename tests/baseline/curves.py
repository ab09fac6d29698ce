"""Losses of the first steps of recipes, to the bit: recorded once, compared after each rewriting.

    python -m tests.baseline.curves --record [NAME...]     writes curves.json anew, or these curves in it
    python -m tests.baseline.curves --compare [NAME...]    says of each whether it is the same, and where it is not

Everything runs on one process of a CPU with one thread, without downloads. Another processor or another torch may have
other last bits: compare on the machine that has recorded, or look at the size of the difference. A word that has gone
is left out by hand, here; what remains must still have its curve. FASHION_MNIST: the folder of its four .gz files, if
Debian's package is not installed.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent
FILE = HERE / "curves.json"
COMMON = ("device=cpu", "strategy=single", "log=[]", "loop.log_every=1", "loop.eval_every=null", "precision=fp32")
STEPS = ("loop.epochs=null", "loop.steps=20", "loop.save_every=null", "schedule.warmup=5")
LITTLE = "loop.global_batch=8"
TOKENS = ("data=synthetic_tokens", "data.length=64", LITTLE)
IMAGES = ("data=synthetic_images", LITTLE)
SMALL = ("model.width=64", "model.depth=2", "model.heads=4")
MLP = ("model=mlp", "model.width=64")
FASHION = os.environ.get("FASHION_MNIST")
ROOT = (f"data.root={FASHION}",) if FASHION else ()
FOLDER = ("data.root=images", "data.image_size=64", "data.eval_image_size=64", LITTLE)

CURVES: dict[str, tuple[str, ...]] = {
    "default": (),
    "experiment=digits": ("experiment=digits",),
    "experiment=gpt_book": ("experiment=gpt_book",),
    "experiment=fashion_mnist": ("experiment=fashion_mnist", *ROOT),
    "experiment=fashion_mnist_small": ("experiment=fashion_mnist_small", *ROOT),
    "experiment=imagenet_resnet50": ("experiment=imagenet_resnet50", *FOLDER),
    "experiment=imagenet_resnet50_strong": ("experiment=imagenet_resnet50_strong", *FOLDER),
    "experiment=imagenet_vit_small": ("experiment=imagenet_vit_small", *FOLDER, "model.depth=2"),
    "experiment=llama_8b": (
        *("experiment=llama_8b", *TOKENS, "model.width=64", "model.depth=2", "model.inner=128", "model.heads=4"),
        "model.groups=2",
    ),
    "model=mlp": ("model=mlp",),
    "model=cnn": ("model=cnn",),
    "model=vit_tiny": ("model=vit_tiny", "loop.global_batch=32"),
    "model=vit_small": ("model=vit_small", *IMAGES),
    "model=resnet18": ("model=resnet18", *IMAGES),
    "model=resnet50": ("model=resnet50", *IMAGES),
    "model=torchvision": ("model=torchvision", "model.name=mobilenet_v3_small", *IMAGES),
    "model=timm": ("model=timm", "model.name=resnet10t", *IMAGES),
    "model=gpt_nano": ("model=gpt_nano", LITTLE),
    "model=gpt_mini": ("model=gpt_mini", LITTLE, "data.length=64"),
    "model=moe_nano": ("model=moe_nano", LITTLE),
    "model=gpt2": ("model=gpt2", *TOKENS, *SMALL),
    "model=llama": ("model=llama", *TOKENS, *SMALL, "model.groups=2", "model.inner=128"),
    "lora": ("model=gpt_nano", *TOKENS, *SMALL, "model.lora=4"),
    "packed documents": ("model=gpt_nano", LITTLE, *SMALL, "data.length=64", "data.pack=true"),
    "every place begins a sample": ("model=gpt_nano", LITTLE, *SMALL, "data.length=64", "data.stride=1"),
    "window, rotary, tied": (
        *("model=gpt_nano", *TOKENS, *SMALL, "model.window=16", "model.rotary=10000", "model.tied=true"),
    ),
    "loss in chunks": ("model=gpt_nano", *TOKENS, *SMALL, "task.loss_chunk=32"),
    "native dropout": ("model=gpt_nano", *TOKENS, *SMALL, "model.dropout=0.1"),
    "dropout of samples": ("model=gpt_nano", *TOKENS, *SMALL, "model.dropout=0.1", "loop.dropout=sample"),
    "recomputed": (
        *("model=gpt_nano", *TOKENS, *SMALL, "model.dropout=0.1", "loop.dropout=sample"),
        "strategy.activation_checkpointing=units",
    ),
    "optimizer=adam": (*MLP, "optimizer=adam"),
    "optimizer=sgd": (*MLP, "optimizer=sgd"),
    "optimizer=muon": ("model=gpt_nano", *TOKENS, *SMALL, "optimizer=muon"),
    "optimizer=torch": (*MLP, "optimizer=torch", "optimizer._target_=torch.optim.RMSprop"),
    "groups": (*MLP, "optimizer.groups=[{pattern:'1.*',lr:1e-4,weight_decay:0}]", "model.freeze=[3]"),
    "schedule=constant": (*MLP, "schedule=constant"),
    "schedule=linear": (*MLP, "schedule=linear"),
    "schedule=step": (*MLP, "schedule=step", "schedule.milestones=[8,14]"),
    "schedule=wsd": (*MLP, "schedule=wsd"),
    "schedule=plateau": (
        *MLP,
        "schedule=plateau",
        "schedule.patience=0",
        "schedule.threshold=0.9",
        "loop.eval_every=4",
    ),
    "schedule=torch": (
        *(*MLP, "schedule=torch", "schedule._target_=torch.optim.lr_scheduler.ExponentialLR", "+schedule.gamma=0.9"),
        "schedule.per=step",
    ),
    "accumulation, clipping": (*MLP, "loop.micro_batches=3", "loop.uneven=true", "loop.max_norm=0.1"),
    "precision=bf16": ("model=cnn", "precision=bf16"),
    "precision=fp16": (*MLP, "precision=fp16"),
    "precision=fp64": (*MLP, "precision=fp64"),
    "mixed pictures": (
        *("model=cnn", *IMAGES, "data.augment.crop=4", "data.augment.flip=true", "data.augment.erase=0.5"),
        *("data.augment.mixup=0.2", "data.augment.cutmix=1.0"),
    ),
    "moved pictures": (
        *("model=cnn", *IMAGES, "data.augment.rotate=15", "data.augment.scale=0.2", "data.augment.shear=0.2"),
        *("data.augment.shift=2", "data.augment.resized_crop=0.5"),
    ),
    "coloured pictures": (
        *("model=cnn", *IMAGES, "data.augment.brightness=0.4", "data.augment.contrast=0.4"),
        *("data.augment.saturation=0.4", "task.label_smoothing=0.1"),
    ),
    "compiled": ("model=gpt_nano", *TOKENS, *SMALL, "compile=true"),
}


def make_images(folder: Path) -> None:
    """A folder of pictures like ImageNet's: train/ and val/, four classes, made of a formula."""
    import numpy
    from PIL import Image

    for split, count in (("train", 60), ("val", 8)):
        for kind in range(4):
            (folder / split / f"class{kind}").mkdir(parents=True)
            for number in range(count):
                y, x = numpy.mgrid[0 : 70 + number % 9, 0 : 80 + kind]
                shades = [(x * (kind + 1) + y * (channel + 1) + 7 * number) % 256 for channel in range(3)]
                Image.fromarray(numpy.stack(shades, -1).astype("uint8")).save(
                    folder / split / f"class{kind}" / f"{number}.png"
                )


def run(name: str, place: Path) -> list[str] | str:
    """The losses in hexadecimal; the last words of a run that failed."""
    folder = place / str([*CURVES].index(name))
    words = [*COMMON, *CURVES[name], *STEPS, f"run.dir={folder}"]
    told = dict(word.partition("=")[::2] for word in words)  # the later one counts: Hydra takes each once
    words = [*(f"{key}={value}" for key, value in told.items() if key not in DROPPED.get(name, ()))]
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(HERE.parent.parent)}
    command = [sys.executable, "-m", "trainer", *words]
    ended = subprocess.run(command, cwd=place, env=environment, capture_output=True, text=True)
    if ended.returncode:
        return (ended.stdout + ended.stderr).strip().splitlines()[-1]
    lines = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    return [float.hex(line["loss"]) for line in lines if line["kind"] == "train"]


DROPPED = {"schedule=torch": ("schedule.warmup",)}


def compared(then: list[str] | str, now: list[str] | str) -> str:
    """In words."""
    if isinstance(now, str):
        return f"does not run: {now}"
    if isinstance(then, str):
        return "runs, and had no curve"
    if then == now:
        return "same bits"
    pairs = [(float.fromhex(a), float.fromhex(b)) for a, b in zip(then, now, strict=False)]
    gaps = [abs(a - b) / abs(a) for a, b in pairs]
    first = next((step for step, gap in enumerate(gaps, 1) if gap), len(gaps) + 1)
    return f"DIFFERS from step {first} of {len(then)} on, at most {max(gaps, default=0):.1e}; {len(now)} steps"


def main() -> None:
    """Record, or compare."""
    names = [word for word in sys.argv[1:] if not word.startswith("--")] or [*CURVES]
    known: dict[str, Any] = json.loads(FILE.read_text()) if FILE.exists() else {}
    with tempfile.TemporaryDirectory() as place:
        make_images(Path(place) / "images")
        for name in names:
            curve = run(name, Path(place))
            print(f"{name:38} {compared(known.get(name, ''), curve)}", flush=True)
            if "--record" in sys.argv:
                known[name] = curve
                rows = [f"{json.dumps(one)}: {json.dumps(known[one])}" for one in CURVES if one in known]
                FILE.write_text("{\n" + ",\n".join(rows) + "\n}\n")


if __name__ == "__main__":
    main()
