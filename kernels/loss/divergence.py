"""Distillation from one teacher by other divergences than the reverse KL (`reverse_kl.py`): forward KL and generalised
Jensen-Shannon, over the whole vocabulary from hidden states."""

from torch import Tensor

from rollforward.kernels.loss.divergence_ref import forward_kl_rows_ref, jensen_shannon_rows_ref
from rollforward.kernels.loss.sweep import CHUNK_TOKENS, teacher_sweep


def forward_kl(
    student_hidden_TD: Tensor,
    student_head_VD: Tensor,
    teacher_hidden_TE: Tensor,
    teacher_head_VE: Tensor,
    row_weight_T: Tensor,
    *,
    chunk_tokens: int = CHUNK_TOKENS,
) -> tuple[Tensor, Tensor]:
    """Return the weighted sum of KL(teacher || student) over tokens, and the KL of each.

        z = h W, u = g U, p = softmax z, q = softmax u
        K = sum_v max(0, q (log q - log p) + p - q);   loss = sum_t w K;   d loss / dz = w (p - q)

    The mean is the teacher's, so that a student without room for all covers every answer of the teacher; the reverse
    KL's is the student's, which seeks one.

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

    Invariants: those of `reverse_kl`. Value and gradient are exactly 0 where the logits are the teacher's.
    """
    return teacher_sweep(
        "forward_kl",
        forward_kl_rows_ref,
        student_hidden_TD,
        student_head_VD,
        teacher_hidden_TE,
        teacher_head_VE,
        row_weight_T,
        chunk_tokens=chunk_tokens,
    )


def jensen_shannon(
    student_hidden_TD: Tensor,
    student_head_VD: Tensor,
    teacher_hidden_TE: Tensor,
    teacher_head_VE: Tensor,
    row_weight_T: Tensor,
    *,
    beta: float,
    chunk_tokens: int = CHUNK_TOKENS,
) -> tuple[Tensor, Tensor]:
    """Return the weighted sum of the generalised Jensen-Shannon divergence over tokens, and that of each.

        p = softmax z (student), q = softmax u (teacher), m = beta q + (1 - beta) p, g = (1 - beta) log(p / m)
        J = beta KL(q || m) + (1 - beta) KL(p || m);   loss = sum_t w J;   d loss / dz = w p (g - sum_v p g)

    J / beta goes to KL(teacher || student) for beta to 0, J / (1 - beta) to KL(student || teacher) for beta to 1.

    Args:
        beta: the teacher's share of the mixture, 0 < beta < 1. The others: as `forward_kl`.

    Returns:
        loss [], and divergence_T [T] in nats, in [0, ln 2] up to rounding, 0 where the weight is 0; the latter has no
        gradient.

    Raises:
        ShapeError, DtypeError: as `forward_kl`.

    Invariants: those of `forward_kl`.
    Source: Agarwal et al., Generalized Knowledge Distillation (arXiv 2306.13649), equation 1.
    """

    def rows(student_logits_NV: Tensor, teacher_logits_NV: Tensor) -> tuple[Tensor, Tensor]:
        return jensen_shannon_rows_ref(student_logits_NV, teacher_logits_NV, beta)

    return teacher_sweep(
        "jensen_shannon",
        rows,
        student_hidden_TD,
        student_head_VD,
        teacher_hidden_TE,
        teacher_head_VE,
        row_weight_T,
        chunk_tokens=chunk_tokens,
    )
