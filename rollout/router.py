"""Which replica serves which request, and completions back in the order of the requests."""

from collections.abc import Sequence

from rollforward.rollout.types import Completion, Request


def split_requests(requests: Sequence[Request], num_replicas: int) -> list[list[Request]]:
    """Return one share a replica: a prompt's members stay together, prompt p goes to replica p mod num_replicas.

    The rule depends on identities alone, so a restarted run asks the replica whose log holds the request.
    """
    shares: list[list[Request]] = [[] for _ in range(num_replicas)]
    for request in requests:
        shares[request.id.prompt % num_replicas].append(request)
    return shares


def merge_completions(requests: Sequence[Request], shares: Sequence[Sequence[Completion]]) -> list[Completion]:
    """Return the completions of all shares in the order of the requests.

    Raises:
        KeyError: a share lacks a request's completion; a bug here.
    """
    by_id = {completion.id: completion for share in shares for completion in share}
    return [by_id[request.id] for request in requests]
