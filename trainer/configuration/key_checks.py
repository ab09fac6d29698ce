"""What each word asks for: a group's option, a key's value, or nothing that exists; and what was probably meant."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from dataclasses import fields
from difflib import SequenceMatcher
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from hydra.core.override_parser.types import Override

from trainer.configuration.command_line import override_text
from trainer.configuration.interpolation import flatten, format_override, format_value
from trainer.configuration.key_types import epochs_hint
from trainer.configuration.removed_words import removed_word
from trainer.configuration.schema import GROUPS, SECTIONS, Settings
from trainer.launch.typed_values import convert, is_valid
from trainer.messages import Refusal, did_you_mean

DEFAULT_GROUPS = (*GROUPS, "experiment")  # in config.yaml's defaults: +experiment=x can only mean experiment=x
SINGLE_CHOICE = {*GROUPS} - {"log"}  # groups of which one option is chosen

# Our keys, and what they are called in Lightning, Accelerate, timm, Hugging Face's Trainer and scripts of many people.
# With a value: what is a key there is one value of a key here.
_OTHER_NAMES = {
    "loop.global_batch": "batch batch_size train_batch_size per_device_train_batch_size total_batch_size",
    "loop.eval_batch": "eval_batch_size val_batch_size test_batch_size per_device_eval_batch_size",
    "loop.micro_batches": "accumulate_grad_batches gradient_accumulation_steps grad_accum_steps accumulation_steps",
    "loop.epochs": "epoch num_epochs max_epochs n_epochs num_train_epochs",
    "loop.steps": "max_steps num_steps max_iters total_steps train_steps",
    "loop.max_norm": "gradient_clip_val max_grad_norm clip_grad clip_grad_norm grad_clip clip_norm",
    "loop.patience": "early_stopping early_stopping_patience",
    "loop.log_every": "log_every_n_steps logging_steps log_interval print_freq",
    "loop.eval_every": "val_check_interval check_val_every_n_epoch eval_steps eval_interval val_interval",
    "loop.save_every": "save_steps save_interval every_n_epochs checkpoint_interval",
    "checkpoint.keep": "save_top_k save_total_limit checkpoint_hist",
    "checkpoint.best": "monitor metric_for_best_model eval_metric",
    "run.resume": "ckpt_path resume_from resume_from_checkpoint",
    "run.dir": "output_dir save_dir log_dir logging_dir",
    "run.root": "default_root_dir project_dir output",
    "run.name": "experiment_name run_name exp_name",
    "loader.workers": "num_workers n_workers dataloader_num_workers",
    "optimizer.lr": "learning_rate base_lr max_lr",
    "optimizer.weight_decay": "wd",
    "optimizer": "opt optim optimizer_name",
    "schedule": "scheduler sched lr_scheduler lr_scheduler_type",
    "schedule.warmup": "warmup_steps warmup_epochs num_warmup_steps lr_warmup_steps",
    "model": "arch net network model_name",
    "task": "loss loss_fn criterion",
    "data": "dataset dataset_name",
    "data.root": "data_dir data_path dataset_path dataset_dir",
    "data.image_size": "img_size input_size resolution",
    "task.label_smoothing": "smoothing label_smoothing_factor",
    "ema.decay": "model_ema_decay ema_rate",
    "strategy.sync_bn": "sync_batchnorm",
    "strategy.activation_checkpointing": "gradient_checkpointing grad_checkpointing",
    "strategy.activation_offload": "activation_offloading enable_activation_offloading",
    "seed": "random_seed seed_everything manual_seed",
    "device": "accelerator",
    "compile": "torch_compile torchcompile",
    "precision": "mixed_precision dtype",
    "precision=fp16": "fp16 amp use_amp half",
    "precision=bf16": "bf16 amp use_amp bfloat16",
    "init_from=pretrained": "pretrained",
    "float8": "fp8 use_fp8 enable_float8",
    "processes": "devices gpus num_gpus n_gpus num_processes num_devices nproc nproc_per_node",
}


# What people write for an option that is not there: by group, and what works in its place.
_ALTERNATIVES = {
    "model": "model=torchvision model.name={0} and model=timm model.name={0} take any name that these packages know",
    "optimizer": "optimizer=torch optimizer._target_={0} works",
    "task": "a loss alone is no option: a Task says it (docs/extending.md), task=classification has cross entropy",
    "data": "a folder of images: data=imagefolder data.root={0}",
    "strategy": "for what DeepSpeed does there are strategy=zero1 (ZeRO-1) and strategy=fsdp (ZeRO-3)",
}


def _suggest_alternative(group: str, option: str, known: Iterable[str]) -> str:
    """What else there is, where no option has nearly this name."""
    # Lightning's name of this strategy
    if group == "strategy" and option.startswith("ddp_find_unused"):
        return "; write strategy=ddp strategy.find_unused_parameters=true."
    # the sentences fit only what looks like DeepSpeed's options, or like a path
    plain = group != "strategy" or "deepspeed" in option or "zero" in option
    paths = group != "data" or re.search(r"^[.~]|/", option)
    near = did_you_mean(option, known)
    if group == "optimizer" and not (option := _find_optimizer_class(option)):
        general = "optimizer=torch optimizer._target_=PACKAGE.NAME takes any class of torch.optim"
        return f"{near}; {general}; other packages need trust=[PACKAGE]."
    if group in _ALTERNATIVES and plain and paths:
        return f"{near if group != 'data' else ''}; {_ALTERNATIVES[group].format(option)}."
    return near or "."


def _find_optimizer_class(option: str) -> str:
    """The class of torch.optim or timm.optim with this name, in whatever letters; empty where they have none.

    Looked for in the text of their files: to import them takes seconds.
    """
    for package in ("torch", "timm"):
        spec = find_spec(package)
        for place in (spec.submodule_search_locations or ()) if spec else ():
            file = Path(place, "optim", "__init__.py")
            text = file.read_text(encoding="utf-8") if file.is_file() else ""
            for name in re.findall(r"\b[A-Z]\w+", text):
                if name.lower() == re.sub("[_-]", "", option.lower()):
                    return f"{package}.optim.{name}"
    return ""


def list_options(group: str, places: Iterable[Path]) -> list[str]:
    """The options of a group; none where there is no such group."""
    return sorted({file.stem for place in places for file in (place / group).glob("*.yaml")})


def split_overrides(
    overrides: list[Override], places: list[Path], problems: list[str]
) -> tuple[list[str], list[Override]]:
    """Words that choose a group's option, and words that change a key; appends what is wrong to the problems."""
    chosen, changes = [], []
    # experiment=null is the default, which Hydra does not take as a word: it takes back what was chosen before it
    nulls = [
        index
        for index, override in enumerate(overrides)
        if (override.key_or_group, override.value()) == ("experiment", None)
    ]
    in_force = [
        override
        for index, override in enumerate(overrides)
        if override.key_or_group != "experiment" or index > max(nulls, default=-1)
    ]
    for override in in_force:
        there_are = list_options(override.key_or_group, places)
        if re.match(r"hydra\b", override.key_or_group):
            hint = "files of a run go to run.dir; -m asks for several runs; --config-dir adds yaml files"
            gone = removed_word(override.key_or_group, override.value())
            problems.append(gone or f"{override_text(override)}: Hydra's own keys have no effect here; {hint}")
        elif not there_are or isinstance(override.value(), dict):
            changes.append(override)
        # A group may be taken away here; whether the framework can do without is seen once all is composed.
        elif not override.is_delete() and (wrong := _check_option(override, there_are, places)):
            problems.append(wrong)
        else:
            chosen.append(
                override_text(override).lstrip("+")
                if override.key_or_group in DEFAULT_GROUPS
                else override_text(override)
            )
    return chosen, changes


