"""Configuration of tasks: a union told apart by `type`. One class a kind of task; its file beside this one says what
the fields do.
"""

from typing import Annotated, Any

import msgspec


class ReasoningGymConfig(
    msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, tag_field="type", tag="reasoning_gym"
):
    """A dataset of the reasoning-gym library with the library's own verifier (`reasoning_gym.py`)."""

    name: Annotated[str, msgspec.Meta(pattern=r"^[a-z0-9][a-z0-9_-]*$")]
    """The task's name in the run; metrics carry it."""
    dataset: str
    """Name of the dataset in reasoning-gym, such as `chain_sum`."""
    params: dict[str, Any] = {}
    """Parameters of the dataset, by the library's names; what is left out has the library's default."""
    seed: Annotated[int, msgspec.Meta(ge=0, lt=1 << 32)] = 0
    """Chooses the questions. Another seed also gives other held-out questions, so accuracies are comparable only at the
    same seed.
    """
    train_size: Annotated[int, msgspec.Meta(ge=1, le=1 << 24)] = 65536
    """Examples to train on in one epoch; texts may repeat among them. With several tasks it is also the task's share in
    the mixture.
    """
    heldout_size: Annotated[int, msgspec.Meta(ge=1, le=100_000)] = 200
    """Questions, all different, that are kept for evaluation."""
    partial_credit: bool = True
    """Whether a reward may lie between 0 and 1 where the verifier gives it. Many of the library's verifiers pay for a
    wrong answer that contains the right one, which a policy learns to exploit; False rewards full marks only.
    """
    max_answer_chars: Annotated[int, msgspec.Meta(ge=1)] = 4096
    """A longer answer scores 0 without being read, which bounds the verifier's time."""


TaskConfig = ReasoningGymConfig
"""Any task. A new kind joins here and in `registry.py`."""
