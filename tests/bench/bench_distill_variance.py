"""How noisy distillation's gradient is: the whole vocabulary against the sampled token, with and without its baseline.

`python tests/bench/bench_distill_variance.py --student DIR --teacher DIR --recipe tiny`, two model directories in the
official layout and the tasks of a recipe's first run of RL or distillation; or without any of them, a pair of tiny
models from --seed and prompts of random tokens. The student answers at temperature 1 (the first turn only), in
--mini-batches independent mini-batches; each gives one gradient per estimator, by backward through the real
transformer, of the head and of the last block's `wo_b`. Estimators: `full` (reverse_kl), `k1` and `k1+baseline`
(sampled_token).

conditional  The prefixes fixed, the tokens drawn anew --draws times: the variance of the head's gradient around `full`
             against its closed form. It checks the code: the ratio must be 1 within its interval.
total        Over mini-batches, tr Cov of an estimator over that of `full`. Distances are to the mean of the other half
             of the mini-batches; H0: the ratio is at most 1, by a paired one-sided sign-flip permutation test on
             log-distances, Holm over all; BCa interval from a bootstrap. `bias p` says how likely projections of the
             mean difference to `full` would be at least as far from 0 if the estimator were unbiased.

Prints tables, and the same as one line of JSON.
"""

import argparse
import json
import math
import sys
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from statistics import NormalDist
from typing import Any, NamedTuple

import msgspec
import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from rollforward.conf.recipe import load_recipe
from rollforward.distill.config import DistillLoss, ReverseKL, SampledToken
from rollforward.distill.losses import DistillInputs, DistillOutput, distill_loss
from rollforward.kernels.loss.linear_logprob import linear_logprob
from rollforward.model.config import preset
from rollforward.model.encoding import ChatEncoding
from rollforward.model.init import fresh_params
from rollforward.model.scoring import ScoringBatch, target_hidden
from rollforward.model.transformer import Model, load_model, packed_batch
from rollforward.rl.prompts import PromptSource
from rollforward.rl.tasks.config import TaskConfig
from rollforward.rl.tasks.registry import build_tasks

Floats = NDArray[np.float64]
FULL = "full"
ESTIMATORS: dict[str, DistillLoss] = {
    FULL: ReverseKL(),
    "k1": SampledToken(),
    "k1+baseline": SampledToken(baseline=True),
}
ALPHA = 0.01
NUM_DIRECTIONS = 256
_NORMAL = NormalDist()


# Statistics


def split_half_distances(gradients_MP: Floats) -> Floats:
    """Return [M] squared distances of each gradient to the mean of the other half of them (even and odd ones)."""
    even, odd = gradients_MP[0::2].mean(0), gradients_MP[1::2].mean(0)
    centres = (odd, even)
    return np.array([((one - centres[index % 2]) ** 2).sum() for index, one in enumerate(gradients_MP)])


def sign_flip_p(values_M: Floats, generator: np.random.Generator, *, permutations: int) -> float:
    """Return the one-sided p-value of "the values are symmetric around 0 or lie below" by random sign flips."""
    signs_SM = generator.choice([-1.0, 1.0], (permutations, len(values_M)))
    reached = signs_SM @ values_M >= values_M.sum() - 1e-12 * np.abs(values_M).sum()
    return (1 + int(reached.sum())) / (1 + permutations)


def bias_p(differences_MJ: Floats, generator: np.random.Generator, *, permutations: int) -> float:
    """Return the p-value of "all J means are 0": how often random signs of whole rows give a |mean| / size, the largest
    over J, at least as large. Right for rows symmetric around their mean, whatever the dependence over J."""
    size_J = np.sqrt((differences_MJ**2).sum(0))
    scaled_MJ = differences_MJ / np.where(size_J > 0, size_J, 1)
    signs_SM = generator.choice([-1.0, 1.0], (permutations, len(differences_MJ)))
    observed = np.abs(scaled_MJ.sum(0)).max()
    reached = np.abs(signs_SM @ scaled_MJ).max(1) >= observed - 1e-12
    return (1 + int(reached.sum())) / (1 + permutations)


def holm(p_values: Sequence[float]) -> list[float]:
    """Return the p-values adjusted by Holm for all of them together, in their order."""
    adjusted, largest = [0.0] * len(p_values), 0.0
    for rank, index in enumerate(np.argsort(p_values, kind="stable")):
        largest = max(largest, min(1.0, (len(p_values) - rank) * p_values[index]))
        adjusted[index] = largest
    return adjusted


