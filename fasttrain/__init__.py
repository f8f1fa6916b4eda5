"""fasttrain: trains medical-image networks as fast as the card allows.

From Python: `from fasttrain import Limits, load_recipe, train, train_folds`. They are loaded on first use, so that importing the
package is free.
"""

from __future__ import annotations

from fasttrain.monai_import import name_the_user, spare_imports

# Before anything can import MONAI, in worker processes too
spare_imports()
name_the_user()

__version__ = "0.1.0"
__all__ = ["Limits", "load_recipe", "train", "train_folds"]

TYPE_CHECKING = False  # typing's own would take longer to load than all of this
if TYPE_CHECKING:
    from typing import Any

    from fasttrain.engine.folds import train_folds
    from fasttrain.engine.limits import Limits
    from fasttrain.engine.run import train
    from fasttrain.recipe import resolve as load_recipe


def __getattr__(name: str) -> Any:
    if name == "load_recipe":
        from fasttrain.recipe import resolve

        return resolve
    if name == "train":
        from fasttrain.engine.run import train

        return train
    if name == "train_folds":
        from fasttrain.engine.folds import train_folds

        return train_folds
    if name == "Limits":
        from fasttrain.engine.limits import Limits

        return Limits
    raise AttributeError(f"module 'fasttrain' has no attribute {name!r}")
