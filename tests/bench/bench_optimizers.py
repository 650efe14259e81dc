"""AdamW against HybridMuon on the tiny recipe's SFT: `python tests/bench/bench_optimizers.py --out DIR`.

Every (optimizer, learning rate, seed) is a run of `rollforward sft` in a process of its own with one thread, on the
recipe's sums and products without the demonstrations of "I do not know", so that accuracy measures skill. The seed
chooses weights and data. Prints, of the grid's best learning rate of each optimizer (mean of final accuracy over
seeds), AdamW's final held-out accuracy and the step from which HybridMuon has it and keeps it.

DIR/results.jsonl has a line per finished run; what is there is not run again, and what was interrupted goes on. Only
--report prints what is there and runs nothing.
"""

import argparse
import json
import os
import subprocess
import sys
from collections import defaultdict
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from pathlib import Path
from typing import Any, NamedTuple

from rollforward.conf.recipe import load_recipe

RECIPE = "tiny"
WARMUP_STEPS = 20
_COMMAND = "import sys; from rollforward.conf.cli import main; sys.exit(main())"


class Cell(NamedTuple):
    """One run of the grid."""

    optimizer: str
    lr: float
    seed: int
    steps: int

    @property
    def name(self) -> str:
        return f"{self.optimizer}-{self.lr:g}-{self.seed}-{self.steps}"


class Curve(NamedTuple):
    """What a run reached."""

    cell: Cell
    accuracy: dict[int, float]
    """Step -> held-out accuracy, mean over tasks."""

    @property
    def final(self) -> float:
        return self.accuracy[max(self.accuracy)]


def recipe_of(cell: Cell, options: argparse.Namespace) -> dict[str, Any]:
    """A recipe of one run: the shipped one's first, with the cell's optimizer and tasks that are all skill."""
    run = next(run for run in load_recipe(RECIPE).runs if run.verb == "sft")
    warmup_steps = min(WARMUP_STEPS, cell.steps)
    optim = {"type": cell.optimizer, "lr": cell.lr, "warmup_steps": warmup_steps}
    if not options.constant:
        optim["decay_steps"] = cell.steps - warmup_steps
    config = {
        **run.config,
        "tasks": [_without_texts(task) for task in run.config["tasks"]],
        "start": {**run.config["start"], "seed": cell.seed},
        "seed": cell.seed,
        "optim": optim,
        "steps": cell.steps,
        "eval": {"every_steps": options.every, "prompts": options.prompts},
        "tracker": {"mode": "disabled"},
    }
    return {"summary": cell.name, "runs": [{"name": "sft", "verb": "sft", "config": config}]}


def _without_texts(task: Mapping[str, Any]) -> dict[str, Any]:
    """The task without demonstrations of a fixed text; what they were for gets its right answer, or its call."""
    kept = [one for one in task.get("demonstrate", []) if one["type"] != "text"]
    others = {key: value for key, value in task.items() if key != "demonstrate"}
    return {**others, "demonstrate": kept} if kept else others


def run_cell(cell: Cell, options: argparse.Namespace) -> Curve:
    """Train one run to its end, from where it was interrupted, and read its curve.

    Raises:
        RuntimeError: it failed; names its log.
    """
    directory = options.out / cell.name
    directory.mkdir(parents=True, exist_ok=True)
    recipe = directory / "recipe.yaml"
    recipe.write_text(json.dumps(recipe_of(cell, options), indent=1))  # JSON is YAML
    words = ["sft", f"recipe={recipe}", f"run_dir={directory}", *options.set]
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "OMP_WAIT_POLICY": "PASSIVE"}
    with (directory / "log.txt").open("a") as log:
        done = subprocess.run(
            [sys.executable, "-c", _COMMAND, *words], stdout=log, stderr=log, env=environment, check=False
        )
    if done.returncode != 0:
        raise RuntimeError(f"{cell.name} ended with {done.returncode}; see {directory / 'log.txt'}")
    return Curve(cell, read_accuracy(directory / "sft" / "metrics.jsonl"))


def read_accuracy(metrics: Path) -> dict[int, float]:
    """Step -> mean over tasks; a step that was repeated counts once."""
    found: dict[int, float] = {}
    for line in metrics.read_text().splitlines():
        record = json.loads(line)
        values = [value for name, value in record.items() if name.startswith("val-core/")]
        if values:
            found[record["step"]] = sum(values) / len(values)
    return found


def step_of(accuracy: Mapping[int, float], target: float) -> int | None:
    """The step from which every evaluation has at least the target; None where the last has not.

    Example: {10: 0.5, 20: 0.4, 30: 0.6}, 0.5 -> 30.
    """
    reached: int | None = None
    for step in sorted(accuracy, reverse=True):
        if accuracy[step] < target:
            break
        reached = step
    return reached


def _mean(values: Sequence[float]) -> float:
    return sum(values) / len(values)


