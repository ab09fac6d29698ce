"""What a run is trained and evaluated on, as its checkpoints say it, and whether it still is what it was."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from trainer.data.data import Data
from trainer.data.order import size_of
from trainer.records.manifest import Found
from trainer.records.resume import Change


def known_sets(data: Data, training: Any, length: int, evaluation: Any) -> dict[str, Any]:
    """For state.json: samples and fingerprint of both sets; no samples where there is none. length: of an epoch."""
    none = {"samples": 0, "fingerprint": ""}
    return {
        "training": {"samples": length, "fingerprint": data.fingerprint(training)},
        "evaluation": none if evaluation is None else _known(data, evaluation),
    }


def _known(data: Data, dataset: Any) -> dict[str, Any]:
    return {"samples": size_of(dataset), "fingerprint": data.fingerprint(dataset)}


def set_changes(found: Found | None, now: Mapping[str, Any], part: str) -> list[Change]:
    """How the set of this part (training, evaluation) differs from that of a checkpoint, in one change or none.

    None where the checkpoint says nothing about it (an older version wrote it), or where there are as many samples
    and one of the two has no fingerprint.
    """
    if found is None or "data" not in found.state:
        return []
    old, new = found.state["data"][part], now[part]
    if old["samples"] != new["samples"]:
        return [Change(f"samples of the {part} set", f"{old['samples']:,}", f"{new['samples']:,}")]
    if old["fingerprint"] and new["fingerprint"] and old["fingerprint"] != new["fingerprint"]:
        return [Change(f"the {part} set", f"{old['samples']:,} samples", "as many, but other samples")]
    return []