def _check_option(override: Override, known: list[str], places: list[Path]) -> str:
    """What is wrong with the choice of an option; empty: nothing."""
    group, value = override.key_or_group, override.value()
    listed = ", ".join(known[:30])
    if isinstance(value, list) and group in SINGLE_CHOICE:
        return f"{override_text(override)}: expected one of {listed}, not a list"
    for option in map(str, value if isinstance(value, list) else [value]):
        if option.removesuffix(".yaml") not in known:
            if gone := removed_word(group, option.removesuffix(".yaml")):
                return gone
            hint_on_dirs = "" if places[1:] else "; yaml files of your own: --config-dir FOLDER"
            hint = f"{_suggest_alternative(group, option, known)} There are: {listed}{hint_on_dirs}"
            unlisted = _find_unlisted_config_dir(f"{group}/{option}.yaml")
            return f"{group}={option}: there is no such option{unlisted or hint}"
    return ""


def _find_unlisted_config_dir(file: str) -> str:
    """The folder here that has this yaml file, and was not named."""
    # where labs have it, as a rule: beside us, or one folder below
    for folder in (Path("conf"), *sorted(Path().glob("*/conf"))):
        if (folder / file).is_file():
            return f", but there is {folder / file}; add --config-dir {folder}"
    return ""


def suggest_for_flag(flag: str, known: Iterable[str]) -> str:
    """What to write instead of a key that was written like a flag: --lr=3 means optimizer.lr=3."""
    key, _, value = flag.partition("=")
    words = suggest_overrides(key, value, known)
    hint = f"; write {' or '.join(words)}" if words else "; --help shows what there is"
    return f"--{key}: keys are written as KEY=VALUE, without dashes{hint}"


