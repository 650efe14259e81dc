"""Routed and shared experts: permutation, grouped products, clamped SwiGLU, combination in slot order.

Here: public functions and gradients. The arithmetic is in the ``*_ref.py`` files beside this one.
"""

from collections.abc import Callable

import torch
from torch import Tensor

from rollforward.kernels.checks import bind_shapes, check_shapes
from rollforward.kernels.moe.grouped_linear_ref import grouped_linear_backward_ref, grouped_linear_ref
from rollforward.kernels.moe.permute_ref import permute_plan_ref
from rollforward.kernels.rowwise import silu, take_rows

Quantiser = Callable[[Tensor], Tensor]
"""Applied to the input of a product whose weight is published in FP4 or FP8; the identity in fp32 mode."""


class _GroupedLinear(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x_RK, w_ENK, expert_of_tile):
        ctx.save_for_backward(x_RK, w_ENK, expert_of_tile)
        return grouped_linear_ref(x_RK, w_ENK, expert_of_tile)

    @staticmethod
    def backward(ctx, grad):
        return *grouped_linear_backward_ref(*ctx.saved_tensors, grad), None


def clamped_swiglu(gate: Tensor, up: Tensor, *, limit: float) -> Tensor:
    """Return silu(min(gate, limit)) * clamp(up, -limit, limit), any equal shapes, float32; limit > 0.

    Source: DeepSeek-V4 reference Expert (the gate has no lower bound; the shared expert clamps as well).
    """
    bind_shapes("clamped_swiglu", gate=(gate, "... F"), up=(up, "... F"))
    return silu(gate.clamp(max=limit)) * up.clamp(-limit, limit)


def routed_experts(
    x_TD: Tensor,
    experts_TK: Tensor,
    weights_TK: Tensor,
    w1_EFD: Tensor,
    w3_EFD: Tensor,
    w2_EDF: Tensor,
    *,
    limit: float,
    quantise: Quantiser,
) -> Tensor:
    """Send every token through its K experts and add their outputs in slot order.

    y = sum_k w2_e (swiglu(w1_e x, w3_e x) * weight_k); the weight enters before w2 and before its quantiser.

    Args:
        x_TD: [T, D] float32. experts_TK: int64 [T, K], distinct in a row. weights_TK: [T, K] float32.
        w1_EFD, w3_EFD: [E, F, D]; w2_EDF: [E, D, F]; float32 values of the published formats.
        limit: swiglu_limit. quantise: input quantiser of the three products.

    Returns:
        [T, D] float32.

    Invariants: row-invariant forward; padding rows are zero and never read; deterministic gradient.
    Source: DeepSeek-V4 reference MoE and Expert.
    """
    check_shapes(
        "routed_experts",
        x_TD=x_TD,
        experts_TK=experts_TK,
        weights_TK=weights_TK,
        w1_EFD=w1_EFD,
        w3_EFD=w3_EFD,
        w2_EDF=w2_EDF,
    )
    num_tokens, slots = experts_TK.shape
    if num_tokens == 0:
        return torch.zeros_like(x_TD)
    source_R, expert_of_tile, row_TK = permute_plan_ref(experts_TK, w1_EFD.shape[0])
    padded_x = torch.cat((quantise(x_TD), x_TD.new_zeros(1, x_TD.shape[1])))
    x_RD = take_rows(padded_x, source_R // slots)
    weight_R1 = take_rows(torch.cat((weights_TK.reshape(-1), weights_TK.new_zeros(1))), source_R).unsqueeze(1)
    gate_RF = _GroupedLinear.apply(x_RD, w1_EFD, expert_of_tile)
    up_RF = _GroupedLinear.apply(x_RD, w3_EFD, expert_of_tile)
    inner_RF = quantise(clamped_swiglu(gate_RF, up_RF, limit=limit) * weight_R1)
    out_TKD = take_rows(_GroupedLinear.apply(inner_RF, w2_EDF, expert_of_tile), row_TK)
    total = out_TKD[:, 0]
    for slot in range(1, slots):
        total = total + out_TKD[:, slot]
    return total
