"""A recipe of a few steps and the command lines of tests/e2e, as a user types them."""

import json
import sys
from pathlib import Path

from tests.helpers.runs import TASK

RECIPE = """
summary: "a few steps"
runs:
  - name: sft
    verb: sft
    config:
      start: {{type: fresh, preset: tiny, tokenizer: {{vocab_size: 384, num_conversations: 200}}}}
      tasks: &tasks [{task}]
      optim: {{type: adamw, lr: 2.0e-3}}
      steps: 6
      micro_batch_tokens: 256
      max_prompt_tokens: 40
      max_answer_tokens: 8
      eval: {{prompts: 8, every_steps: 6}}
      checkpoint_every_steps: 2
      tracker: {{mode: {wandb}}}
  - name: grpo
    verb: train
    config:
      model_dir: ${{run_dir:sft}}/model
      tasks: *tasks
      optim: {{type: adamw, lr: 1.0e-3}}
      sampling: {{max_new_tokens: 6}}
      steps: 6
      prompts_per_step: 4
      micro_batch_tokens: 256
      max_prompt_tokens: 40
      eval: {{prompts: 8, every_steps: 3}}
      checkpoint_every_steps: 2
      tracker: {{mode: {wandb}}}
"""


def write_recipe(directory: Path, *, wandb: str = "disabled") -> Path:
    """The recipe as a file."""
    path = directory / "few.yaml"
    path.write_text(RECIPE.format(task=json.dumps(TASK), wandb=wandb))
    return path


def command(*words: str) -> list[str]:
    """`rollforward WORDS` with this Python."""
    return [sys.executable, "-c", "import sys; from rollforward.conf.cli import main; sys.exit(main())", *words]
