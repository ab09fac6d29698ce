"""A folder, or a name on the Hugging Face hub: which of both is meant."""

from __future__ import annotations

from pathlib import Path

from trainer.messages import Refusal, did_you_mean, expand_home


def located(name: str, key: str) -> str:
    """The folder of this name, else the name itself for the hub; Refusal where it can only be a folder, and is none.

    The hub has names of one part or two. Without a network it takes a minute to find that it knows none. key: of the
    configuration, with what stands behind it.
    """
    path = expand_home(name)
    if path.is_dir():
        return str(path)
    first, *rest = name.split("/")
    if name.startswith((".", "~")) or first == "" or len(rest) > 1 or (rest and Path(first).is_dir()):
        beside = [one.name for one in path.parent.iterdir() if one.is_dir()] if path.parent.is_dir() else []
        raise Refusal(f"{key}{name}: there is no folder {path.absolute()}{did_you_mean(path.name, beside)}")
    return name


def own_code(error: Exception) -> str:
    """Why transformers does not load what needs Python code that lies beside it; empty where that is not the reason."""
    asks = "trust_remote_code" in str(error)
    return "it needs code of its own, which is never run: a stranger may have written it" if asks else ""