def ratio_interval(
    above_M: Floats, below_M: Floats, generator: np.random.Generator, *, resamples: int, level: float = 1 - ALPHA
) -> tuple[float, float]:
    """Return the BCa bootstrap interval of mean(above) / mean(below), pairs resampled together."""
    count = len(above_M)
    observed = above_M.mean() / below_M.mean()
    index_SM = generator.integers(0, count, (resamples, count))
    drawn_S = np.sort(above_M[index_SM].mean(1) / below_M[index_SM].mean(1))
    jackknife_M = (above_M.sum() - above_M) / (below_M.sum() - below_M)
    centred_M = jackknife_M.mean() - jackknife_M
    spread = (centred_M**2).sum()
    acceleration = (centred_M**3).sum() / (6 * spread**1.5) if spread > 0 else 0.0
    below = ((drawn_S < observed).sum() + 0.5 * (drawn_S == observed).sum()) / resamples
    shift = _NORMAL.inv_cdf(min(max(float(below), 0.5 / resamples), 1 - 0.5 / resamples))

    def quantile(share: float) -> float:
        z = shift + _NORMAL.inv_cdf(share)
        return float(np.quantile(drawn_S, _NORMAL.cdf(shift + z / (1 - acceleration * z))))

    return quantile((1 - level) / 2), quantile((1 + level) / 2)


def closed_form(log_p_RV: Tensor, log_q_RV: Tensor, *, with_baseline: bool) -> Tensor:
    """Return [R]: trace of the covariance, over y ~ p, of the sampled token's gradient by the row's logits.

    sum_v p_v a_v^2 |onehot_v - p|^2 - |p (r - K)|^2, a = r or r - K, |onehot_v - p|^2 = 1 - 2 p_v + sum p^2
    """
    p_RV, r_RV = log_p_RV.exp(), log_p_RV - log_q_RV
    centred_RV = r_RV - (p_RV * r_RV).sum(1, keepdim=True)
    a_RV = centred_RV if with_baseline else r_RV
    length_RV = 1 - 2 * p_RV + (p_RV**2).sum(1, keepdim=True)
    return (p_RV * a_RV**2 * length_RV).sum(1) - ((p_RV * centred_RV) ** 2).sum(1)


class Sketch:
    """A fixed random projection that keeps squared lengths on average: each entry gets a sign and one of `width` sums.
    The identity where there are no more than `exact` entries."""

    def __init__(self, num_entries: int, *, width: int, exact: int, seed: int) -> None:
        generator = torch.Generator().manual_seed(seed)
        self.is_exact = num_entries <= exact
        self._width = width
        if not self.is_exact:
            self._sign = torch.randint(0, 2, (num_entries,), generator=generator, dtype=torch.int8) * 2 - 1
            self._place = torch.randint(0, width, (num_entries,), generator=generator)

    def __call__(self, gradient: Tensor) -> Floats:
        flat = gradient.flatten().double()
        if not self.is_exact:
            flat = flat.new_zeros(self._width).index_add(0, self._place, flat * self._sign)
        return flat.numpy()


# Models and mini-batches


class MiniBatch(NamedTuple):
    """Rows of one mini-batch: what both models' heads read, and the tokens that the student drew there."""

    hidden_RD: Tensor
    """With the graph to `wo_b`."""
    teacher_hidden_RE: Tensor
    token_R: Tensor


