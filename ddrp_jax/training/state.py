"""What a training run carries from step to step."""

from __future__ import annotations

import dataclasses
from typing import Any

import jax


@jax.tree_util.register_dataclass
@dataclasses.dataclass
class TrainState:
    """Parameters, optimiser moments and the step; or the shapes or shardings of all of them.

    Attributes:
        step: updates done since the run began, over all stages; an int32 scalar.
        params: nested plain dicts of float32 arrays.
        opt_state: optax state.
        healthy: a bool scalar, False after a step whose loss or gradient was not finite; the state
            that such a step began from is kept, and no later step changes it.
    """

    step: Any
    params: Any
    opt_state: Any
    healthy: Any
