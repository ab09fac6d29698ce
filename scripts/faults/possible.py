"""Which faults can strike a run, and why others cannot."""

from __future__ import annotations

from omegaconf import DictConfig

COPIES = ("ddp", "zero1", "hsdp", "ddp_tp", "ddp_pp")  # strategies whose ranks keep copies of the same weights


def impossible(cfg: DictConfig, processes: int, strategy: str, workers: bool, can_fill: bool) -> dict[str, str]:
    """Kind → why it cannot strike this run. strategy: by its resolved name; workers: does the run have data workers?"""
    alone = "" if processes > 1 else "only one process"
    unsaved = "" if cfg.loop.save_every is not None else "loop.save_every=null"
    policy = cfg.loop.get("on_nonfinite", "stop")
    asked = {
        "kill_launcher": alone,
        "stop": alone and f"{alone}: nobody waits for it",
        "kill_worker": "" if workers else "no data workers: they need loader.workers and a set that is read by items",
        "flip": unsaved,
        "truncate": unsaved,
        "full_disk": "" if can_fill else "no disk of its own: only root may mount one",
        "nan": "" if policy == "stop" else f"loop.on_nonfinite={policy} changes the curve on purpose",
        "drift": alone or ("" if strategy in COPIES else f"{strategy}: no rank has a copy to compare with"),
    }
    return {kind: why for kind, why in asked.items() if why}
