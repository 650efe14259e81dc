"""The schema of algorithms: a tagged union of what tells them apart. Losses are in `rl/losses`, one a file.

No torch and no ray. `rl/config.py` assembles it into the roots.

Source: formulas and defaults of each paper as its class names it.
"""

from typing import Annotated, Literal

import msgspec

Normalisation = Literal["trajectory_mean", "token_mean", "constant"]

Truncation = Literal["keep", "mask"]
"""A completion that ran out of tokens or turns is trained like others, or counts in the baseline and is not trained."""

NonNegativeFloat = Annotated[float, msgspec.Meta(ge=0.0)]
ClipLow = Annotated[float, msgspec.Meta(gt=0.0, lt=1.0)]
ClipHigh = Annotated[float, msgspec.Meta(gt=0.0)]


class DynamicSampling(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """DAPO's: groups whose rewards are all equal teach nothing; they are dropped and further prompts drawn in their
    place until the step has `prompts_per_step` groups that teach."""

    max_rounds: Annotated[int, msgspec.Meta(ge=2)] = 4
    """Draws of a step, the first one included. After the last the step trains on the groups that it has; one without
    any keeps its groups of equal rewards, so that the run goes on."""


class PolicyGradient(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """What every algorithm of this file has; each sets its own defaults."""

    group_size: int = 8
    """Attempts at each prompt, which share a baseline; at least 2."""
    kl_beta: NonNegativeFloat = 0.0
    """Weight of the unbiased KL to the model that the run starts from. 0 leaves the reference out."""
    advantage_std: bool = False
    """Divide advantages by the group's standard deviation, as the original GRPO does."""
    normalisation: Normalisation = "trajectory_mean"
    """Weight of a token in the step: `trajectory_mean` makes trajectories equal (each is the mean of its tokens),
    `token_mean` tokens; `constant` is 1 / (trained trajectories x sampling.max_new_tokens), which knows no length."""
    truncation: Truncation = "keep"
    """What completions that ran out of budget do, be it tokens (`max_new_tokens`) or turns (`max_turns`): `keep` trains
    them like others, `mask` counts them in the baseline alone."""
    keep_routing: bool = True
    """Record the experts that every sampled token visits, those of hash layers too, and visit the same ones in
    training; their weights come from the live router, which goes on learning. A token without a record chooses live."""
    dynamic_sampling: DynamicSampling | None = None
    """Draw further prompts in place of groups whose rewards are all equal; null trains on what was drawn."""

    def __post_init__(self) -> None:
        """Refuse a group of one."""
        if self.group_size < 2:
            raise ValueError(
                f"group_size is {self.group_size}; a baseline from the group needs at least 2 members. Set"
                " algo.group_size=2 or more (8 is usual)"
            )


class ClippedRatio(PolicyGradient, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """What algorithms have whose ratio loses its gradient beyond two bounds."""

    clip_eps_low: ClipLow = 0.2
    """The ratio is clipped below at 1 minus this."""
    clip_eps_high: ClipHigh = 0.2
    """The ratio is clipped above at 1 plus this. Larger than the lower one is DAPO's clip-higher (0.28)."""


class GRPO(ClippedRatio, frozen=True, kw_only=True, forbid_unknown_fields=True, tag_field="type", tag="grpo"):
    """DeepSeek's GRPO (`rl/losses/grpo.py`); the defaults are DeepSeek-V3.2's where it states them."""

    kl_beta: NonNegativeFloat = 0.001
    opsm_delta: Annotated[float, msgspec.Meta(gt=0.0)] | None = 0.1
    """Nats per token beyond which a sequence of negative advantage is off-policy and loses its policy term; DeepSeek
    states no value. null switches the mask off."""


class DAPO(ClippedRatio, frozen=True, kw_only=True, forbid_unknown_fields=True, tag_field="type", tag="dapo"):
    """DAPO (arXiv 2503.14476): clip-higher, dynamic sampling, mean over tokens, no KL. Its soft punishment of long
    answers is `length_penalty` of a task, its overlong filter `truncation: mask`."""

    clip_eps_high: ClipHigh = 0.28
    advantage_std: bool = True
    normalisation: Normalisation = "token_mean"
    dynamic_sampling: DynamicSampling | None = DynamicSampling()


class DrGRPO(ClippedRatio, frozen=True, kw_only=True, forbid_unknown_fields=True, tag_field="type", tag="dr_grpo"):
    """Dr.GRPO (arXiv 2503.20783): no division by a length or a deviation."""

    normalisation: Normalisation = "constant"


class GSPO(ClippedRatio, frozen=True, kw_only=True, forbid_unknown_fields=True, tag_field="type", tag="gspo"):
    """GSPO (arXiv 2507.18071): one ratio for a whole sequence, the geometric mean of its tokens', clipped closely."""

    clip_eps_low: ClipLow = 3e-4
    clip_eps_high: ClipHigh = 4e-4
    advantage_std: bool = True


class CISPO(PolicyGradient, frozen=True, kw_only=True, forbid_unknown_fields=True, tag_field="type", tag="cispo"):
    """CISPO (MiniMax-M1, arXiv 2506.13585): the clipped ratio is a detached weight, so no token loses its gradient."""

    clip_eps_low: Annotated[float, msgspec.Meta(gt=0.0, le=1.0)] = 1.0
    """The weight is at least 1 minus this; 1 leaves it unbounded below, as in practice."""
    clip_eps_high: ClipHigh = 0.28
    """The weight is at most 1 plus this."""
    advantage_std: bool = True
    normalisation: Normalisation = "token_mean"


class TIS(PolicyGradient, frozen=True, kw_only=True, forbid_unknown_fields=True, tag_field="type", tag="tis"):
    """Truncated importance sampling: the policy gradient times the detached and truncated ratio of the trainer to the
    engine that drew the token.

    It has no clip bounds: a batch is trained once, so the trainer's own ratio, which they would bound, is exactly 1.
    """

    cap: Annotated[float, msgspec.Meta(gt=0.0)] = 2.0
    """Largest weight."""
    level: Literal["token", "sequence"] = "token"
    """Ratio of a token, or the product over its whole sequence."""


class IcePop(PolicyGradient, frozen=True, kw_only=True, forbid_unknown_fields=True, tag_field="type", tag="icepop"):
    """IcePop (Ring-1T, arXiv 2510.18855): as TIS token by token, but a token whose ratio lies outside the bounds is
    dropped, not truncated."""

    ratio_min: Annotated[float, msgspec.Meta(gt=0.0, lt=1.0)] = 0.5
    """Smallest ratio of the trainer to the engine that a token may have."""
    ratio_max: Annotated[float, msgspec.Meta(gt=1.0)] = 5.0
    """Largest ratio of the trainer to the engine that a token may have."""


Algorithm = GRPO | DAPO | DrGRPO | GSPO | CISPO | TIS | IcePop
"""Any algorithm, told apart by `type`. A new one joins here, in a file of `rl/losses`, and in
`rl/losses/registry.py`."""
