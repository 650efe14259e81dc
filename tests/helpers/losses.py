"""Inputs of policy losses: three tokens to work by hand, random ones for oracles, and every algorithm to try."""

from typing import Any

import torch
from torch import Tensor

from rollforward.rl.algorithms import CISPO, DAPO, GRPO, GSPO, TIS, Algorithm, DrGRPO, IcePop
from rollforward.rl.losses.base import LossInputs, LossOutput

EVERY: dict[str, Algorithm] = {
    "grpo": GRPO(kl_beta=0.2, opsm_delta=0.05),
    "grpo_plain": GRPO(kl_beta=0.0, opsm_delta=None),
    "dapo": DAPO(),
    "dr_grpo": DrGRPO(kl_beta=0.1),
    "gspo": GSPO(clip_eps_low=0.05, clip_eps_high=0.1),
    "cispo": CISPO(kl_beta=0.1, clip_eps_low=0.5),
    "tis": TIS(cap=1.3),
    "tis_sequence": TIS(cap=1.3, level="sequence", kl_beta=0.1),
    "icepop": IcePop(ratio_min=0.6, ratio_max=1.5),
}
"""Every loss in every branch that a setting opens, with bounds that bind on the inputs below."""


def three_tokens(dtype: torch.dtype = torch.float64, **changes: Any) -> LossInputs:
    """Tokens 0 and 1 are one trajectory with advantage 1, token 2 another with advantage -1; each trajectory weighs
    1/2.

    policy    0.6  0.2  0.5
    behavior  0.4  0.4  0.5    so the ratio r is     1.5  0.5  1
    reference 0.3  0.4  0.5    so x = ref / policy is 0.5  2    1
    """
    fields = {
        "policy_logprobs_T": torch.tensor([0.6, 0.2, 0.5], dtype=dtype).log().requires_grad_(),
        "behavior_logprobs_T": torch.tensor([0.4, 0.4, 0.5], dtype=dtype).log(),
        "reference_logprobs_T": torch.tensor([0.3, 0.4, 0.5], dtype=dtype).log(),
        "entropy_T": torch.tensor([0.5, 0.25, 0.75], dtype=dtype),
        "advantages_T": torch.tensor([1.0, 1.0, -1.0], dtype=dtype),
        "trained_mask_T": torch.tensor([True, True, True]),
        "token_weight_T": torch.tensor([0.25, 0.25, 0.5], dtype=dtype),
        "trajectory_T": torch.tensor([0, 0, 1]),
        "trajectory_tokens_N": torch.tensor([2, 1]),
        **changes,
    }
    return LossInputs(**fields)


def random_inputs(tokens: int, dtype: torch.dtype, seed: int, num_trajectories: int = 4) -> LossInputs:
    """Ragged trajectories, masked places, ratios on both sides of 1; one weight and one advantage a trajectory."""
    generator = torch.Generator().manual_seed(seed)
    behavior_T = -torch.rand(tokens, generator=generator, dtype=torch.float64) * 3
    trajectory_T = torch.arange(tokens) * num_trajectories // tokens
    advantages_N = torch.randn(num_trajectories, generator=generator, dtype=torch.float64)
    weights_N = torch.rand(num_trajectories, generator=generator, dtype=torch.float64) / tokens
    mask_T = torch.rand(tokens, generator=generator) < 0.7
    mask_T[0] = True
    return LossInputs(
        policy_logprobs_T=(behavior_T + 0.4 * torch.randn(tokens, generator=generator, dtype=torch.float64))
        .to(dtype)
        .requires_grad_(),
        behavior_logprobs_T=behavior_T.to(dtype),
        reference_logprobs_T=(behavior_T - torch.rand(tokens, generator=generator, dtype=torch.float64)).to(dtype),
        advantages_T=advantages_N[trajectory_T].to(dtype),
        trained_mask_T=mask_T,
        token_weight_T=weights_N[trajectory_T].to(dtype),
        trajectory_T=trajectory_T,
        trajectory_tokens_N=torch.zeros(num_trajectories, dtype=torch.int64).index_add(0, trajectory_T, mask_T.long()),
    )


def gradient(output: LossOutput, inputs: LossInputs) -> Tensor:
    """The gradient of the loss by the policy's log-probs."""
    return torch.autograd.grad(output.loss, inputs.policy_logprobs_T)[0]
