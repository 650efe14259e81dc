"""Schema of training: the optimizer, load balancing of experts, and the number formats of the forward. Read by
`model/trainer.py` and `model/numerics.py`; assembled in the roots of `rl/config.py`."""

from typing import Annotated, ClassVar, Literal

import msgspec

from rollforward.model.matrices import MuonSplit

Precision = Literal["fp32", "native"]
"""Number formats of a forward: plain float32 everywhere, or the released model's formats."""

Beta = Annotated[float, msgspec.Meta(ge=0.0, lt=1.0)]
"""Decay of a running average, per step."""

Positive = Annotated[float, msgspec.Meta(gt=0.0)]
NonNegative = Annotated[float, msgspec.Meta(ge=0.0)]


class _Optimizer(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """What the optimizers share: decoupled decay, linear warm-up, a rate that stays or falls linearly, clipping by the
    global norm, and Adam's moments."""

    lr: Positive
    """Learning rate after warm-up."""
    betas: tuple[Beta, Beta] = (0.9, 0.95)
    """Decay of Adam's first and second moment."""
    eps: Positive = 1e-8
    """Added to the root of Adam's second moment."""
    weight_decay: NonNegative = 0.0
    """Decoupled: each step takes lr x this share of a weight. Matrices decay, vectors do not."""
    warmup_steps: Annotated[int, msgspec.Meta(ge=0)] = 0
    """Steps of linear rise to `lr`; step i (from 0) has lr x (i + 1) / warmup_steps."""
    decay_steps: Annotated[int, msgspec.Meta(ge=0)] = 0
    """Steps of linear fall after the warm-up; step i of them (from 0) has lr x (1 - i / decay_steps), and the run must
    end with the last. 0: the rate stays.
    """
    max_grad_norm: Positive = 1.0
    """A gradient with a larger L2 norm, over all parameters together, is scaled down to it. 1e30 never scales."""

    def rate(self, step: int) -> float:
        """Return the learning rate of optimizer step ``step``, from 0.

        Example: lr 8, warmup_steps 2, decay_steps 4 gives 4, 8, 8, 6, 4, 2.
        """
        if step < self.warmup_steps:
            return self.lr * (step + 1) / self.warmup_steps
        if self.decay_steps == 0:
            return self.lr
        return self.lr * max(0.0, 1.0 - (step - self.warmup_steps) / self.decay_steps)


class AdamW(_Optimizer, frozen=True, kw_only=True, forbid_unknown_fields=True, tag_field="type", tag="adamw"):
    """AdamW for every trained tensor."""


class HybridMuon(
    _Optimizer, frozen=True, kw_only=True, forbid_unknown_fields=True, tag_field="type", tag="hybrid_muon"
):
    """DeepSeek-V4's optimizer: Muon for the matrices that `rollforward plan` lists, AdamW for embedding, head, norms
    and other vectors (`model/matrices.py`)."""

    may_change: ClassVar[frozenset[str]] = frozenset({"zero_size", "max_padding"})
    """Fields that may differ when a run directory goes on: they say which rank computes what, never what."""

    momentum: Beta = 0.95
    """Decay of Muon's momentum: M <- momentum M + G; Nesterov's momentum M + G is orthogonalised."""
    gamma: Positive = 0.18
    """Root mean square of an update of Muon's: the orthogonal matrix times gamma x sqrt(its longer side). So one `lr`
    serves both optimizers."""
    ns_precision: Literal["fp32", "bf16"] = "fp32"
    """Format of the Newton-Schulz products; bf16 is DeepSeek's, and meant for GPUs."""
    stochastic_rounding: bool = True
    """Round every micro-batch's gradient of the routed experts to BF16 before it goes to the rank that sums it in FP32:
    half the traffic, no bias. Keyed by step, micro-batch, matrix and element."""
    zero_size: Annotated[int, msgspec.Meta(ge=1)] | None = None
    """Ranks that share the dense matrices; further groups of as many ranks hold the same and update redundantly. A
    power of two that divides `cluster.learner_ranks`. null: all ranks."""
    max_padding: NonNegative = 0.1
    """Most padding in the ranks' equal buckets, over real elements; more is refused."""
    split: MuonSplit = MuonSplit()
    """What is one logical matrix where DeepSeek's report does not say."""


OptimConfig = AdamW | HybridMuon
"""Any optimizer, told apart by `type`."""


class BalanceConfig(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Keeps the experts of score-routed layers equally busy (`model/balance.py`). Off by default: in RL the routes of
    the rollout are replayed."""

    bias_update_speed: NonNegative = 0.0
    """After a step, the selection bias of an expert with less than the mean load rises by this, of one with more it
    falls (auxiliary-loss-free balancing). DeepSeek-V4 pre-trains with 1e-3."""
    loss_weight: NonNegative = 0.0
    """Weight of the sequence-wise balance loss, which keeps single sequences from extreme imbalance. DeepSeek-V4
    pre-trains with 1e-4."""

    @property
    def is_on(self) -> bool:
        """Whether any of the two is."""
        return self.bias_update_speed > 0 or self.loss_weight > 0
