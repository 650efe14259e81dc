"""A Ray cluster of several nodes on this machine: each has its own node id, address, raylet and object store.

All see the same files, as nodes of a cluster see a shared directory. The cluster has its own ports and directory, and
is ended by process id.
"""

import os
import shutil
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import pytest
import ray
from ray._private.authentication.authentication_token_setup import ensure_token_if_auth_enabled
from ray._raylet import GcsClient  # type: ignore[attr-defined]
from ray.cluster_utils import Cluster
from ray.core.generated import autoscaler_pb2

ROLLOUT = {"rollout": 1.0}
"""What a node must have to host one replica."""
autoscaler: Any = autoscaler_pb2
_STORE_BYTES = 80_000_000


class Nodes:
    """A head, to which drivers connect, and nodes that have what replicas need. A context manager."""

    def __init__(self) -> None:
        """Start the head."""
        self._directory = Path(tempfile.mkdtemp(prefix="rfn-", dir="/tmp"))  # short: Ray puts sockets below it
        (self._directory / "ray").mkdir()
        self._environment = pytest.MonkeyPatch()
        # Else it would be entered as this machine's own cluster, which others look for; and nodes need pip for wheels.
        self._environment.setenv("RAY_TMPDIR", str(self._directory))
        self._environment.setenv("PATH", f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}")
        ensure_token_if_auth_enabled(None, create_token_if_missing=True)
        self._num_added = 1
        self.cluster = Cluster(
            initialize_head=True,
            head_node_args={
                "include_dashboard": False,
                "object_store_memory": _STORE_BYTES,
                # Every answer is an object of the node that gave it, however small; by default only from 100 KB on.
                "_system_config": {"max_direct_call_object_size": 1},
            },
        )

    def __enter__(self) -> "Nodes":
        return self

    def __exit__(self, *_error: object) -> None:
        ray.shutdown()
        self.cluster.shutdown()
        self._environment.undo()
        shutil.rmtree(self._directory, ignore_errors=True)

    @property
    def address(self) -> str:
        """Of the head."""
        assert self.cluster.address is not None
        return self.cluster.address

    def have(self, num_nodes: int, **resources: float) -> None:
        """Let there be so many nodes beside the head; new ones get these resources, by default for one replica."""
        while len(self.cluster.worker_nodes) < num_nodes:
            self._num_added += 1
            self.cluster.add_node(
                node_ip_address=f"127.0.0.{self._num_added}",
                resources=resources or ROLLOUT,
                object_store_memory=_STORE_BYTES,
            )

    def kill(self, node_id: str) -> None:
        """SIGKILL to a node's raylet, which its workers follow."""
        self.cluster.remove_node(self._node(node_id), allow_graceful=False)

    def drain(self, node_id: str, deadline_s: float) -> None:
        """Say what a scheduler says of a node that it is about to take away."""
        client: Any = GcsClient(address=self.address)  # there is no public form
        reason = autoscaler.DrainNodeReason.Value("DRAIN_NODE_REASON_PREEMPTION")
        deadline_ms = int((time.time() + deadline_s) * 1000)
        is_accepted, why = client.drain_node(node_id, reason, "taken away", deadline_ms)
        assert is_accepted, why

    def forget(self, node_id: str) -> None:
        """What is left of a drained node goes."""
        self.kill(node_id)

    def _node(self, node_id: str) -> Any:
        (node,) = (node for node in self.cluster.worker_nodes if node.node_id == node_id)
        return node