class Bench:
    """A student and its teacher, frozen, and the student's own answers."""

    def __init__(self, student: Model, teacher: Model, prompts: Sequence[Sequence[int]], *, seed: int) -> None:
        self.student, self.teacher, self._prompts = student, teacher, prompts
        self._generator = torch.Generator().manual_seed(seed)
        self.matrices = {"head": student.weights.head, "wo_b": student.weights.blocks[-1].attn.wo_b}
        for matrix in self.matrices.values():
            matrix.requires_grad_(True)

    def mini_batches(self, count: int, *, max_new_tokens: int) -> Iterator[MiniBatch]:
        """Independent mini-batches, each with its share of the prompts."""
        size = len(self._prompts) // count
        for index in range(count):
            prompts = self._prompts[index * size : (index + 1) * size]
            yield self.mini_batch(prompts, self.answers(prompts, max_new_tokens))

    def mini_batch(self, prompts: Sequence[Sequence[int]], answers: Sequence[Sequence[int]]) -> MiniBatch:
        """Both models' forward over prompts and answers; the rows are those that predict an answer's tokens."""
        sequences = [[*prompt, *answer] for prompt, answer in zip(prompts, answers, strict=True)]
        token_T = torch.tensor([token for one in sequences for token in one])
        mask = [
            len(prompt) - 1 <= place < len(one) - 1
            for prompt, one in zip(prompts, sequences, strict=True)
            for place in range(len(one))
        ]
        batch = ScoringBatch(
            token_ids_T=token_T,
            sequence_lengths=tuple(map(len, sequences)),
            target_ids_T=token_T.roll(-1),
            scored_mask_T=torch.tensor(mask),
        )
        with torch.no_grad():
            teacher_hidden_RE = target_hidden(self.teacher.transformer, self.teacher.weights, batch)
        hidden_RD = target_hidden(self.student.transformer, self.student.weights, batch)
        return MiniBatch(hidden_RD, teacher_hidden_RE, batch.target_ids_T[batch.scored_mask_T])

    @torch.no_grad()
    def answers(self, prompts: Sequence[Sequence[int]], max_new_tokens: int) -> list[list[int]]:
        """Draw from the student's own distribution; whole prefixes anew for every token, for want of a cache."""
        config, transformer, weights = self.student.config, self.student.transformer, self.student.weights
        answers: list[list[int]] = [[] for _ in prompts]
        going = list(range(len(prompts)))
        for _ in range(max_new_tokens):
            sequences = [[*prompts[index], *answers[index]] for index in going]
            lengths = [len(one) for one in sequences]
            token_T = torch.tensor([token for one in sequences for token in one])
            streams_TMD = transformer.streams(weights, token_T, packed_batch(config, lengths))
            hidden_BD = transformer.hidden(weights, streams_TMD[torch.tensor(lengths).cumsum(0) - 1])
            for index, token in zip(going, self.draw(transformer.logits(weights, hidden_BD)), strict=True):
                answers[index].append(int(token))
            going = [index for index in going if answers[index][-1] != config.eos_token_id]
            if not going:
                break
        return answers

    def draw(self, logits_RV: Tensor) -> Tensor:
        """One token for each row, at temperature 1 from the whole vocabulary."""
        probs_RV = torch.softmax(logits_RV.detach().double(), -1)
        return torch.multinomial(probs_RV, 1, generator=self._generator).squeeze(1)

    def loss(self, estimator: str, batch: MiniBatch, hidden_RD: Tensor, token_R: Tensor) -> DistillOutput:
        """The estimator's loss of some tokens at the rows, a mean over them."""
        teacher_head_VE, rows = self.teacher.weights.head, len(token_R)
        teacher_logprobs_R, _ = linear_logprob(batch.teacher_hidden_RE, teacher_head_VE, token_R, temperature=1.0)
        inputs = DistillInputs(
            teacher="teacher",
            hidden_RD=hidden_RD,
            head_VD=self.matrices["head"],
            teacher_hidden_RE=batch.teacher_hidden_RE,
            teacher_head_VE=teacher_head_VE,
            teacher_logprobs_R=teacher_logprobs_R,
            token_ids_R=token_R,
            row_weight_R=torch.full((rows,), 1 / rows),
            trajectory_R=torch.zeros(rows, dtype=torch.int64),
            num_trajectories=1,
        )
        return distill_loss(ESTIMATORS[estimator], inputs)

    def gradients(self, estimator: str, batch: MiniBatch) -> tuple[float, dict[str, Tensor]]:
        """Loss and its gradient by each matrix, for the tokens that were drawn."""
        loss = self.loss(estimator, batch, batch.hidden_RD, batch.token_R).loss
        found = torch.autograd.grad(loss, tuple(self.matrices.values()), retain_graph=True)
        return float(loss.detach()), dict(zip(self.matrices, found, strict=True))

    def conditional(self, estimator: str, batch: MiniBatch, draws: int) -> tuple[float, list[float]]:
        """Closed form of the variance of the head's gradient at fixed prefixes, and squared distances to `full` of
        tokens drawn anew."""
        head_VD, hidden_RD = self.matrices["head"], batch.hidden_RD.detach()

        def of_head(name: str, token_R: Tensor) -> Tensor:
            return torch.autograd.grad(self.loss(name, batch, hidden_RD, token_R).loss, head_VD)[0].double()

        logits_RV = hidden_RD.double() @ head_VD.detach().double().t()
        teacher_logits_RV = batch.teacher_hidden_RE.double() @ self.teacher.weights.head.detach().double().t()
        # The head's gradient is sum_r w dz_r h_r^T, and rows are drawn independently.
        per_row_R = closed_form(
            logits_RV.log_softmax(-1), teacher_logits_RV.log_softmax(-1), with_baseline=estimator == "k1+baseline"
        )
        closed = float((per_row_R * (hidden_RD.double() ** 2).sum(1)).sum()) / len(batch.token_R) ** 2
        exact = of_head(FULL, batch.token_R)
        distances = [float(((of_head(estimator, self.draw(logits_RV)) - exact) ** 2).sum()) for _ in range(draws)]
        return closed, distances


