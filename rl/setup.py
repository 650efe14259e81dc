"""What every verb of this folder needs before it starts: tasks, tokenizer and model, checked before anything is
allocated."""

from collections.abc import Sequence
from pathlib import Path

import msgspec

from rollforward.model.config import ModelConfig, load_model_config
from rollforward.model.encoding import ChatEncoding
from rollforward.model.tokenizer import Tokenizer
from rollforward.rl.errors import ModelDirectoryError
from rollforward.rl.sampling import PromptEncoder
from rollforward.rl.tasks.config import TaskConfig
from rollforward.rl.tasks.registry import build_tasks
from rollforward.rl.tasks.types import Task


class Parts(msgspec.Struct, frozen=True, kw_only=True):
    """Model and data of a run."""

    model_config: ModelConfig
    """The model's hyper-parameters."""
    encoding: ChatEncoding
    """Conversations to tokens."""
    encoder: PromptEncoder
    """Prompts to tokens, with the run's limit."""
    tasks: tuple[Task, ...]
    """What is asked."""


def load_parts(model_dir: Path, task_configs: Sequence[TaskConfig], *, max_prompt_tokens: int) -> Parts:
    """Load what a run needs besides weights.

    Raises:
        ModelDirectoryError: tokenizer and model do not belong together.
        ConfigError, TokenizerError: a file of the model directory is absent or unusable.
        TaskError: a task cannot be built as configured.
    """
    config = load_model_config(model_dir / "config.json")
    tokenizer = Tokenizer.load(model_dir)
    if tokenizer.vocab_size > config.vocab_size or tokenizer.eos_id != config.eos_token_id:
        raise ModelDirectoryError(
            f"{model_dir}: the tokenizer has {tokenizer.vocab_size} entries and ends with id"
            f" {tokenizer.eos_id}, the model has"
            f" vocab_size {config.vocab_size} and eos_token_id {config.eos_token_id}; they must belong together."
            " Take both from one checkpoint"
        )
    encoding = ChatEncoding(tokenizer)
    encoder = PromptEncoder(encoding, max_prompt_tokens=max_prompt_tokens)
    return Parts(model_config=config, encoding=encoding, encoder=encoder, tasks=build_tasks(task_configs))
