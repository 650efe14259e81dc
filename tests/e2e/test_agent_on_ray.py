"""Proves: the recipe for agents runs on real Ray as a user types it: completions call tools in sandboxes of their own,
what they submit is judged by hidden tests in others, and when the run is over nothing of its sandboxes is left.

A few steps, too few to do errands well. That they are learned is test_agent_learning.py's.
"""

import json
import subprocess
import time
from pathlib import Path
from typing import Any

import pytest

from rollforward.sandbox.homes import Home, supervisor_id
from tests.helpers.commands import command

SMALL = (
    "all.tracker.mode=disabled",
    "all.eval.prompts=4",
    "sft.steps=25",
    "sft.optim.decay_steps=0",
    "sft.optim.warmup_steps=5",
    "sft.micro_batch_tokens=512",
    "sft.eval.every_steps=25",
    "grpo.steps=2",
    "grpo.optim.warmup_steps=0",
    "grpo.optim.decay_steps=0",
    "grpo.prompts_per_step=4",
    "grpo.algo.group_size=4",
    "grpo.cluster.learner_ranks=1",
    "grpo.rollout.engines=1",
    "grpo.tracker.answers_every_steps=1",
)


def _lines(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()]


@pytest.mark.timeout(300)
def test_two_steps_with_tools_and_hidden_tests(tmp_path: Path) -> None:
    run_dir = tmp_path / "run"
    homes = {name: Home.of(supervisor_id(str(run_dir / name), 0, [])) for name in ("sft", "grpo")}
    words = command("train", "recipe=tiny_agent", f"run_dir={run_dir}", *SMALL)
    with (tmp_path / "out").open("w") as out, (tmp_path / "err").open("w") as err:
        run = subprocess.Popen(words, stdout=out, stderr=err)
    seen: set[str] = set()
    while run.poll() is None:
        seen |= {name for name, home in homes.items() if home.path.exists()}
        time.sleep(0.1)
    assert run.returncode == 0, (tmp_path / "err").read_text()[-3000:]
    assert seen == {"sft", "grpo"}
    result = json.loads((tmp_path / "out").read_text().strip().splitlines()[-1])
    assert (result["steps"], result["rollout_probs_diff_max"]) == (2, 0.0)
    lines = _lines(run_dir / "grpo" / "metrics.jsonl")
    assert max(line["num_turns/max"] for line in lines) >= 2
    assert sum(line["sandbox/calls"] for line in lines) > 0
    assert [line["failure/infra/rate"] for line in lines] == [0.0, 0.0]
    answers = _lines(run_dir / "grpo" / "answers.jsonl")
    assert any("tool_result" in answer["text"] for answer in answers)
    end_s = time.monotonic() + 60
    while any(home.path.exists() for home in homes.values()):
        assert time.monotonic() < end_s, "a supervisor that nobody needs ends, and its directory with it"
        time.sleep(0.2)