# Report


def measure(bench: Bench, options: argparse.Namespace) -> dict[str, Any]:
    """Everything that is printed."""
    sketches = {
        name: Sketch(matrix.numel(), width=options.sketch, exact=options.exact_entries, seed=index)
        for index, (name, matrix) in enumerate(bench.matrices.items())
    }
    found: dict[tuple[str, str], list[Floats]] = {(name, one): [] for name in sketches for one in ESTIMATORS}
    # Each draw's squared distance over the closed form of its mini-batch, less 1.
    excess: dict[str, list[float]] = {one: [] for one in ESTIMATORS if one != FULL}
    losses: dict[str, list[float]] = {one: [] for one in ESTIMATORS}
    num_rows = 0
    for batch in bench.mini_batches(options.mini_batches, max_new_tokens=options.new_tokens):
        num_rows += len(batch.token_R)
        for estimator in ESTIMATORS:
            loss, gradients = bench.gradients(estimator, batch)
            losses[estimator].append(loss)
            for name, gradient in gradients.items():
                found[name, estimator].append(sketches[name](gradient))
        for estimator, values in excess.items():
            closed, distances = bench.conditional(estimator, batch, options.draws)
            values += [one / closed - 1 for one in distances]
    stacked = {key: np.stack(rows) for key, rows in found.items()}
    exact = {name: sketch.is_exact for name, sketch in sketches.items()}
    return {
        "mini_batches": options.mini_batches,
        "rows": num_rows,
        "kl": float(np.mean(losses[FULL])),
        "k1": float(np.mean(losses["k1"])),
        "conditional": [_conditional(one, np.array(values)) for one, values in excess.items()],
        "total": totals(stacked, exact, permutations=options.permutations, seed=options.seed),
    }


def _conditional(estimator: str, excess: Floats) -> dict[str, Any]:
    error = _NORMAL.inv_cdf(1 - ALPHA / 2) * excess.std(ddof=1) / math.sqrt(len(excess))
    ratio = 1 + excess.mean()
    interval = [ratio - error, ratio + error]
    return {
        "estimator": estimator,
        "ratio_to_closed_form": float(ratio),
        "interval": [float(one) for one in interval],
        "agrees": bool(interval[0] <= 1 <= interval[1]),
    }


def totals(
    gradients: dict[tuple[str, str], Floats], exact: dict[str, bool], *, permutations: int, seed: int
) -> list[dict[str, Any]]:
    """Compare every estimator with `full` on every matrix; gradients are [M, P] by matrix and estimator."""
    generator = np.random.default_rng(seed)
    rows: list[dict[str, Any]] = []
    for (matrix, estimator), gradients_MP in gradients.items():
        if estimator == FULL:
            continue
        full_MP = gradients[matrix, FULL]
        distance_M, full_M = split_half_distances(gradients_MP), split_half_distances(full_MP)
        directions_PJ = generator.choice([-1.0, 1.0], (full_MP.shape[1], NUM_DIRECTIONS))
        rows.append(
            {
                "matrix": matrix,
                "exact": exact[matrix],
                "estimator": estimator,
                "ratio": float(distance_M.mean() / full_M.mean()),
                "interval": list(ratio_interval(distance_M, full_M, generator, resamples=permutations)),
                "p": sign_flip_p(np.log(distance_M) - np.log(full_M), generator, permutations=permutations),
                "bias_p": bias_p((gradients_MP - full_MP) @ directions_PJ, generator, permutations=permutations),
            }
        )
    for row, adjusted in zip(rows, holm([row["p"] for row in rows]), strict=True):
        row["p_holm"] = adjusted
        row["is_noisier"] = adjusted <= ALPHA
    return rows


def report(found: dict[str, Any]) -> str:
    """The tables."""
    lines = [
        f"{found['mini_batches']} mini-batches, {found['rows']} rows; mean KL(student || teacher) {found['kl']:.4f}"
        f" nats, k1 {found['k1']:.4f}",
        "",
        "conditional variance of the head's gradient, over its closed form",
        f"{'estimator':<14}{'ratio':>9}{'99% interval':>22}{'agrees':>9}",
    ]
    for row in found["conditional"]:
        ratio, agrees = row["ratio_to_closed_form"], "yes" if row["agrees"] else "NO"
        lines.append(f"{row['estimator']:<14}{ratio:>9.4f}{_interval(row):>22}{agrees:>9}")
    lines += [
        "",
        "total variance over that of `full`",
        f"{'matrix':<8}{'entries':<9}{'estimator':<14}{'ratio':>9}{'99% interval':>22}{'p (Holm)':>11}{'bias p':>9}",
    ]
    for row in found["total"]:
        lines.append(
            f"{row['matrix']:<8}{'exact' if row['exact'] else 'sketched':<9}{row['estimator']:<14}{row['ratio']:>9.3f}"
            f"{_interval(row):>22}{row['p_holm']:>11.4f}{row['bias_p']:>9.3f}"
        )
    return "\n".join(lines)