def suggest_overrides(key: str, value: str, known: Iterable[str]) -> list[str]:
    """The words that set a key with this name here, or with the nearest ones: `lr`, `0.1` → `optimizer.lr=0.1`."""
    right = [key] if key in [*known] else nearest_keys(key, known)
    return [path if re.search("[= ]", path) else f"{path}={value}" for path in right]


def check_override_key(override: Override, known: Mapping[str, Any], places: list[Path]) -> list[str]:
    """What is wrong with the key of a word, given everything in the composed configuration by its path."""
    path = re.sub(r"\[['\"]?([^]'\"]*)['\"]?\]", r".\1", override.key_or_group)  # optimizer[betas][0]
    # What the word says about itself: ++ takes anything, + wants a new key, ~ one that is there.
    if override.is_force_add() or (override.is_add() and path not in known):
        return []
    if path not in known and (gone := removed_word(path, override.value())):
        return [gone]
    if override.is_add() and not isinstance(override.value(), dict | list):
        return [f"{override_text(override)}: {path} exists already; leave out the +"]
    if override.is_delete() and path in known and path.split(".")[0] not in GROUPS:
        return [f"{override_text(override)}: the framework needs this key; it cannot be removed"]
    # A dict changes several keys at once, loop={epochs:3,steps:4}: each of them must be there. In the place of null it
    # is one value, which only the target can judge.
    value = override.value()
    several = isinstance(value, dict) and not override.is_add() and known.get(path, value) is not None
    nested_values = flatten(value, f"{path}.") if several else {}
    problems = [
        unknown_key_message(key, known, nested_values.get(key, value))
        for key in (path, *nested_values)
        if key not in known
    ]
    if path in known:
        return problems

    # strategy.tensor=2 with strategy=auto: another option of the group has the key, so no other group's was meant
    above, _, name = path.rpartition(".")
    options_with_key = (
        [option for option in list_options(above, places) if _option_has_key(above, option, name, places)]
        if above
        else []
    )
    if options_with_key:
        problems[0] = unknown_key_message(path, [key for key in known if key.startswith(f"{above}.")], value)
        problems[0] += f" It is a key of {above}={' or '.join(options_with_key[:4])}."
    # How to give a target a key that its yaml does not show; whether it takes it, its signature says later.
    # Not where it is one of the yaml's own keys misspelt; a word that two names share is no misspelling.
    own = [key.rpartition(".")[2] for key in nearest_keys(path, known) if key.rpartition(".")[0] == above]
    is_misspelt = any(_similarity(name, key) >= 0.8 for key in own)
    if not override.is_delete() and not is_misspelt and (target := known.get(f"{above}._target_")):
        problems[0] += f" If {str(target).rpartition('.')[2]} has a parameter {name}, write +{override_text(override)}"
    return problems


def _option_has_key(group: str, option: str, key: str, places: list[Path]) -> bool:
    files = [file for place in places if (file := place / group / f"{option}.yaml").is_file()]
    return any(re.search(rf"^{re.escape(key)}:", file.read_text(encoding="utf-8"), re.MULTILINE) for file in files)


def unknown_key_message(path: str, known: Iterable[str], value: Any = None) -> str:
    """Say that nothing is called so, and what comes nearest; processes with the number that was given, -1 for all."""
    if gone := removed_word(path, value):
        return gone
    if path.endswith("min_delta"):  # of early stopping elsewhere
        what = "loop.patience counts any improvement as one; Task.finish can round the metric of checkpoint.best"
        return f"{path}: there is no such key; {what} (docs/learning.md, Early stopping)"
    near = nearest_keys(path, known)
    if near == ["processes"] and isinstance(value, int | str):
        near = [f"processes={value if str(value).isdecimal() and int(value) else 'auto'}"]
    return f"{path}: there is no such key or group" + (f"; did you mean {' or '.join(near)}?" if near else ".")


