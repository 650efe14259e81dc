"""Lightning indexer: which compressed entries a query may read. Public functions; no gradient flows through them."""

import torch
from torch import Tensor

from rollforward.kernels.attention.index_topk_ref import index_scores_ref, select_entries_ref
from rollforward.kernels.checks import check_shapes


@torch.no_grad()
def index_scores(q_GQNh: Tensor, k_GSh: Tensor, head_weight_GQN: Tensor) -> Tensor:
    """Score every entry for every query: sum_n weight_n relu(q_n . k_s).

    Local letters: G groups of queries that share keys, Q queries of a group, N index heads, h index head width,
    S entries (absolute order, padded to 64).

    Args:
        q_GQNh: [G, Q, N, h] float32. k_GSh: [G, S, h] float32. head_weight_GQN: [G, Q, N] float32, may be negative.

    Returns:
        [G, Q, S] float32.

    Invariants: a score's bits depend on its query and entry alone; heads are summed by a fixed binary tree.
    Source: DeepSeek-V4 reference Indexer; report equations 13-17.
    """
    check_shapes("index_scores", q_GQNh=q_GQNh, k_GSh=k_GSh, head_weight_GQN=head_weight_GQN)
    return index_scores_ref(q_GQNh, k_GSh, head_weight_GQN)


@torch.no_grad()
def select_entries(score_GQS: Tensor, visible_GQS: Tensor, *, k: int) -> Tensor:
    """Choose the k best visible entries of every query; on equal scores the smaller index wins, NaN counts as -inf.

    Args:
        score_GQS: [G, Q, S] float32. visible_GQS: [G, Q, S] bool, True where causality allows the entry. k: index_topk.

    Returns:
        bool [G, Q, S]; at most k True per query, all visible ones when there are no more than k.
    """
    check_shapes("select_entries", score_GQS=score_GQS, visible_GQS=visible_GQS)
    return select_entries_ref(score_GQS, visible_GQS, k)
