"""Groups of trajectories to the batch of one step: heavy columns for every token, one light row for every trajectory.

The only place where masks and token weights are made. Everything per token that leaves this file is aligned with the
*predicting* position: row t of a packed batch speaks of the token at t + 1, because the logits of position t predict it
(`_predictor_rows` is that shift). Trajectories are aligned with the token itself. Order and packing are in
`rl/packing.py`, the files in `rl/samples.py`, losses in `rl/losses`, the forward pass in `model/trainer.py`.

Weights: every trained token of a step has one weight; all of them sum to 1 but under `constant`, where they sum to the
mean share of the token budget that was used. They are fixed here, once, from the counts of the whole step, so that a
loss which only adds weighted tokens can't depend on micro-batches, ranks, packing or order.

Letters: T packed tokens, B sequences, N trajectories, G members of a group.
"""

from collections.abc import Iterable, Sequence

import msgspec
import numpy as np

from rollforward.model.metrics import Metric
from rollforward.rl.advantage import group_advantages
from rollforward.rl.algorithms import Normalisation, Truncation
from rollforward.rl.errors import BatchError, NoTrainableTrajectoriesError
from rollforward.rl.metrics import advantage_metrics, group_metrics
from rollforward.rollout.types import (
    ArrayRecord,
    BoolArray,
    FailureType,
    Float32Array,
    Group,
    Int16Array,
    Int32Array,
    KeptSets,
    RequestId,
    Segment,
    StopReason,
    Trajectory,
)

_OPTIONAL_COLUMNS = ("routes_TLK", "kept_counts_T", "kept_ids")


class PackedBatch(ArrayRecord, frozen=True, kw_only=True, eq=False):
    """Sequences end to end, with what a loss needs of each position. Trajectories in it are whole.

    Example: the sequence [7, 8, 5, 2] with 5 and 2 sampled has target_ids_T [8, 5, 2, 0] and
    trained_mask_T [F, T, T, F].
    """

    token_ids_T: Int32Array
    """[T] int32. Sequences one after the other, no padding."""
    sequence_lengths_B: Int32Array
    """[B] int32. Length of each sequence; they sum to T."""
    target_ids_T: Int32Array
    """[T] int32. Token that follows in the same sequence; 0 after the last one."""
    trained_mask_T: BoolArray
    """[T] bool. True where the token that follows is trained."""
    behavior_logprobs_T: Float32Array
    """[T] float32. Sampling log-prob of the target; 0 where not trained."""
    advantages_T: Float32Array
    """[T] float32. Advantage of the target; 0 where not trained."""
    token_weight_T: Float32Array
    """[T] float32. Share of the target in the step's loss; 0 where not trained."""
    trajectory_T: Int32Array
    """[T] int32. Index into `ids` of the trajectory that the position belongs to."""
    trajectory_tokens_N: Int32Array
    """[N] int32. Trained tokens of each whole trajectory."""
    ids: tuple[RequestId, ...]
    """Identities of the N trajectories, in training order."""
    routes_TLK: Int16Array | None = None
    """[T, L, K] int16. Experts that the token at the position itself visited when it was sampled, by layer; -1 where
    unknown. None where nothing was recorded."""
    kept_counts_T: Int32Array | None = None
    """[T] int32. Size of the set that the target was drawn from; 0 means the whole vocabulary. None where every set
    is."""
    kept_ids: Int32Array | None = None
    """[sum of kept_counts_T] int32. Those sets one after another, each in ascending order. None as `kept_counts_T`."""


class TrajectoryRow(msgspec.Struct, frozen=True, kw_only=True):
    """What is known of one trained trajectory without looking at its tokens: enough to order, pack and judge it."""

    id: RequestId
    """Its identity."""
    task: str
    """Name of the task that scored it."""
    reward: float
    """Its score."""
    advantage: float
    """Advantage of each of its trained tokens."""
    token_weight: float
    """Share of each of its trained tokens in the step's loss."""
    segment_lengths: tuple[int, ...]
    """Tokens of each of its sequences, prompts included."""
    num_trained_tokens: int
    """Tokens that the policy drew."""
    num_turns: int
    """Turns that the policy took."""
    stop_reason: StopReason
    """Why it ended."""
    failure: FailureType | None
    """What went wrong, or None."""
    policy_version: int
    """Weight version that sampled it."""

    @property
    def num_tokens(self) -> int:
        """All its tokens, prompts and observations included."""
        return sum(self.segment_lengths)


