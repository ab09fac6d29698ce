"""config.yaml and environment.json, which a start leaves for the next one: their fields, as far as they are read."""

from __future__ import annotations

from typing import Annotated, NotRequired, TypedDict

from trainer.launch.typed_values import Finite, Text, Whole, mapping_of


class CheckpointKeys(TypedDict):
    """The keys below `checkpoint`."""

    best: NotRequired[Text | None]


class ConfigFields(TypedDict):
    """config.yaml, as far as it is read without its schema."""

    checkpoint: NotRequired[CheckpointKeys]


class AutoFields(TypedDict):
    """What a plan has decided for `strategy=auto` or `loop.micro_batch=auto`."""

    overrides: list[Text]
    reason: Text
    processes: Whole
    planned: Annotated[dict[str, float], mapping_of(Text, Finite)] | None
    seconds: Finite


class EnvironmentFields(TypedDict):
    """environment.json: what a run's `auto` came to."""

    auto: NotRequired[AutoFields | None]
    precision: NotRequired[Text]
    horizon: NotRequired[Whole]
    best: NotRequired[Text]