def nearest_keys(path: str, known: Iterable[str]) -> list[str]:
    """What other programs call so; else up to three paths of nearly this name, or last part, the nearest first."""
    above, _, last = path.rpartition(".")
    # first whoever comes from another program: its name says more than likeness of letters
    elsewhere = [ours for ours, theirs in _OTHER_NAMES.items() if last in theirs.split()]
    if known_elsewhere := [ours for ours in elsewhere if ours in known or re.search("[= ]", ours)]:
        return known_elsewhere

    def likeness(other: str) -> float:
        beside, _, end = other.rpartition(".")
        shared = 0.61 if set(last.split("_")) & set(end.split("_")) else 0.0  # batch_size, global_batch
        whole = _similarity(path, other) if above != beside else 0.0  # what both begin with says nothing
        return max(whole, 0.95 * _similarity(last, end), shared)

    # No special keys (_target_), no items of lists; of the rest those that are nearly as near as the nearest.
    named = [key for key in known if not re.search(r"\._|\.\d+$", key) and not f"{path}.".startswith(f"{key}.")]
    scored = {other: likeness(other) for other in named}
    best = sorted((other for other in scored if scored[other] > 0.6), key=scored.__getitem__, reverse=True)
    near = [other for other in best if scored[other] > scored[best[0]] - 0.1]
    return ([other for other in near if above and other.startswith(f"{above}.")] or near)[:3]


def _similarity(word: str, other: str) -> float:
    # the quick bound first: there are hundreds of keys
    matcher = SequenceMatcher(None, word, other, autojunk=False)
    return matcher.ratio() if matcher.real_quick_ratio() > 0.6 else 0.0


def find_unread_keys(values: Mapping[str, Any], written: Mapping[str, Any], known: Iterable[str]) -> dict[str, str]:
    """By its path a line for each key that nothing reads. Keys of groups are their targets' business.

    A key that an interpolation refers to is read by that: a lab may write a number once and use it twice.
    """
    # ${size} or ${data.size}: the first part is the key that something reads
    inside = " ".join(re.findall(r"\$\{[^}]*\}?", str(list(written.values()))))
    referred = {path.split(".")[0].strip("$") for path in re.findall(r"[$.\w]+", inside)}
    known_keys = {f"{name}.{field.name}" for name, section in SECTIONS.items() for field in fields(section)}
    known_keys |= {field.name for field in fields(Settings)} | set(GROUPS)
    wrong = {}
    for path in (path for path in values if path not in known_keys):
        above, _, _ = path.rpartition(".")
        if path == "experiment":  # Hydra puts a file's keys below its group, unless the file says otherwise
            wrong[path] = "experiment: the first line of an experiment's file must be: # @package _global_"
        elif above in SECTIONS or (not above and path not in referred):
            wrong[path] = unknown_key_message(path, known)
    return wrong


def find_type_errors(
    values: Mapping[str, Any], composed_values: Mapping[str, Any], written: Mapping[str, Any]
) -> dict[str, str]:
    """By its path a line for each value of another kind than the one which its group's yaml gives this key.

    Of keys of the framework's classes and torch's optimizers, which take one kind each: so a typo is answered before
    torch is imported. What others take their signatures say (`bind_arguments`): a key may be a number or a word.
    """
    wrong = {}
    for path, value in values.items():
        above, _, last = path.rpartition(".")
        wanted = composed_values.get(path)
        # null says nothing about the type, the target's signature does; and another target has other keys
        same_target = composed_values.get(f"{above}._target_") == values.get(f"{above}._target_")
        ours = str(values.get(f"{above}._target_")).startswith(("trainer.", "recipes.", "torch.optim."))
        in_group = path.split(".")[0] in GROUPS and not last.isdecimal()
        in_group &= path != "schedule.warmup"  # steps, or epochs (5ep)
        if value == wanted or value is None or wanted is None or not (in_group and same_target and ours):
            continue
        of_numbers = isinstance(wanted, list) and wanted and all(is_valid(item, float) for item in wanted)
        # a number like a number: whether it must be whole, the signature says
        kind: Any = list[float] if of_numbers else {int: float}.get(type(wanted), type(wanted))
        try:
            convert(value, kind)
        except Refusal as expected:
            like = f", like {format_value(wanted) if wanted else f'[{value}]'}" if isinstance(wanted, list) else ""
            wrong[path] = f"{format_override(written, path)}: expected {expected}{like}{epochs_hint(value)}"
    return wrong