def report(curves: Sequence[Curve]) -> str:
    """The grid, and the comparison of the best."""
    grid: dict[tuple[str, float, int], dict[int, Curve]] = defaultdict(dict)
    for curve in curves:
        grid[curve.cell.optimizer, curve.cell.lr, curve.cell.steps][curve.cell.seed] = curve
    lines = [f"{'optimizer':<14}{'lr':>10}{'steps':>7}{'seeds':>7}{'final accuracy':>16}"]
    for (optimizer, lr, steps), by_seed in sorted(grid.items()):
        mean = _mean([curve.final for curve in by_seed.values()])
        lines.append(f"{optimizer:<14}{lr:>10g}{steps:>7}{len(by_seed):>7}{mean:>16.4f}")
    adamw = _best(grid, "adamw")
    if adamw is None:
        return "\n".join(lines)
    best_muon = _best(grid, "hybrid_muon")
    for key in sorted(grid):
        if key[0] == "hybrid_muon":
            lines += ["", *_compare(adamw[2], grid[adamw], key, grid[key], is_best=key == best_muon)]
    return "\n".join(lines)


def _best(grid: Mapping[tuple[str, float, int], Mapping[int, Curve]], optimizer: str) -> Any:
    """The key with most seeds, then with the highest mean of final accuracy."""
    keys = [key for key in grid if key[0] == optimizer]
    return max(keys, key=lambda key: (len(grid[key]), _mean([c.final for c in grid[key].values()])), default=None)


def _compare(
    adamw_steps: int,
    adamw: Mapping[int, Curve],
    key: tuple[str, float, int],
    muon: Mapping[int, Curve],
    *,
    is_best: bool,
) -> list[str]:
    any_adamw = next(iter(adamw.values())).cell
    lines = [
        f"hybrid_muon lr {key[1]:g}, {key[2]} steps{' (best)' if is_best else ''} against adamw lr {any_adamw.lr:g},"
        f" {adamw_steps} steps (best)",
        f"{'seed':>6}{'adamw final':>14}{'muon final':>14}{'muon has it from step':>24}{'of its steps':>14}",
    ]
    ratios: list[float | None] = []
    for seed in sorted(adamw.keys() & muon.keys()):
        target = adamw[seed].final
        step = step_of(muon[seed].accuracy, target)
        ratios.append(None if step is None else step / adamw_steps)
        shown = ("never", "") if step is None else (f"{step}", f"{step / adamw_steps:.2f}x")
        lines.append(f"{seed:>6}{target:>14.4f}{muon[seed].final:>14.4f}{shown[0]:>24}{shown[1]:>14}")
    reached = [ratio for ratio in ratios if ratio is not None]
    if ratios and len(reached) == len(ratios):
        lines.append(f"mean {_mean(reached):.2f}x, worst {max(reached):.2f}x")
    else:
        lines.append(f"reached on {len(reached)} of {len(ratios)} seeds")
    return lines


def _options(argv: Sequence[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True, help="directory of runs and results")
    parser.add_argument("--optimizers", nargs="+", default=["adamw", "hybrid_muon"])
    parser.add_argument("--lrs", nargs="+", type=float, default=[1e-3, 3e-3, 1e-2])
    parser.add_argument("--seeds", nargs="+", type=int, default=[0, 1, 2])
    parser.add_argument("--steps", type=int, default=600)
    parser.add_argument("--muon-steps", type=int, help="length of HybridMuon's schedule where it is another one")
    parser.add_argument("--every", type=int, default=30, help="steps between evaluations")
    parser.add_argument("--prompts", type=int, default=200, help="held-out questions of each task")
    parser.add_argument("--constant", action="store_true", help="a rate that does not fall after the warm-up")
    parser.add_argument("--jobs", type=int, default=1, help="runs at once, a thread each")
    parser.add_argument("--set", nargs="*", default=[], help="further overrides of every run: optim.eps=1e-10")
    parser.add_argument("--report", action="store_true", help="run nothing")
    options = parser.parse_args(argv)
    options.out = options.out.resolve()
    return options


def _cells(options: argparse.Namespace) -> list[Cell]:
    """Seeds last, so that a grid can be read early."""
    steps = {"hybrid_muon": options.muon_steps or options.steps}
    return [
        Cell(optimizer, lr, seed, steps.get(optimizer, options.steps))
        for seed in options.seeds
        for lr in options.lrs
        for optimizer in options.optimizers
    ]


def _read(results: Path) -> dict[Cell, Curve]:
    found: dict[Cell, Curve] = {}
    for line in results.read_text().splitlines() if results.exists() else ():
        record = json.loads(line)
        cell = Cell(*record["cell"])
        found[cell] = Curve(cell, {int(step): value for step, value in record["accuracy"].items()})
    return found


def main(argv: Sequence[str]) -> int:
    """Runs what is missing of the grid and prints it.

    Returns:
        1 where a run failed.
    """
    options = _options(argv)
    options.out.mkdir(parents=True, exist_ok=True)
    results = options.out / "results.jsonl"
    curves = _read(results)
    missing = [] if options.report else [cell for cell in _cells(options) if cell not in curves]
    failed = False
    with ThreadPoolExecutor(options.jobs) as pool, results.open("a") as file:
        for future in as_completed([pool.submit(run_cell, cell, options) for cell in missing]):
            try:
                curve = future.result()
            except RuntimeError as error:
                failed = True
                _say(f"failed: {error}")
                continue
            curves[curve.cell] = curve
            file.write(json.dumps({"cell": curve.cell, "accuracy": curve.accuracy}) + "\n")
            file.flush()
            _say(f"{curve.cell.name}: final accuracy {curve.final:.4f}")
    _say(report(list(curves.values())))
    return int(failed)


def _say(text: str) -> None:
    sys.stdout.write(text + "\n")
    sys.stdout.flush()


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
