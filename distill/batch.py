"""Groups of trajectories to the batch of one step of distillation. Masks and weights of tokens are `rl/batch.py`'s."""

from collections.abc import Sequence

from rollforward.rl.algorithms import Normalisation
from rollforward.rl.batch import StepBatch, in_training_order, nothing_to_train, weigh
from rollforward.rl.metrics import group_metrics
from rollforward.rollout.types import Group


def build_distill_batch(groups: Sequence[Group], *, normalisation: Normalisation, max_new_tokens: int) -> StepBatch:
    """Return the batch of one step: every trajectory that says something about the policy, whatever its reward.

    Infra and data failures are left out, as in RL. A single completion of a prompt is trained like others: a teacher
    needs no baseline. Advantages are 0.

    Args:
        groups: the step's groups in any order.
        normalisation, max_new_tokens: weights of tokens, as in ``build_step_batch``.

    Raises:
        BatchError: two groups of one prompt, or a sampling log-prob that is none.
        NoTrainableTrajectoriesError: nothing is left to train.

    Invariants: a pure function; same groups in any order give the same bits.
    """
    ordered = in_training_order(groups)
    members = sorted((one for group in ordered for one in group.trajectories), key=lambda one: one.id)
    trained = [(one, 0.0) for one in members if not one.is_excluded and one.num_trained_tokens > 0]
    if not trained:
        raise nothing_to_train(ordered, "the others have no tokens")
    return weigh(
        trained, normalisation=normalisation, max_new_tokens=max_new_tokens, metrics=tuple(group_metrics(ordered))
    )
