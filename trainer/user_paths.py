"""Paths as people write them: ~ is a home folder."""

from pathlib import Path

from trainer.refusal import Refusal


def at_home(written: str | Path) -> Path:
    """The path, with ~ as the home folder that it means; Refusal where this machine has no such folder."""
    try:
        return Path(written).expanduser()
    except RuntimeError:
        user = Path(written).parts[0]
        raise Refusal(f"{written}: this machine knows no home folder {user}; write the whole path") from None
