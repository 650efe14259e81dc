"""Exact distillation from one teacher: reverse KL over the whole vocabulary from hidden states (docs/design.md, P5)."""

from torch import Tensor

from rollforward.kernels.loss.reverse_kl_ref import reverse_kl_rows_ref
from rollforward.kernels.loss.sweep import CHUNK_TOKENS, teacher_sweep


def reverse_kl(
    student_hidden_TD: Tensor,
    student_head_VD: Tensor,
    teacher_hidden_TE: Tensor,
    teacher_head_VE: Tensor,
    row_weight_T: Tensor,
    *,
    chunk_tokens: int = CHUNK_TOKENS,
) -> tuple[Tensor, Tensor]:
    """Return the weighted sum of KL(student || teacher) over tokens, and the KL of each.

        z = h W, u = g U, p = softmax z, q = softmax u, r = log p - log q
        K = sum_v max(0, p r + q - p);   loss = sum_t w K;   d loss / dz = w p (r - K)

    Args:
        student_hidden_TD: [T, D] float32 or float64, the vector that the student's head multiplies. Gets a gradient.
        student_head_VD: [V, D] of the same dtype. Gets a gradient.
        teacher_hidden_TE: [T, E], any floating dtype; E need not be D.
        teacher_head_VE: [V, E], any floating dtype. Whoever has several teachers calls once for each.
        row_weight_T: [T] of the student's dtype: the token's share of the loss. A row of weight 0 is not looked at,
            whatever it holds.
        chunk_tokens: >= 1. Memory is at most 11 * chunk_tokens * V numbers, both logits among them, whatever T.

    Returns:
        loss [], and kl_T [T] in nats, >= 0, 0 where the weight is 0; the latter has no gradient.

    Raises:
        ShapeError: letters disagree. DtypeError: a dtype is none of these.

    Invariants: gradients are made in the forward sweep and multiplied by the loss's own. kl_T and the gradient of the
    hidden states are row-invariant: chunk, order and the other rows have no say. The head's gradient sums over tokens
    chunk by chunk and repeats bit for bit. The KL of finite inputs is finite.
    Source: DeepSeek-V4 report, 5.1 (on-policy distillation) and 5.2; docs/design.md, P5.
    """
    return teacher_sweep(
        "reverse_kl",
        reverse_kl_rows_ref,
        student_hidden_TD,
        student_head_VD,
        teacher_hidden_TE,
        teacher_head_VE,
        row_weight_T,
        chunk_tokens=chunk_tokens,
    )