def _interval(row: dict[str, Any]) -> str:
    low, high = row["interval"]
    return f"[{low:.4f}, {high:.4f}]"


# Command line


def seeded_pair(seed: int) -> tuple[Model, Model]:
    """Two tiny models: fresh weights, with a head three times as large so that there is something to be sure of, and
    the same with noise on every matrix."""
    config = preset("tiny")
    student = fresh_params(config, seed=seed)
    student["head.weight"] *= 3
    generator = torch.Generator().manual_seed(seed + 1)
    teacher = {
        name: tensor + 0.025 * tensor.std() * torch.randn(tensor.shape, generator=generator)
        if tensor.is_floating_point() and tensor.dim() >= 2
        else tensor
        for name, tensor in student.items()
    }
    return Model(config, student, precision="native"), Model(config, teacher, precision="native")


def recipe_prompts(model_dir: Path, recipe: str, count: int, *, seed: int) -> list[list[int]]:
    """Prompts of the tasks of the recipe's first run of RL or distillation."""
    run = next(run for run in load_recipe(recipe).runs if run.verb in ("train", "distill"))
    tasks = build_tasks([msgspec.convert(task, TaskConfig) for task in run.config["tasks"]])
    source, encoding = PromptSource(tasks, seed=seed), ChatEncoding.load(model_dir)
    examples, _ = source.draw(source.start(), count)
    return [list(encoding.encode_prompt(one.messages, one.effort, one.tools)) for one in examples]


def _options(argv: Sequence[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--student", type=Path, help="model directory")
    parser.add_argument("--teacher", type=Path, help="model directory with the student's vocabulary")
    parser.add_argument("--recipe", help="whose tasks are asked, a name or a file; else prompts are random tokens")
    parser.add_argument("--precision", choices=["native", "fp32"], default="native", help="of models from directories")
    parser.add_argument("--mini-batches", type=int, default=64)
    parser.add_argument("--sequences", type=int, default=8, help="answers in a mini-batch")
    parser.add_argument("--new-tokens", type=int, default=24, help="at most, of an answer")
    parser.add_argument("--draws", type=int, default=32, help="of each row's token, for the conditional variance")
    parser.add_argument("--permutations", type=int, default=10000, help="and resamples of the bootstrap")
    parser.add_argument("--exact-entries", type=int, default=1 << 17, help="a larger matrix is sketched")
    parser.add_argument("--sketch", type=int, default=4096, help="numbers that a sketch has")
    parser.add_argument("--seed", type=int, default=0, help="of prompts, draws, statistics and the default pair")
    options = parser.parse_args(argv)
    if (options.student is None) != (options.teacher is None):
        parser.error("--student and --teacher go together; give both, or none for a tiny pair")
    if options.recipe and options.student is None:
        parser.error("--recipe needs --student and --teacher; the tiny pair knows no words")
    if options.mini_batches < 4:
        parser.error(f"--mini-batches is {options.mini_batches}; halves need at least 2 each, so give 4 or more")
    return options


def main(argv: Sequence[str]) -> int:
    """Measures and prints.

    Returns:
        1 where a check of the code itself fails: a variance that is not that of the closed form, or a biased estimator.
    """
    options = _options(argv)
    count = options.mini_batches * options.sequences
    load: Callable[[Path], Model] = lambda directory: load_model(directory, precision=options.precision)  # noqa: E731
    student, teacher = (load(options.student), load(options.teacher)) if options.student else seeded_pair(options.seed)
    if options.recipe:
        prompts = recipe_prompts(options.student, options.recipe, count, seed=options.seed)
    else:
        generator = np.random.default_rng(options.seed)
        prompts = generator.integers(2, student.config.vocab_size, (count, 6)).tolist()
    found = measure(Bench(student, teacher, prompts, seed=options.seed), options)
    sys.stdout.write(report(found) + "\n\n" + json.dumps(found) + "\n")
    checks = [row["agrees"] for row in found["conditional"]] + [row["bias_p"] > ALPHA for row in found["total"]]
    return int(not all(checks))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
