"""Hyper-connections: how M residual streams feed a sublayer and take its output back.

Here: the public functions. The arithmetic is in ``mix_ref.py``, the normalisation in ``sinkhorn.py``; on a GPU both
are in ``mix_tile.py``, behind ``mix_sweep.py``.
"""

import torch
from torch import Tensor

from rollforward.kernels import dispatch
from rollforward.kernels.checks import bind_shapes, check_dtype, check_shapes
from rollforward.kernels.mhc import mix_sweep
from rollforward.kernels.mhc.mix_ref import mhc_head_ref, mhc_mix_ref, mhc_post_ref, mhc_pre_ref
from rollforward.kernels.mhc.mix_site import COMB, HEAD_ITERS, POST
from rollforward.kernels.norm.rms_norm import rms_norm


def mhc_mix(
    streams_TMD: Tensor, fn_XJ: Tensor, base_X: Tensor, scale_3: Tensor, *, iters: int, eps: float, norm_eps: float
) -> tuple[Tensor, Tensor, Tensor]:
    """Compute a site's mixing weights from the streams themselves.

    Args:
        streams_TMD: [T, M, D] float32.
        fn_XJ: [2M + M*M, M*D] float32 projection; rows are pre, post, comb (row-major).
        base_X: [2M + M*M] float32.
        scale_3: [3] float32, one factor for each of pre, post, comb.
        iters: Sinkhorn passes; eps: hc_eps; norm_eps: rms_norm_eps of the one statistic over all M*D entries.

    Returns:
        pre_TM in (eps, 1 + eps), post_TM in (0, 2), comb_TMM with unit columns; all float32.

    Invariants: row-invariant, deterministic.
    Source: DeepSeek-V4 reference model.py hc_pre.
    """
    sizes = check_shapes("mhc_mix", streams_TMD=streams_TMD, fn_XJ=fn_XJ, base_X=base_X, scale_3=scale_3)
    num_streams = sizes["M"]
    rows, columns = (2 + num_streams) * num_streams, num_streams * sizes["D"]
    bind_shapes("mhc_mix", fn_XJ=(fn_XJ, f"{rows} {columns}"))
    return mhc_mix_ref(streams_TMD, fn_XJ, base_X, scale_3, iters=iters, eps=eps, norm_eps=norm_eps)


def mhc_enter(
    streams_TMD: Tensor,
    fn_XJ: Tensor,
    base_X: Tensor,
    scale_3: Tensor,
    norm_D: Tensor,
    *,
    iters: int,
    eps: float,
    norm_eps: float,
) -> tuple[Tensor, Tensor, Tensor]:
    """Return the sublayer's input, normalised, and what the way out needs: ``rms_norm`` of ``mhc_pre`` of ``mhc_mix``.

    Args:
        streams_TMD: [T, M, D] float32; the tile form: bfloat16, M = 4, D a multiple of 256.
        fn_XJ, base_X, scale_3, iters, eps, norm_eps: as for ``mhc_mix``, float32 in both forms; the norm has the same
            norm_eps.
        norm_D: [D] float32 in both forms, the weight of the sublayer's norm.

    Returns:
        input_TD of the streams' dtype; post_TM and comb_TMM float32.

    Invariants: row-invariant, deterministic; gradients that sum over tokens have a fixed order.
    """
    check_shapes("mhc_enter", streams_TMD=streams_TMD, norm_D=norm_D)
    if not dispatch.is_tile("mix"):
        pre_TM, post_TM, comb_TMM = mhc_mix(
            streams_TMD, fn_XJ, base_X, scale_3, iters=iters, eps=eps, norm_eps=norm_eps
        )
        return rms_norm(mhc_pre(streams_TMD, pre_TM), norm_D, eps=norm_eps), post_TM, comb_TMM
    _check_site("mhc_enter", streams_TMD, fn_XJ, base_X, scale_3, norm_D)
    _check_tile("mhc_enter", streams_TMD, fn_XJ=fn_XJ, base_X=base_X, scale_3=scale_3, norm_D=norm_D)
    entered = mix_sweep.Enter.apply(streams_TMD, fn_XJ, base_X, scale_3, norm_D, (iters, eps, norm_eps))
    return entered[0], *_post_and_comb(entered[1])


