"""Owns the loading of Optuna, which is an extra, without what it says of itself."""

from __future__ import annotations

import importlib.util
import warnings
from types import ModuleType

from fasttrain.errors import MachineError


def require_optuna() -> ModuleType:
    """Optuna, its own log turned down; raises MachineError with the line that installs it."""
    if importlib.util.find_spec("optuna") is None:
        raise MachineError("`fasttrain search` needs Optuna, which is not installed: pip install 'fasttrain[search]'")
    import optuna

    optuna.logging.set_verbosity(optuna.logging.ERROR)
    warnings.filterwarnings("ignore", category=optuna.exceptions.ExperimentalWarning)
    # From Python 3.12 on Optuna's warnings name the code that called it
    warnings.filterwarnings("ignore", module=r"optuna|fasttrain\.studies\.search")
    return optuna
