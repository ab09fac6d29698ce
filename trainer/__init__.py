"""A training framework: one loop, one learning curve, any parallel strategy."""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from trainer.api import Result as Result
    from trainer.api import run as run
    from trainer.data.data import Data as Data
    from trainer.data.data import Preparation as Preparation
    from trainer.jobs.run_parts import Job as Job
    from trainer.learning.parallel_plan import Plan as Plan
    from trainer.learning.schedule import Schedule as Schedule
    from trainer.learning.task import Task as Task
    from trainer.loop.trainer import Trainer as Trainer
    from trainer.messages import BadData as BadData
    from trainer.messages import Refusal as Refusal
    from trainer.parallel.batch_gather import gather as gather
    from trainer.parallel.context_parallel import GatheredKeys as GatheredKeys
    from trainer.parallel.context_parallel import ShiftedPlaces as ShiftedPlaces
    from trainer.parallel.context_parallel import WholeSequences as WholeSequences
    from trainer.records.sinks import Sink as Sink
    from trainer.strategies.base import Strategy as Strategy
    from trainer.strategies.multi_process import Joined as Joined
    from trainer.strategies.parallel_model import ParallelModel as ParallelModel

__version__ = "0.1.0"

# Where each public name lives. They are imported when they are first asked for, so that the command line can refuse a
# typo before it has paid for importing torch.
_HOMES = {
    "BadData": "trainer.messages",
    "Data": "trainer.data.data",
    "GatheredKeys": "trainer.parallel.context_parallel",
    "Job": "trainer.jobs.run_parts",
    "Joined": "trainer.strategies.multi_process",
    "ParallelModel": "trainer.strategies.parallel_model",
    "Plan": "trainer.learning.parallel_plan",
    "Preparation": "trainer.data.data",
    "Refusal": "trainer.messages",
    "Result": "trainer.api",
    "Schedule": "trainer.learning.schedule",
    "ShiftedPlaces": "trainer.parallel.context_parallel",
    "Sink": "trainer.records.sinks",
    "Strategy": "trainer.strategies.base",
    "Task": "trainer.learning.task",
    "Trainer": "trainer.loop.trainer",
    "WholeSequences": "trainer.parallel.context_parallel",
    "gather": "trainer.parallel.batch_gather",
    "run": "trainer.api",
}
__all__ = [
    "BadData",
    "Data",
    "GatheredKeys",
    "Job",
    "Joined",
    "ParallelModel",
    "Plan",
    "Preparation",
    "Refusal",
    "Result",
    "Schedule",
    "ShiftedPlaces",
    "Sink",
    "Strategy",
    "Task",
    "Trainer",
    "WholeSequences",
    "gather",
    "run",
]


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module 'trainer' has no attribute {name!r}")
    return getattr(import_module(_HOMES[name]), name)
