"""A policy loss of the user's own: a function named in the recipe.

With `algorithm: {kind: custom, function: module:function, options: {...}}` the function has the signature of every
surrogate of `objectives`, all of which can be named too:

    def loss(logp_BT, old_logp_BT, advantage_BT, mask_BT, **options) -> float32 [B, T]

It runs inside jit and returns the loss of each token, to be minimised, before weighting. Mask, reduction and what
`algorithm` adds (KL, entropy, correction) are applied to the result. Inputs under the mask may hold anything: clean
them (`objectives.reductions.live`) before an exp or a product. π_old and the advantage are constants only if the
function says so. If it names the keywords `sequence_BT` and `num_sequences` it gets each token's sequence inside its
row, as `objectives.reductions` takes them. Instead of an array it may return a `Surrogate`: its statistics become
metrics `actor/NAME`.
"""

from __future__ import annotations

import importlib
import inspect
from collections.abc import Callable, Mapping
from typing import Any

import jax

from jaxrl_post.objectives.surrogates import Surrogate, log_ratio, surrogate

SEQUENCES = ("sequence_BT", "num_sequences")


def load_loss(path: str, options: Mapping[str, Any]) -> tuple[Callable[..., Surrogate], bool]:
    """The function at `module:function`, returning a Surrogate, and whether it takes the keywords for sequences.

    Raises: ValueError saying which part is wrong: the module, the name, or a signature that `options` do not fit.
    """
    function = _imported(path)
    signature = inspect.signature(function)
    sequences = dict.fromkeys(SEQUENCES) if set(SEQUENCES) <= signature.parameters.keys() else {}
    try:
        signature.bind(None, None, None, None, **sequences, **options)
    except TypeError as error:
        raise ValueError(
            f"algorithm.function={path!r} must take (logp, old_logp, advantage, mask) and algorithm.options="
            f"{dict(options)}, but has {signature}: {error}"
        ) from error
    return _as_surrogate(function), bool(sequences)


def _as_surrogate(function: Callable[..., Any]) -> Callable[..., Surrogate]:
    def cleaned(
        logp_BT: jax.Array, old_logp_BT: jax.Array, advantage_BT: jax.Array, mask_BT: jax.Array, **options: Any
    ) -> Surrogate:
        made = function(logp_BT, old_logp_BT, advantage_BT, mask_BT, **options)
        if isinstance(made, Surrogate):
            return surrogate(made.term_BT, mask_BT, **made.stats)
        return surrogate(made, mask_BT, kl_to_old=-log_ratio(logp_BT, old_logp_BT, mask_BT))

    return cleaned


def _imported(path: str) -> Callable[..., Any]:
    module_name, _, name = path.partition(":")
    key = f"algorithm.function={path!r}"
    try:
        module = importlib.import_module(module_name)
    except Exception as error:  # the module's own code runs here, and may raise anything
        raise ValueError(
            f"{key}: importing module {module_name!r} failed: {type(error).__name__}: {error}. "
            "It must be importable from the folder the run is started in"
        ) from error
    functions = {name: value for name, value in vars(module).items() if inspect.isfunction(value)}
    if name not in functions:
        known = ", ".join(sorted(functions)) or "none"
        raise ValueError(f"{key}: module {module_name!r} has no function {name!r}; its functions are: {known}")
    return functions[name]
