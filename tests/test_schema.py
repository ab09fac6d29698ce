"""Framework keys: what each takes, what is said about the rest, and how cadences and times are written."""

from dataclasses import asdict
from typing import Any

import pytest
from omegaconf import DictConfig, OmegaConf

from tests.run import ROOT
from trainer import Refusal
from trainer.configuration.schema import GROUPS, SECTIONS, Settings, parse_settings

CONFIG = ROOT / "conf" / "config.yaml"


def configuration(**changes: Any) -> DictConfig:
    """The product's own config.yaml without its groups, with some keys changed: `loop__epochs=3`."""
    cfg = OmegaConf.load(CONFIG)
    assert isinstance(cfg, DictConfig)
    for name in ("defaults", "hydra"):
        del cfg[name]
    cfg.job = {"_target_": "trainer.jobs.fit.Fit"}
    for key, value in changes.items():
        OmegaConf.update(cfg, key.replace("__", "."), value, force_add=True)
    return cfg


def rhythm(intervals: Any) -> list[tuple[str, float]]:
    """What each of them counts, and how many."""
    return [(name, value) for one in intervals for name, value in asdict(one).items() if value]


def test_the_defaults_are_what_the_contract_says() -> None:
    found = parse_settings(configuration())
    assert (found.seed, found.device, found.precision, found.compile.mode) == (0, "auto", "auto", None)
    assert (found.loop.epochs, found.loop.steps, found.loop.global_batch) == (10, None, 128)  # neither given: 10 epochs
    assert rhythm(found.loop.log_every) == [("steps", 10)]
    assert rhythm(found.loop.save_every) == [("epochs", 1), ("seconds", 900.0)]
    assert (found.run.root, found.run.name, found.run.dir, found.run.resume) == ("runs", None, None, "auto")
    assert (found.checkpoint.keep, found.checkpoint.best, found.trust) == (3, None, ())


def test_steps_alone_leave_epochs_open() -> None:
    found = parse_settings(configuration(loop__steps=5))
    assert (found.loop.epochs, found.loop.steps) == (None, 5)


def test_every_key_of_config_yaml_is_read_and_every_reader_has_a_key() -> None:
    cfg = configuration()
    assert set(cfg) <= set(SECTIONS) | set(GROUPS) | set(Settings.__dataclass_fields__)
    for name, section in SECTIONS.items():
        assert list(cfg[name]) == list(section.__dataclass_fields__), name


@pytest.mark.parametrize(
    ("written", "expected"),
    [
        (500, [("steps", 500)]),
        ("1ep", [("epochs", 1)]),
        ("15min", [("seconds", 900.0)]),
        ("90s", [("seconds", 90.0)]),
        ("1.5h", [("seconds", 5400.0)]),
        (["2ep", "10min", 7], [("epochs", 2), ("seconds", 600.0), ("steps", 7)]),
        (None, []),
    ],
)
def test_a_rhythm_is_steps_epochs_time_or_a_list(written: Any, expected: list[tuple[str, float]]) -> None:
    assert rhythm(parse_settings(configuration(loop__log_every=written)).loop.log_every) == expected


@pytest.mark.parametrize("written", [0, -1, 1.5, True, "soon", "0ep", "1.5ep", "15 min", "ep", "", [0], [["1ep"]], {}])
def test_what_is_no_rhythm_is_said(written: Any) -> None:
    with pytest.raises(Refusal, match="1ep"):
        parse_settings(configuration(loop__log_every=written))


@pytest.mark.parametrize(
    ("written", "expected"), [(5, 5.0), ("90s", 90.0), ("01:30:00", 5400.0), ("0:00:07", 7.0), ("1d", 86400.0)]
)
def test_a_time_is_seconds_or_written_out(written: Any, expected: float) -> None:
    assert parse_settings(configuration(run__stop_after=written)).run.stop_after == expected


@pytest.mark.parametrize("written", [0, -5, "later", "1:90:00", "30", True, [1], float("inf"), float("nan")])
def test_what_is_no_time_is_said(written: Any) -> None:
    with pytest.raises(Refusal, match="HH:MM:SS"):
        parse_settings(configuration(run__stop_after=written))


def test_scalars_are_taken_at_their_word() -> None:
    assert parse_settings(configuration(run__name=2024, loop__steps=1e4)).run.name == "2024"
    assert repr(parse_settings(configuration(loop__steps=1e4)).loop.steps) == "10000"
    assert parse_settings(configuration(trust=["monai"])).trust == ("monai",)
    assert parse_settings(configuration(compile=True)).compile.mode == "default"
    assert parse_settings(configuration(compile=False)).compile.mode is None
    for key, wrong in (
        ("compile__fullgraph", 1),
        ("run__name", True),
        ("run__root", ""),
        ("seed", 2**63),
        ("trust", ["a b"]),
    ):
        with pytest.raises(Refusal, match="expected"):
            parse_settings(configuration(**{key: wrong}))