class StepBatch(msgspec.Struct, frozen=True, kw_only=True, eq=False):
    """Everything that one step trains on, in (step, prompt, member) order."""

    rows: tuple[TrajectoryRow, ...]
    """Light metadata of each trajectory."""
    trajectories: tuple[PackedBatch, ...]
    """One batch for each row, its segments end to end."""
    metrics: tuple[Metric, ...]
    """What is known of the step before any forward pass: rewards, lengths, advantages, failures."""

    @property
    def num_trained_tokens(self) -> int:
        """Trained tokens of the whole step."""
        return sum(row.num_trained_tokens for row in self.rows)


def build_step_batch(
    groups: Iterable[Group],
    *,
    normalisation: Normalisation,
    divide_by_std: bool = False,
    truncation: Truncation = "keep",
    max_new_tokens: int | None = None,
) -> StepBatch:
    """Return the batch of one step.

    Infra and data failures are left out of baseline, counts and loss, and so are groups in which fewer than two members
    remain, because one score has no baseline. Segments of a trajectory share one weight.

    Args:
        groups: The step's groups in any order; the order of their members does not matter either.
        normalisation: "trajectory_mean" gives a token 1 / (trained tokens of its trajectory x trained trajectories of
            the step); "token_mean" gives it 1 / (trained tokens of the step); "constant" gives it 1 / (trained
            trajectories of the step x max_new_tokens), so that no length divides anything.
        divide_by_std: As in `group_advantages`.
        truncation: "keep" trains completions that ran out of tokens or turns like others; "mask" keeps them in the
            baseline and trains none of their tokens.
        max_new_tokens: The run's budget of a completion, at least 1; only "constant" needs it.

    Returns:
        The batch. Its token weights sum to 1, under "constant" to (mean of trained tokens) / max_new_tokens.

    Raises:
        BatchError: two groups of one prompt, a group of one, a trained token whose sampling log-prob is not a finite
            number at most 0, or "constant" without max_new_tokens.
        NoTrainableTrajectoriesError: nothing is left to train.

    Invariants: a pure function; same groups in any order give the same bits.
    """
    ordered = in_training_order(groups)
    trained: list[tuple[Trajectory, float]] = []
    scored: list[float] = []
    for group in ordered:
        for trajectory, advantage in _with_advantages(group, divide_by_std=divide_by_std):
            scored.append(advantage)
            is_masked = truncation == "mask" and trajectory.stop_reason.is_truncation
            if not is_masked and trajectory.num_trained_tokens > 0:
                trained.append((trajectory, advantage))
    if not trained:
        raise nothing_to_train(ordered, "the others have no baseline or are masked as truncated")
    metrics = (*group_metrics(ordered), *advantage_metrics(scored))
    return weigh(trained, normalisation=normalisation, max_new_tokens=max_new_tokens, metrics=metrics)


def nothing_to_train(groups: Sequence[Group], others: str) -> NoTrainableTrajectoriesError:
    """Return the error of a step of which nothing can be trained; ``others`` says why those cannot that did not
    fail."""
    members = [trajectory for group in groups for trajectory in group.trajectories]
    num_lost = {kind: sum(one.failure == kind for one in members) for kind in FailureType if kind.is_excluded}
    way_out = "Mend what failed, then `rollforward resume` with the run's directory scores the step again"
    if num_lost[FailureType.INFRA]:
        way_out += (
            ". The token log goes on answering with failures of sampling: to sample the step again remove run_dir/wal"
            " before"
        )
    return NoTrainableTrajectoriesError(
        f"none of the {len(members)} trajectories can be trained, and a step needs one;"
        f" {', '.join(f'{count} failed as {kind}' for kind, count in num_lost.items())}, {others}. {way_out}"
    )


def in_training_order(groups: Iterable[Group]) -> list[Group]:
    """Return the groups of a step by step and prompt.

    Raises:
        BatchError: two groups of one prompt.
    """
    ordered = sorted(groups, key=lambda group: (group.step, group.prompt))
    if len({(group.step, group.prompt) for group in ordered}) != len(ordered):
        raise BatchError("two groups have the same step and prompt; a prompt is trained once. Merge or drop one")
    return ordered


def weigh(
    trained: Sequence[tuple[Trajectory, float]],
    *,
    normalisation: Normalisation,
    max_new_tokens: int | None = None,
    metrics: tuple[Metric, ...] = (),
) -> StepBatch:
    """Return the batch of the trajectories that a step trains on, with the weights of their tokens.

    Args:
        trained: each with its advantage, in training order; at least one, all with trained tokens and a score.
        normalisation, max_new_tokens: as in `build_step_batch`.
        metrics: what is known of the step.

    Raises:
        BatchError: a sampling log-prob that is none, or "constant" without max_new_tokens.
    """
    weights = _token_weights([one.num_trained_tokens for one, _ in trained], normalisation, max_new_tokens)
    rows: list[TrajectoryRow] = []
    packed: list[PackedBatch] = []
    for (trajectory, advantage), weight in zip(trained, weights, strict=True):
        rows.append(_describe(trajectory, advantage, weight))
        packed.append(_pack_trajectory(trajectory, advantage, weight))
    return StepBatch(rows=tuple(rows), trajectories=tuple(packed), metrics=metrics)


