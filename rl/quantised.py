"""The check that training goes through the published formats: reports of all learner ranks against the model's plan.

A pure function of reports. What a rank counts is in `model/published.py`.
"""

from collections import Counter
from collections.abc import Mapping, Sequence

from rollforward.model.config import ModelConfig
from rollforward.model.published import QUANTISED
from rollforward.model.shapes import tensor_specs
from rollforward.model.train_config import Precision
from rollforward.rl.errors import QuantisationError


def planned_quantised(config: ModelConfig, precision: Precision) -> dict[str, int]:
    """Return how many official tensors the forward must take through each format that rounds.

    Example: in precision fp32 none: every number is 0.
    """
    if precision == "fp32":
        return dict.fromkeys(QUANTISED, 0)
    counts = Counter(spec.format for spec in tensor_specs(config))
    return {name: counts[name] for name in QUANTISED}


def check_quantised(reports: Sequence[Mapping[str, int]], config: ModelConfig, precision: Precision) -> None:
    """Compare what the learner's ranks report with the plan.

    Args:
        reports: by rank, format -> number of official tensors whose forward value passed through it.
        config: the model.
        precision: number formats of the forward.

    Raises:
        QuantisationError: a number differs; names every rank, format and both numbers.
    """
    planned = planned_quantised(config, precision)
    wrong = [
        f"rank {rank} takes {report.get(name, 0)} tensors through {name}, planned are {count}"
        for rank, report in enumerate(reports)
        for name, count in planned.items()
        if report.get(name, 0) != count
    ]
    if wrong:
        raise QuantisationError(
            f"{'; '.join(wrong)} (precision {precision}). The learner would not train the weights that engines sample"
            " with, so nothing is trained. This is no setting of yours: check that all processes run one version of"
            " rollforward"
        )
