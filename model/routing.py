"""Which experts tokens visit: recorded in one forward, forced in another, so that both use the same (keep routing).

Recorded routes hold the choice only. The weights of the chosen experts come from the live scores, so that a router
learns under replay too. Not here: the choice itself (moe.py), where routes are kept between (rollout/wal.py,
rl/batch.py). The multi-token-prediction module takes no part.

Letters: L layers, K experts per token.
"""

import torch
from torch import Tensor

from rollforward.model.config import ModelConfig
from rollforward.model.errors import ModelInputError


class Routing:
    """Routes of one call of ``Transformer.streams``: replays given ones, and holds those that were taken.

    Example: routing = Routing(config); transformer.streams(..., routing=routing); routing.taken_TLK(). To replay them:
    Routing(config, replay_TLK=...).
    """

    def __init__(self, config: ModelConfig, *, replay_TLK: Tensor | None = None) -> None:
        """Start with nothing taken.

        Args:
            config: the model.
            replay_TLK: [T, L, K] int16 or int64, a row for every token of the batch: experts in slot order, hash
                layers included, distinct in a row. A token whose row of a layer holds -1 chooses live there. None:
                all choose live.

        Raises:
            ModelInputError: another shape, or an expert that the model does not have.
        """
        self._replay_TLK = replay_TLK
        self._taken: list[Tensor] = []
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

    def route(self, layer: int, live_TK: Tensor) -> Tensor:
        """Return the experts that the tokens visit in a layer; layers come in order, each once.

        Args:
            layer: from 0.
            live_TK: int64 [T, K], what the layer's own router chose.

        Returns:
            int64 [T, K]: recorded rows where they are known, else live ones.

        Raises:
            ModelInputError: the routes are of another number of tokens.
        """
        assert layer == len(self._taken), "a Routing serves one forward"
        experts_TK = live_TK
        if self._replay_TLK is not None:
            if len(self._replay_TLK) != len(live_TK):
                raise ModelInputError(
                    f"routes of {len(self._replay_TLK)} tokens for a batch of {len(live_TK)}; give one row for each"
                )
            recorded_TK = self._replay_TLK[:, layer].long()
            is_known_T1 = (recorded_TK >= 0).all(1, keepdim=True)
            experts_TK = torch.where(is_known_T1, recorded_TK, live_TK)
        self._taken.append(experts_TK)
        return experts_TK

    def taken_TLK(self) -> Tensor:
        """Return what every token visited, int16 [T, L, K]; after the forward."""
        return torch.stack(self._taken, 1).to(torch.int16)
