"""`model.settings=FOLDER`: a network's sizes from that folder's config.json, put in place of those of its yaml."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from omegaconf import DictConfig, OmegaConf

from trainer.configuration.import_allowlist import Names, real_name
from trainer.launch.file_validation import CONFIG, read_yaml
from trainer.refusal import Refusal
from trainer.user_paths import at_home


def with_sizes(cfg: DictConfig, words: Sequence[str], names: Names, run: Path | None) -> DictConfig:
    """The configuration with the sizes in it, and without the folder's name: a resume needs no such folder.

    words: of the command line, whose own keys count more; run: the run's folder, for a resume after the other is gone.
    """
    asked = cfg.model.get("settings")
    if asked is None:
        return cfg
    target: Any = names.find(cfg.model.get("_target_"), "model._target_")
    read, folder = getattr(target, "settings_of", None), at_home(str(asked))
    if not callable(read):
        raise Refusal(
            f"model.settings={asked}: {real_name(target)} reads no config.json (it has no settings_of(folder,"
            " vocab_size)); model=gpt2 and model=llama do, and model=hf_classifier model.path=FOLDER"
        )
    stored = None if run is None else run / "config.yaml"
    if not folder.is_dir() and stored is not None and stored.is_file():
        sizes = {key: value for key, value in read_yaml(stored, CONFIG)["model"].items() if not key.startswith("_")}
    else:
        sizes = read(folder, OmegaConf.select(cfg, "model.vocab_size"))
    own = {word.lstrip("+~").partition("=")[0].removeprefix("model.") for word in words if "model." in word}
    sizes = {key: value for key, value in sizes.items() if key not in own}
    return OmegaConf.merge(cfg, {"model": {**sizes, "settings": None}})  # type: ignore[return-value]