def concatenate(parts: Sequence[PackedBatch]) -> PackedBatch:
    """Return one batch with the sequences of `parts`, which hold different trajectories, end to end.

    Where only some parts have routes or kept sets, the others get -1 and the whole vocabulary.
    """
    counts = [len(part.ids) for part in parts]
    offsets = np.cumsum([0, *counts[:-1]], dtype=np.int32)
    shifted = [
        msgspec.structs.replace(part, trajectory_T=part.trajectory_T + offset)
        for part, offset in zip(parts, offsets, strict=True)
    ]
    arrays = {
        name: np.concatenate([getattr(part, name) for part in shifted])
        for name in PackedBatch.__struct_fields__
        if name not in ("ids", *_OPTIONAL_COLUMNS)
    }
    lengths = [part.token_ids_T.size for part in parts]
    kept_counts_T, kept_ids = _join_kept(lengths, [(part.kept_counts_T, part.kept_ids) for part in parts])
    return PackedBatch(
        ids=tuple(identity for part in parts for identity in part.ids),
        routes_TLK=_join_routes(lengths, [part.routes_TLK for part in parts]),
        kept_counts_T=kept_counts_T,
        kept_ids=kept_ids,
        **arrays,
    )


def _token_weights(
    trained_tokens_N: Sequence[int], normalisation: Normalisation, max_new_tokens: int | None
) -> list[float]:
    """The weight of a token of each trajectory that is trained."""
    num_trajectories = len(trained_tokens_N)
    if normalisation == "trajectory_mean":
        return [1.0 / (tokens * num_trajectories) for tokens in trained_tokens_N]
    if normalisation == "token_mean":
        return [1.0 / sum(trained_tokens_N)] * num_trajectories
    if max_new_tokens is None or max_new_tokens < 1:
        raise BatchError(
            f"max_new_tokens is {max_new_tokens}; normalisation 'constant' divides by it and needs at least 1. Hand in"
            " sampling.max_new_tokens or choose algo.normalisation=trajectory_mean"
        )
    return [1.0 / (num_trajectories * max_new_tokens)] * num_trajectories


def _with_advantages(group: Group, *, divide_by_std: bool) -> list[tuple[Trajectory, float]]:
    """Members that count, by member, each with its advantage; none where fewer than two remain."""
    members = sorted(group.trajectories, key=lambda trajectory: trajectory.id)
    rewards_G = np.array([np.nan if member.reward is None else member.reward for member in members], dtype=np.float64)
    included_mask_G = np.array([not member.is_excluded for member in members], dtype=np.bool_)
    advantages_G = group_advantages(rewards_G, included_mask_G, divide_by_std=divide_by_std)
    if included_mask_G.sum() < 2:
        return []
    return [(members[i], float(advantages_G[i])) for i in np.flatnonzero(included_mask_G)]


def _describe(trajectory: Trajectory, advantage: float, weight: float) -> TrajectoryRow:
    """The light metadata of a trajectory that is trained, and so has a score."""
    segments = trajectory.segments
    starts = [np.diff(segment.trained_mask_T.astype(np.int8), prepend=0) == 1 for segment in segments]
    assert trajectory.reward is not None
    return TrajectoryRow(
        id=trajectory.id,
        task=trajectory.task,
        reward=float(trajectory.reward),
        advantage=advantage,
        token_weight=weight,
        segment_lengths=tuple(segment.token_ids_T.size for segment in segments),
        num_trained_tokens=trajectory.num_trained_tokens,
        num_turns=sum(int(is_start_T.sum()) for is_start_T in starts),
        stop_reason=trajectory.stop_reason,
        failure=trajectory.failure,
        policy_version=trajectory.policy_version,
    )


