"""Proves: shares cover every request once, follow identities alone, and come back in the order of the requests."""

import numpy as np
import pytest

from rollforward.rollout.router import merge_completions, split_requests
from rollforward.rollout.types import Completion, Request, StopReason
from tests.helpers.replicas import make_requests


def _complete(request: Request) -> Completion:
    return Completion(
        id=request.id,
        token_ids=np.array([request.id.prompt], np.int32),
        sampled_mask=np.ones(1, np.bool_),
        behavior_logprobs=np.zeros(1, np.float32),
        policy_version=1,
        stop_reason=StopReason.EOS,
    )


@pytest.mark.parametrize("num_replicas", [1, 2, 3, 9])
def test_shares_partition_the_requests_and_merge_back(num_replicas: int) -> None:
    requests = make_requests([3, 4, 5, 6], members=3)[::-1]
    shares = split_requests(requests, num_replicas)
    assert len(shares) == num_replicas
    assert sorted(str(request.id) for share in shares for request in share) == sorted(str(r.id) for r in requests)
    for replica, share in enumerate(shares):
        assert all(request.id.prompt % num_replicas == replica for request in share)
    answers = [[_complete(request) for request in share[::-1]] for share in shares]
    assert [completion.id for completion in merge_completions(requests, answers)] == [r.id for r in requests]


def test_part_of_the_requests_goes_to_the_same_replicas() -> None:
    """A restarted run may ask for what is missing only; each request must reach the log that holds it."""
    requests = make_requests([3, 4, 5, 6], members=2)
    placed = {r.id: replica for replica, share in enumerate(split_requests(requests, 3)) for r in share}
    for replica, share in enumerate(split_requests(requests[3:], 3)):
        assert all(placed[request.id] == replica for request in share)