def mhc_across(
    sublayer_TD: Tensor,
    streams_TMD: Tensor,
    post_TM: Tensor,
    comb_TMM: Tensor,
    fn_XJ: Tensor,
    base_X: Tensor,
    scale_3: Tensor,
    norm_D: Tensor,
    *,
    iters: int,
    eps: float,
    norm_eps: float,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Go out of one sublayer and into the next: ``mhc_enter`` of ``mhc_post``.

    Args:
        sublayer_TD, streams_TMD, post_TM, comb_TMM: as for ``mhc_post``.
        fn_XJ, base_X, scale_3, norm_D, iters, eps, norm_eps: of the next sublayer's site, as for ``mhc_enter``.

    Returns:
        streams_TMD between the two, and what ``mhc_enter`` returns of them: input_TD, post_TM, comb_TMM.

    Invariants: row-invariant, deterministic; gradients that sum over tokens have a fixed order.
    """
    if not dispatch.is_tile("mix"):
        streams_TMD = mhc_post(sublayer_TD, streams_TMD, post_TM, comb_TMM)
        return streams_TMD, *mhc_enter(
            streams_TMD, fn_XJ, base_X, scale_3, norm_D, iters=iters, eps=eps, norm_eps=norm_eps
        )
    check_shapes("mhc_across", sublayer_TD=sublayer_TD, streams_TMD=streams_TMD, post_TM=post_TM, comb_TMM=comb_TMM)
    _check_site("mhc_across", streams_TMD, fn_XJ, base_X, scale_3, norm_D)
    site = {"fn_XJ": fn_XJ, "base_X": base_X, "scale_3": scale_3, "norm_D": norm_D}
    _check_tile("mhc_across", streams_TMD, sublayer_TD, post_TM=post_TM, comb_TMM=comb_TMM, **site)
    streams_TMD, input_TD, weights = mix_sweep.Across.apply(
        *(sublayer_TD.bfloat16(), streams_TMD, post_TM, comb_TMM),
        *(fn_XJ, base_X, scale_3, norm_D, (iters, eps, norm_eps)),
    )
    return streams_TMD, input_TD, *_post_and_comb(weights)


def _check_site(op: str, streams_TMD: Tensor, fn_XJ: Tensor, base_X: Tensor, scale_3: Tensor, norm_D: Tensor) -> None:
    """Raise unless these are the numbers of a way into a sublayer of four streams."""
    sizes = bind_shapes(op, streams_TMD=(streams_TMD, "T 4 D"), norm_D=(norm_D, "D"))
    bind_shapes(op, fn_XJ=(fn_XJ, f"24 {4 * sizes['D']}"), base_X=(base_X, "24"), scale_3=(scale_3, "3"))


def _check_tile(op: str, streams_TMD: Tensor, sublayer_TD: Tensor | None = None, **numbers: Tensor) -> None:
    """Raise unless the tile form takes these: four streams, a sublayer's output, and float32 numbers, on one GPU."""
    bind_shapes(op, streams_TMD=(streams_TMD, "T 4 D"))
    mix_sweep.check_streams(op, streams_TMD)
    for name, one in numbers.items():
        check_dtype(op, name, one, torch.float32)
    if sublayer_TD is not None:
        check_dtype(op, "sublayer_TD", sublayer_TD, torch.bfloat16, torch.float32)
        numbers["sublayer_TD"] = sublayer_TD
    mix_sweep.check_device(op, streams_TMD, **numbers)


def _post_and_comb(weights: Tensor) -> tuple[Tensor, Tensor]:
    return weights[:, POST], weights[:, COMB].unflatten(1, (4, 4))


def mhc_pre(streams_TMD: Tensor, pre_TM: Tensor) -> Tensor:
    """Return the sublayer's input, sum_j pre_j X_j. [T, M, D], [T, M] -> [T, D] float32; row-invariant."""
    check_shapes("mhc_pre", streams_TMD=streams_TMD, pre_TM=pre_TM)
    return mhc_pre_ref(streams_TMD, pre_TM)


def mhc_post(sublayer_TD: Tensor, streams_TMD: Tensor, post_TM: Tensor, comb_TMM: Tensor) -> Tensor:
    """Mix the streams and add the sublayer's output: X'_k = post_k f + sum_j comb_jk X_j.

    Args:
        sublayer_TD: [T, D] float32, the sublayer's output f; the tile form also takes it as bfloat16, which is what it
            computes with.
        streams_TMD: [T, M, D] float32, the streams before the sublayer; the tile form: bfloat16, M = 4, D a multiple of
            256.
        post_TM: [T, M] float32; comb_TMM: [T, M (j), M (k)] float32, both from ``mhc_mix``.

    Returns:
        [T, M, D] of the streams' dtype.

    Invariants: row-invariant.
    Source: DeepSeek-V4 reference model.py hc_post.
    """
    check_shapes("mhc_post", sublayer_TD=sublayer_TD, streams_TMD=streams_TMD, post_TM=post_TM, comb_TMM=comb_TMM)
    if dispatch.is_tile("mix"):
        _check_tile("mhc_post", streams_TMD, sublayer_TD, post_TM=post_TM, comb_TMM=comb_TMM)
        return mix_sweep.Leave.apply(sublayer_TD.bfloat16(), streams_TMD, post_TM, comb_TMM)
    return mhc_post_ref(sublayer_TD, streams_TMD, post_TM, comb_TMM)


def mhc_head(
    streams_TMD: Tensor, fn_MJ: Tensor, base_M: Tensor, scale_1: Tensor, *, eps: float, norm_eps: float
) -> Tensor:
    """Merge the streams before the final norm, without Sinkhorn. [T, M, D] -> [T, D]; row-invariant.

    Float32; the tile form: streams and result bfloat16, M = 4, D a multiple of 256.
    """
    sizes = check_shapes("mhc_head", streams_TMD=streams_TMD, fn_MJ=fn_MJ, base_M=base_M, scale_1=scale_1)
    bind_shapes("mhc_head", fn_MJ=(fn_MJ, f"M {sizes['M'] * sizes['D']}"))
    if dispatch.is_tile("mix"):
        _check_tile("mhc_head", streams_TMD, fn_MJ=fn_MJ, base_M=base_M, scale_1=scale_1)
        return mix_sweep.Enter.apply(*(streams_TMD, fn_MJ, base_M, scale_1, None, (HEAD_ITERS, eps, norm_eps)))[0]
    return mhc_head_ref(streams_TMD, fn_MJ, base_M, scale_1, eps=eps, norm_eps=norm_eps)