def _pack_trajectory(trajectory: Trajectory, advantage: float, weight: float) -> PackedBatch:
    """The segments of one trajectory, end to end."""
    segments = trajectory.segments
    rows = [_predictor_rows(segment) for segment in segments]
    trained_mask_T = np.concatenate([mask_T for _, mask_T, _ in rows])
    behavior_logprobs_T = np.concatenate([logprobs_T for _, _, logprobs_T in rows])
    trained = behavior_logprobs_T[trained_mask_T]
    if not np.all(np.isfinite(trained) & (trained <= 0)):
        worst = trained[~(np.isfinite(trained) & (trained <= 0))][0]
        raise BatchError(
            f"trajectory {trajectory.id} has a behavior log-prob of {worst} at a trained token; it must be finite and"
            " at most 0. A policy that blew up draws so: begin again with a lower optim.lr"
        )
    token_ids_T = np.concatenate([segment.token_ids_T for segment in segments])
    target_ids_T = np.concatenate([target_ids_T for target_ids_T, _, _ in rows])
    lengths = [segment.token_ids_T.size for segment in segments]
    kept_counts_T, kept_ids = _join_kept(lengths, [_predictor_kept(segment.kept) for segment in segments])
    if kept_counts_T is not None and kept_ids is not None:
        _check_drawn_from_kept(trajectory.id, target_ids_T, trained_mask_T, kept_counts_T, kept_ids)
    return PackedBatch(
        token_ids_T=token_ids_T,
        sequence_lengths_B=np.array(lengths, dtype=np.int32),
        target_ids_T=target_ids_T,
        trained_mask_T=trained_mask_T,
        behavior_logprobs_T=np.where(trained_mask_T, behavior_logprobs_T, np.float32(0)),
        advantages_T=np.where(trained_mask_T, np.float32(advantage), np.float32(0)),
        token_weight_T=np.where(trained_mask_T, np.float32(weight), np.float32(0)),
        trajectory_T=np.zeros(token_ids_T.shape, dtype=np.int32),
        trajectory_tokens_N=np.array([trained_mask_T.sum()], dtype=np.int32),
        ids=(trajectory.id,),
        routes_TLK=_join_routes(lengths, [segment.routes_TLK for segment in segments]),
        kept_counts_T=kept_counts_T,
        kept_ids=kept_ids,
    )


def _predictor_rows(segment: Segment) -> tuple[Int32Array, BoolArray, Float32Array]:
    """Move target id, trained mask and behavior log-prob from each token to the position before it, which predicts it.

    The first token, which nothing predicts, falls off; the last row predicts nothing and is inert.
    """
    target_ids_T = np.append(segment.token_ids_T[1:], np.int32(0))
    trained_mask_T = np.append(segment.trained_mask_T[1:], np.False_)
    behavior_logprobs_T = np.append(segment.behavior_logprobs_T[1:], np.float32(0))
    return target_ids_T, trained_mask_T, behavior_logprobs_T


def _predictor_kept(kept: KeptSets | None) -> tuple[Int32Array | None, Int32Array | None]:
    """Move every token's kept set to the position before it; the last position predicts nothing."""
    if kept is None:
        return None, None
    return np.append(kept.counts_T[1:], np.int32(0)), kept.token_ids[kept.counts_T[0] :]


def _join_routes(lengths: Sequence[int], parts: Sequence[Int16Array | None]) -> Int16Array | None:
    """Routes end to end, -1 for a part without; None where no part has any."""
    shape = next((part.shape[1:] for part in parts if part is not None), None)
    if shape is None:
        return None
    unknown = np.int16(-1)
    return np.concatenate(
        [
            np.full((length, *shape), unknown) if part is None else part
            for length, part in zip(lengths, parts, strict=True)
        ]
    )


def _join_kept(
    lengths: Sequence[int], parts: Sequence[tuple[Int32Array | None, Int32Array | None]]
) -> tuple[Int32Array | None, Int32Array | None]:
    """Counts and ids end to end, the whole vocabulary for a part without; None where no part has any."""
    if all(counts is None for counts, _ in parts):
        return None, None
    counts_T = [
        np.zeros(length, np.int32) if counts is None else counts
        for length, (counts, _) in zip(lengths, parts, strict=True)
    ]
    return np.concatenate(counts_T), np.concatenate([ids for _, ids in parts if ids is not None])


def _check_drawn_from_kept(
    identity: RequestId,
    target_ids_T: Int32Array,
    trained_mask_T: BoolArray,
    kept_counts_T: Int32Array,
    kept_ids: Int32Array,
) -> None:
    """Refuse a trained token that is not in the set that it was drawn from."""
    row = np.repeat(np.arange(kept_counts_T.size), kept_counts_T)
    is_in_T = np.zeros(kept_counts_T.size, np.bool_)
    is_in_T[row[kept_ids == target_ids_T[row]]] = True
    outside = np.flatnonzero(trained_mask_T & (kept_counts_T > 0) & ~is_in_T)
    if outside.size:
        raise BatchError(
            f"trajectory {identity}: token {target_ids_T[outside[0]]} at position {outside[0] + 1} is not in the kept"
            " set that it was drawn from; tokens and sets do not belong together. Sample the step again"
        )
