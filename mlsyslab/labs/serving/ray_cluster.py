"""A Ray of this run's own on this machine, or the cluster that RAY_ADDRESS names. Needs the extra `ray`.

Our own listens on the loopback interface only, asks for a token that only this run knows, shows no dashboard, reports
nothing, keeps its files in a folder of its own, and ends with the run (`ray_guard`).
"""

from __future__ import annotations

import contextlib
import os
import secrets
import subprocess
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from mlsyslab.contract import RunError
from mlsyslab.labs.serving import ray_guard

OBJECT_STORE_BYTES = 80 * 2**20  # about the least that Ray takes; requests do not go through it
LONGEST_FOLDER = 40  # Ray adds 64 characters, and the path of a unix socket has at most 107
ENDED_WITHIN_S = 30.0

# Read by Ray when it is imported, here and in every process of the cluster.
ENVIRONMENT = {
    "RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER": "0",  # as on a laptop: the node's address is 127.0.0.1, and it listens there
    "RAY_AUTH_MODE": "token",
    "RAY_USAGE_STATS_ENABLED": "0",
}
# What RAY_SERVE_THROUGHPUT_OPTIMIZED sets for calls through a handle, without the HTTP server that it opens in a replica.
FAST = {
    "RAY_SERVE_USE_GRPC_BY_DEFAULT": "1",
    "RAY_SERVE_RUN_ROUTER_IN_SEPARATE_LOOP": "0",
    "RAY_SERVE_RUN_USER_CODE_IN_SEPARATE_THREAD": "0",
    "RAY_SERVE_REQUEST_PATH_LOG_BUFFER_SIZE": "1000",
    "RAY_SERVE_FREEZE_GC_ON_STARTUP": "1",
    "RAY_SERVE_LOG_TO_STDERR": "0",
}


@dataclass
class Cluster:
    """Where the replicas run. own: on this machine, started for this run."""

    own: bool
    guard: subprocess.Popen[bytes]

    def share(self, resource: str, most: int) -> float:
        """Of a resource ("CPU", "GPU") for each of `most` replicas: 1, or less so that all find room."""
        import ray

        there = float(ray.cluster_resources().get(resource, 0.0))
        return min(1.0, int(there / most * 1000) / 1000)

    def end(self) -> None:
        """Leave it, and return when all that was started for this run is gone."""
        import ray

        with contextlib.suppress(Exception):  # a Ray that is broken already is ended all the same
            ray.shutdown()
        assert self.guard.stdin is not None
        self.guard.stdin.close()
        with contextlib.suppress(subprocess.TimeoutExpired):
            self.guard.wait(ENDED_WITHIN_S)


def start(name: str) -> Cluster:
    """Start a Ray, or join the one of RAY_ADDRESS, for the application `name`. Raises RunError where it does not come.

    Call it in the main thread and before anything imports ray: the kernel ends Ray's daemons with the thread that
    started them, and Ray reads its environment when it is imported.
    """
    address = os.environ.get("RAY_ADDRESS", "")
    os.environ.update(FAST)
    if address:
        where: dict[str, Any] = {"address": address}
        guard = _guard("application", address, name)
    else:
        folder = _folder()
        token = {"RAY_AUTH_TOKEN": secrets.token_hex(32), ray_guard.MARK: folder}
        os.environ.update({**ENVIRONMENT, **token})
        guard = _guard("folder", folder)
        cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
        where = {
            "address": "local",
            "num_cpus": cores,
            "include_dashboard": False,
            "object_store_memory": OBJECT_STORE_BYTES,
            "_temp_dir": folder,
        }
    import ray

    try:
        ray.init(**where, log_to_driver=False, logging_level="ERROR")
    except Exception as error:
        what = (
            f"cannot join the Ray cluster at {address}" if address else "Ray does not start on this machine"
        )
        raise RunError(f"{what}: {str(error).strip().splitlines()[0]}; see `ray status`") from error
    return Cluster(not address, guard)


def _folder() -> str:
    """A new folder with a path short enough for Ray's sockets."""
    root = tempfile.gettempdir()
    return tempfile.mkdtemp(prefix="mlsyslab-ray-", dir="/tmp" if len(root) > LONGEST_FOLDER - 22 else root)


def _guard(*arguments: str) -> subprocess.Popen[bytes]:
    """In a session of its own: what ends this process group must not end the guard."""
    return subprocess.Popen(
        [sys.executable, str(Path(ray_guard.__file__)), *arguments],
        stdin=subprocess.PIPE,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        start_new_session=True,
    )


def listen_on_loopback() -> None:
    """In a replica, before it is ready: the server to which handles talk listens on 127.0.0.1.

    Ray 2.60 binds it to every interface, whatever the node's address is, and offers no option.
    """
    from ray.serve._private import replica

    add = replica.add_port_to_grpc_server
    replica.add_port_to_grpc_server = lambda server, where: add(server, where.replace("[::]", "127.0.0.1"))
