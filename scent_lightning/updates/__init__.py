"""The dual updates: how the dual variable ν of an anchor moves when a batch of its scores comes in.

Each is a small stateless object over the functions of :mod:`scent_lightning.functional`, in a file of its own. Subclass
:class:`DualUpdate` (or :class:`ScheduledUpdate`) to add your own; it is then selectable from the command line by its
import path.
"""

from scent_lightning.updates.asgd import ASGD
from scent_lightning.updates.base import DualUpdate
from scent_lightning.updates.bsgd import BSGD
from scent_lightning.updates.msvr import MSVR
from scent_lightning.updates.proximal_point import ProximalPoint
from scent_lightning.updates.scent import SCENT
from scent_lightning.updates.schedules import ScheduledUpdate
from scent_lightning.updates.softplus_asgd import SoftplusASGD
from scent_lightning.updates.sox import SOX
from scent_lightning.updates.step_size import StepSizeRule
from scent_lightning.updates.umax import UMax

__all__ = [
    "ASGD",
    "BSGD",
    "MSVR",
    "SCENT",
    "SOX",
    "DualUpdate",
    "ProximalPoint",
    "ScheduledUpdate",
    "SoftplusASGD",
    "StepSizeRule",
    "UMax",
]
