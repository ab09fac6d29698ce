"""What a run is trained and evaluated on, as its checkpoints say it, and whether it still is what it was."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from trainer.data.class_names import names_of, shown
from trainer.data.data import Data
from trainer.data.sample_order import size_of
from trainer.records.manifest import Found
from trainer.records.resume_rules import Change


def known_sets(data: Data, training: Any, length: int, evaluation: Any) -> dict[str, Any]:
    """For state.json: samples and fingerprint of both sets, and the names of their classes. length: of an epoch.

    No samples where there is no such set; no names where the classes have none.
    """
    none = {"samples": 0, "fingerprint": ""}
    return {
        "classes": names_of(data),
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


def class_changes(found: Found | None, now: Mapping[str, Any]) -> list[Change]:
    """How the names of the classes differ from those of a checkpoint; none where one of the two has no names."""
    old, new = known_classes(found.state if found else {}), now["classes"]
    return [Change("classes", shown(old), shown(new))] if old and new and old != new else []


def known_classes(state: Mapping[str, Any]) -> list[str]:
    """The names of the classes that a checkpoint was trained with, by its state.json; none where it has none."""
    return list(state.get("data", {}).get("classes", []))
