"""What a training run carries from step to step."""

from __future__ import annotations

import dataclasses
from typing import Any

import jax
from jaxtyping import Array, Bool, Int32


@jax.tree_util.register_dataclass
@dataclasses.dataclass
class TrainState:
    """Parameters, optimiser moments and the step.

    Attributes:
        step: updates done since the run began, over all stages.
        params: nested plain dicts of float32 arrays.
        opt_state: optax state.
        healthy: False after a step whose loss or gradient was not finite; the state that such a
            step began from is kept, and no later step changes it.
    """

    step: Int32[Array, ""]
    params: Any
    opt_state: Any
    healthy: Bool[Array, ""]
