"""Which experts tokens visit: recorded in one forward, forced in another, so that both use the same (keep routing);
counted for the selection bias, and judged by the balance loss.

Recorded routes hold the choice only. The weights of the chosen experts come from the live scores, so that a router
learns under replay too. Not here: the choice itself (moe.py), where routes are kept between (rollout/wal.py,
rl/batch.py). The multi-token-prediction module takes no part.

Letters: L layers, K experts per token, E experts.
"""

import math
from collections.abc import Callable, Sequence
from functools import partial

import torch
from torch import Tensor

from rollforward.model.balance import sequence_balance_loss
from rollforward.model.config import ModelConfig
from rollforward.model.errors import ModelInputError
from rollforward.model.moe import Router


class Routing:
    """Routes of one call of ``Transformer.streams``: replays given ones, and holds those that were taken.

    Example: routing = Routing(config); transformer.streams(..., routing=routing); routing.taken_TLK(). To replay them:
    Routing(config, replay_TLK=...).
    """

    def __init__(
        self,
        config: ModelConfig,
        *,
        replay_TLK: Tensor | None = None,
        sequence_lengths: Sequence[int] | None = None,
        sequence_weights: Sequence[float] | None = None,
    ) -> None:
        """Start with nothing taken.

        Args:
            config: the model.
            replay_TLK: [T, L, K] int16 or int64, a row for every token of the batch: experts in slot order, hash
                layers included, distinct in a row. A token whose row of a layer holds -1 chooses live there. None:
                all choose live.
            sequence_lengths: tokens of the batch's sequences, for the balance loss; None collects none.
            sequence_weights: what each sequence counts in the balance loss, finite; given with the lengths.

        Raises:
            ModelInputError: routes of another shape, or an expert that the model does not have; lengths and weights
                that do not belong together.
        """
        self._config = config
        self._replay_TLK = replay_TLK
        self._num_routers = 0
        self._taken: list[Tensor] = []
        self._balance: list[Tensor] = []
        self._balance_of = _balance_function(config, sequence_lengths, sequence_weights)
        if replay_TLK is None:
            return
        expected = (config.num_hidden_layers, config.num_experts_per_tok)
        if replay_TLK.dim() != 3 or replay_TLK.shape[1:] != expected:
            raise ModelInputError(
                f"routes have shape {list(replay_TLK.shape)}; the model has [T, {expected[0]}, {expected[1]}] (tokens,"
                " layers, experts per token). Replay only what the same model recorded"
            )
        if replay_TLK.numel() and int(replay_TLK.max()) >= config.n_routed_experts:
            raise ModelInputError(
                f"routes name expert {int(replay_TLK.max())}; the model has n_routed_experts ="
                f" {config.n_routed_experts}. Replay only what the same model recorded"
            )

    def router(self, layer: int) -> Router:
        """Return the router of a layer; layers come in order, each once.

        What it visits at its first call is recorded here. Later calls visit the same and record nothing: activation
        recompute runs a layer twice. A call raises ``ModelInputError`` where the routes or the sequences are of
        another number of tokens.
        """
        assert layer == self._num_routers, "a Routing serves one forward"
        self._num_routers += 1
        recorded_TK = None if self._replay_TLK is None else self._replay_TLK[:, layer]
        has_choice = layer >= self._config.num_hash_layers
        return _LayerRouter(self, recorded_TK, self._balance_of if has_choice else None)

    def record(self, taken_TK: Tensor, balance: Tensor | None) -> None:
        """Hold what a layer visited, int16 [T, K], and its part of the balance loss; a layer's router calls it."""
        self._taken.append(taken_TK)
        if balance is not None:
            self._balance.append(balance)

    def taken_TLK(self) -> Tensor:
        """Return what every token visited, int16 [T, L, K]; after the forward."""
        return torch.stack(self._taken, 1)

    def load_LE(self) -> Tensor:
        """Return how many tokens visited each expert, int64 [L, E], hash layers too; after the forward."""
        size = self._config.n_routed_experts
        return torch.stack([torch.bincount(taken_TK.flatten(), minlength=size) for taken_TK in self._taken])

    def balance_loss(self) -> Tensor:
        """Return the balance loss of all score-routed layers, a scalar with grad; after the forward.

        0 where no sequences were given or no layer has a choice.
        """
        total = torch.zeros((), device=self._balance[0].device if self._balance else None)
        for part in self._balance:
            total = total + part
        return total


class _LayerRouter:
    """Chooses in one layer: see ``Routing.router``."""

    def __init__(
        self, routing: Routing, recorded_TK: Tensor | None, balance_of: Callable[[Tensor], Tensor] | None
    ) -> None:
        self._routing: Routing | None = routing
        self._experts_TK = recorded_TK
        self._balance_of = balance_of

    def __call__(self, scores_TE: Tensor, live_TK: Tensor) -> Tensor:
        experts_TK = live_TK if self._experts_TK is None else _known(self._experts_TK, live_TK)
        # Also at a later call: a recomputed layer must save the same tensors for backward.
        balance = None if self._balance_of is None else self._balance_of(scores_TE)
        if self._routing is not None:
            self._experts_TK = experts_TK.to(torch.int16)
            self._routing.record(self._experts_TK, balance)
            # The graph of a recomputed layer holds this router, and the Routing holds the graph: a circle that only a
            # backward would open.
            self._routing = None
        return experts_TK


def _known(recorded_TK: Tensor, live_TK: Tensor) -> Tensor:
    """Return the recorded rows where they are known, else the live ones. int64 [T, K]."""
    if len(recorded_TK) != len(live_TK):
        raise ModelInputError(
            f"routes of {len(recorded_TK)} tokens for a batch of {len(live_TK)}; give one row for each"
        )
    recorded_TK = recorded_TK.to(live_TK)
    return torch.where((recorded_TK >= 0).all(1, keepdim=True), recorded_TK, live_TK)


def _balance_function(
    config: ModelConfig, lengths: Sequence[int] | None, weights: Sequence[float] | None
) -> Callable[[Tensor], Tensor] | None:
    """Bind the balance loss of one layer to a batch's sequences; the scores are left open."""
    if lengths is None and weights is None:
        return None
    if lengths is None or weights is None or len(lengths) != len(weights):
        raise ModelInputError(
            f"sequence_lengths has {_count(lengths)} and sequence_weights {_count(weights)}; the balance loss needs one"
            " length and one weight for each sequence. Give both, or neither"
        )
    if not all(math.isfinite(weight) for weight in weights) or not all(length >= 1 for length in lengths):
        raise ModelInputError(
            f"sequences of {list(lengths)} tokens weigh {list(weights)}; the rule is a length >= 1 and a finite weight"
        )
    k = config.num_experts_per_tok
    return partial(sequence_balance_loss, k=k, sequence_lengths=tuple(lengths), sequence_weights=tuple(weights))


def _count(values: Sequence[object] | None) -> str:
    return "none" if values is None else f"{len(values)} entries"
