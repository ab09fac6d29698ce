"""What a run would go on from, and whether its data are still the same: before anything is written.

Manifests and headers tell, so that nothing has to be verified or read for it yet.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

from torch import Tensor, nn

from trainer.configuration.schema import Settings
from trainer.data.class_names import format_class_names, read_class_names
from trainer.data.data import Data
from trainer.data.sampler import dataset_size
from trainer.jobs.batch_sizes import Length
from trainer.messages import Refusal
from trainer.parallel.optimizer_state import network_differences
from trainer.records.checkpoint.manifest import TO_RESUME, CorruptCheckpoint, Found, check_sizes, read_manifest
from trainer.records.checkpoint.store import candidates, look_into
from trainer.records.resume_rules import Change, changes, is_checkpoint, read_config
from trainer.records.run_folder import RunFolder


def known_sets(data: Data, training: Any, length: int, evaluation: Any) -> dict[str, Any]:
    """For state.json: samples and fingerprint of both sets, and the names of their classes. length: of an epoch.

    No samples where there is no such set; no names where the classes have none.
    """
    none = {"samples": 0, "fingerprint": ""}
    return {
        "classes": read_class_names(data),
        "training": {"samples": length, "fingerprint": data.fingerprint(training)},
        "evaluation": none if evaluation is None else _known(data, evaluation),
    }


def _known(data: Data, dataset: Any) -> dict[str, Any]:
    return {"samples": dataset_size(dataset), "fingerprint": data.fingerprint(dataset)}


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
    return [Change("classes", format_class_names(old), format_class_names(new))] if old and new and old != new else []


def known_classes(state: Mapping[str, Any]) -> list[str]:
    """The names of the classes that a checkpoint was trained with, by its state.json; none where it has none."""
    return list(state.get("data", {}).get("classes", []))


_MOST = 6  # lines of a kind in a refusal


def glance(path: Path) -> Found | None:
    """The checkpoint of this path, or the newest of a run folder, unverified; None where its headers are damaged.

    Whoever reads it later verifies it, and says then what is wrong with it.
    """
    # of a checkpoint that was named only itself; of a run the next, where the newest is damaged
    for folder in [path] if is_checkpoint(path) else candidates(path / "checkpoints"):
        with suppress(CorruptCheckpoint):
            manifest = read_manifest(folder)
            check_sizes(manifest)
            return look_into(manifest, TO_RESUME)
    return None


def configuration_of(folder: RunFolder, found: Found | None) -> dict[str, Any] | None:
    """What the run was configured with: by its config.yaml, or where that is damaged by its checkpoint."""
    said = folder.last("config.yaml")
    return said if said is not None or found is None else found.state.get("configuration")


def stale(found: Found | None) -> int:
    """How many evaluations since the best one, up to this checkpoint."""
    return found.state["progress"].get("stale", 0) if found else 0


def refuse_start(
    path: Path, network: nn.Module, configuration: str, length: Length, settings: Settings, sets: Mapping[str, Any]
) -> None:
    """Refuse a `run.resume=PATH` from which nothing could be trained: of another network, or at the end already.

    Refuse also one that was trained on other data than these sets, unless changes are accepted.
    """
    found, word = glance(path), f"run.resume={path}"
    if found is None:
        return
    what = f"{word}: the checkpoint of step {found.step:,}"
    _refuse_network(what, found, network, configuration, f"leave {word} out")
    if found.step >= length.steps:
        # the keys that bound this run, so long that as much is trained as was asked for
        steps = found.step + length.steps
        loop = settings.loop
        keys = [f"loop.steps={steps}"] if loop.steps is not None else []
        keys += [f"loop.epochs={-(-steps // length.per_epoch)}"] if loop.epochs is not None else []
        raise Refusal(
            f"{word}: that checkpoint is of step {found.step:,} and this run ends at step {length.steps:,}, so nothing "
            f"is left to train. The steps of the checkpoint count; {' '.join(keys)} trains {length.steps:,} more"
        )
    changed = [*class_changes(found, sets), *set_changes(found, sets, "training")]
    if changed and not settings.run.accept_changes:
        raise Refusal(
            f"{what} was trained on other data:{_listed(changed)}\nadd run.accept_changes=true to go on with the new "
            f"data, take the old data back, or leave {word} out"
        )


def refuse_own(folder: Path, found: Found | None, network: nn.Module, configuration: str) -> None:
    """Refuse to go on in a run folder whose newest checkpoint is of another network; no key could make that fit."""
    out = "start over with run.resume=fresh or another run.name"
    if found is not None:
        _refuse_network(f"{folder}: the checkpoint of step {found.step:,}", found, network, configuration, out)


def _refuse_network(what: str, found: Found, network: nn.Module, configuration: str, out: str) -> None:
    own = {name: value.shape for name, value in network.state_dict().items() if isinstance(value, Tensor)}
    wrong = network_differences(own, found.tensors)
    if not wrong:
        return
    # why it is another one: keys of the model that differ, or else its code
    changed = changes(found.state.get("configuration", {}), read_config(configuration))
    changed = [one for one in changed if one.key.startswith("model")]
    why = f"changed since then:{_listed(changed)}\n" if changed else "No key of model changed since: its code did.\n"
    back = "take the old values back" if changed else "take the old code"
    raise Refusal(
        f"{what} is of another network than this command's:{_listed(wrong)}\n{why}"
        f"No key can make these weights fit: {back}, or {out}"
    )


def _listed(lines: Sequence[str | Change]) -> str:
    more = f"\n  … and {len(lines) - _MOST} more" if len(lines) > _MOST else ""
    return "".join(f"\n  {line}" for line in lines[:_MOST]) + more
