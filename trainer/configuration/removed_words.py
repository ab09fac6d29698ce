"""Words of the past: keys, options and classes that are gone, and what to write instead.

Nothing else in the program knows them. Two ask: who finds a word that means nothing today, for its sentence; and who
opens a run of an older version, for that run's configuration in today's words.
"""

from __future__ import annotations

from collections.abc import Mapping
from fnmatch import fnmatchcase
from typing import Any

_LATENT = "model=hf_decoder trains the published networks that have latent attention"
_ROUGH = "the seconds of a plan are rough, by the data sheet of job.device; job.memory and job.per_machine stay"
_DECODER = (
    "model=hf_decoder trains published weights; model=moe_nano is a small mixture of experts, whose sizes are keys"
)

# An option of a group, or a value of a key: what does it now.
_OPTIONS = {
    "compile.mode=step": "write compile.mode=default, or reduce-overhead on GPUs",
    "strategy=diloco": "DiLoCo is the long example of docs/own-strategy.md, a file for your own folder",
    "loop.on_nonfinite=rollback": "write stop, and start from the last checkpoint; skip leaves the step out",
    "job=report": "status.json has the goodput, the last lines of a run the seconds of its start",
    "log=csv": "pandas reads metrics.jsonl: read_json('metrics.jsonl', lines=True, precise_float=True)",
    "hydra/sweeper=optuna": "15 lines around trainer.run do it (docs/sweeps.md)",
    "hydra/launcher=submitit_*": "a job array of Slurm does it (docs/clusters.md)",
    "model=deepseek": _DECODER,
    "model=deepseek_moe": _DECODER,
    "model=mixtral": _DECODER,
    "model.rotary_scaling.rope_type=yarn": "write llama3 or linear; model=hf_decoder trains networks that have YaRN",
    "experiment=cifar10_airbench": "write experiment=cifar10_resnet18",
    "model=airbench": "write model=resnet18",
    "task=classification_views": "write task=classification; an evaluation sees each image once, as it is",
    "optimizer=sgd_lookahead": "write optimizer=sgd, with ema.decay=0.999 for weights that are averaged",
    "data.augment.flip=alternate": "write data.augment.flip=true",
}

# A key: the values with which it changed nothing (...: all of them), and what to do instead of the others.
_KEYS: dict[str, tuple[Any, str]] = {
    "run.stop_when": ((None,), "four lines of shell that send SIGTERM do it (docs/clusters.md, spot machines)"),
    "loop.on_spike": (("warn",), "TensorBoard shows a loss that jumps; run.resume=CHECKPOINT goes back to before it"),
    "strategy.attention": (("auto", "gather"), "leave it out: context ranks gather keys and values, on the same curve"),
    "strategy.async_tp": ((False,), "leave it out: the curve is the same without"),
    "optimizer.whole_matrices": (
        (None,),
        "Muon gets whole matrices by itself; other optimizers that need them: strategy=ddp or zero1",
    ),
    "job.flops": ((None,), _ROUGH),
    "job.bandwidth": ((None,), _ROUGH),
    "job.inside": ((None,), _ROUGH),
    "job.between": ((None,), _ROUGH),
    "job.doctor": ((None,), _ROUGH),
    "job.layers": ((None,), "make the network smaller by keys of model, and prove that one"),
    "model.kv_rank": ((None,), _LATENT),
    "model.q_rank": ((None,), _LATENT),
    "model.plain_width": (..., _LATENT),
    "model.rotary_width": (..., _LATENT),
    "model.value_width": (..., _LATENT),
    "model.expert_groups": ((1,), "leave it out: all experts are one group"),
    "model.active_groups": ((1,), "leave it out: all experts are one group"),
    "model.capacity": (
        (None,),
        "leave it out: no token is dropped; model.bias_rate or model.auxiliary balances experts",
    ),
    "data.augment.border": (("black",), "leave it out: the border of a crop is black"),
    "model.blur": ((False,), "leave it out, or write the layer into a network of your own (docs/extending.md)"),
}

# A class that a `_target_` names and that is gone: the word above that chose it.
_CLASSES = {
    "trainer.strategies.diloco.DiLoCo": "strategy=diloco",
    "trainer.jobs.goodput_report.Report": "job=report",
    "trainer.records.metrics_files.CSV": "log=csv",
    "recipes.vision.airbench.airbench": "model=airbench",
    "recipes.vision.views.ViewedClassification": "task=classification_views",
    "recipes.vision.lookahead.LookaheadSGD": "optimizer=sgd_lookahead",
}

# A key or a class that has another name today.
_RENAMED: dict[str, str] = {}

_OURS = ("trainer.", "recipes.")  # a lab's strategy may have a key `attention` of its own
_OF_ANY_CLASS = ("optimizer.whole_matrices",)  # the framework's own key beside those of a class that may be anybody's


def removed_word(key: str, value: Any = None) -> str:
    """A line for a word that is no word any more: what to do instead. Empty where it never was one."""
    if key in _KEYS:
        return f"{key}: this key is gone; {_KEYS[key][1]}"
    if key in _RENAMED:
        return f"{key}: this key is called {_RENAMED[key]}"
    return removed_value(key, value)


def removed_value(key: str, value: Any) -> str:
    """The same for a key that is there, if only this value or option is gone: a lab may give an old key to its own."""
    word = f"{key}={value}"
    instead = next((instead for old, instead in _OPTIONS.items() if fnmatchcase(word, old)), "")
    return f"{word} is gone; {instead}" if instead else ""


def removed_class(name: str) -> str:
    """The line for a class that is gone or has another name; empty where there never was one of this name."""
    if name in _RENAMED:
        return f"{name} is called {_RENAMED[name]}"
    return removed_word(*_CLASSES[name].split("=")) if name in _CLASSES else ""


def in_todays_words(config: Mapping[str, Any]) -> tuple[dict[str, Any], dict[str, str]]:
    """The configuration of a run of an older version, and by its path a line for each of its words that is gone.

    What has another name today is called so; a key that is gone and changed nothing is left out.
    """
    lost: dict[str, str] = {}

    def translate(value: Any, path: str, ours: bool) -> Any:
        if isinstance(value, list):
            return [translate(item, f"{path}.{index}", ours) for index, item in enumerate(value)]
        if not isinstance(value, Mapping):
            if line := removed_class(str(value)) if path.endswith("_target_") else ours and removed_word(path, value):
                lost[path] = line
            return value
        ours = ours and str(value.get("_target_", _OURS[0])).startswith(_OURS)
        today = {}
        for name, item in value.items():
            key = f"{path}.{name}".lstrip(".")
            harmless, _ = _KEYS.get(key, ((), "")) if ours or key in _OF_ANY_CLASS else ((), "")
            if harmless is not ... and item not in harmless:
                item = _RENAMED.get(item, item) if name == "_target_" else item
                key = _RENAMED.get(key, key) if ours else key
                today[key.rpartition(".")[2] if key in _RENAMED.values() else name] = translate(item, key, ours)
        return today

    return translate(config, "", True), lost
