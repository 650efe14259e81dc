"""Hyper-connection mixing in plain torch, readable beside the equations.

M streams, D width. v = flatten(X) [M*D]; rho = 1/sqrt(mean(v^2) + norm_eps); mix = (fn v) rho, 2M + M*M entries in the
order pre, post, comb (row-major j, k). Local letters: J = M*D, X = 2M + M*M.
"""

import torch
from torch import Tensor

from rollforward.kernels.linear.row_linear import row_linear
from rollforward.kernels.mhc.sinkhorn import sinkhorn
from rollforward.kernels.rowwise import row_sum, sigmoid


def mix_logits_ref(streams_TMD: Tensor, fn_XJ: Tensor, norm_eps: float) -> Tensor:
    """Return (fn v) * rho, component-major. [T, M, D], [X, M*D] -> [X, T] float32."""
    v_TJ = streams_TMD.flatten(1)
    rho_T1 = 1.0 / torch.sqrt(row_sum(v_TJ * v_TJ) / v_TJ.shape[1] + norm_eps)
    return (row_linear(v_TJ, fn_XJ) * rho_T1).t().contiguous()


def mhc_mix_ref(
    streams_TMD: Tensor, fn_XJ: Tensor, base_X: Tensor, scale_3: Tensor, *, iters: int, eps: float, norm_eps: float
) -> tuple[Tensor, Tensor, Tensor]:
    """Return pre [T, M], post [T, M] and comb [T, M (j), M (k)].

    pre = sigmoid(mix s0 + base) + eps, post = 2 sigmoid(mix s1 + base), comb = Sinkhorn(mix s2 + base).
    """
    num_streams = streams_TMD.shape[1]
    mix_XT = mix_logits_ref(streams_TMD, fn_XJ, norm_eps)
    pre, post, comb = mix_XT.split([num_streams, num_streams, num_streams * num_streams])
    base_pre, base_post, base_comb = base_X[:, None].split([num_streams, num_streams, num_streams * num_streams])
    pre_MT = sigmoid(pre * scale_3[0] + base_pre) + eps
    post_MT = 2.0 * sigmoid(post * scale_3[1] + base_post)
    logits_MMT = (comb * scale_3[2] + base_comb).reshape(num_streams, num_streams, -1)
    comb_MMT = sinkhorn(logits_MMT, iters=iters, eps=eps)
    return pre_MT.t().contiguous(), post_MT.t().contiguous(), comb_MMT.permute(2, 0, 1).contiguous()


def mhc_pre_ref(streams_TMD: Tensor, pre_TM: Tensor) -> Tensor:
    """Return sum_j pre_j X_j. [T, M, D], [T, M] -> [T, D]."""
    return torch.bmm(pre_TM.unsqueeze(1), streams_TMD).squeeze(1)


def mhc_post_ref(sublayer_TD: Tensor, streams_TMD: Tensor, post_TM: Tensor, comb_TMM: Tensor) -> Tensor:
    """Return X'_k = post_k f + sum_j comb_jk X_j: the sum runs over the FIRST index of comb. [T, M, D]."""
    return torch.baddbmm(post_TM.unsqueeze(2) * sublayer_TD.unsqueeze(1), comb_TMM.transpose(1, 2), streams_TMD)


def mhc_head_ref(
    streams_TMD: Tensor, fn_MJ: Tensor, base_M: Tensor, scale_1: Tensor, *, eps: float, norm_eps: float
) -> Tensor:
    """Return sum_j (sigmoid(mix_j scale + base_j) + eps) X_j, without Sinkhorn. [T, M, D] -> [T, D]."""
    mix_MT = mix_logits_ref(streams_TMD, fn_MJ, norm_eps)
    pre_MT = sigmoid(mix_MT * scale_1[0] + base_M[:, None]) + eps
    return mhc_pre_ref(streams_TMD, pre_MT.t().contiguous())
