"""Ray Serve with its own batcher, @serve.batch, called through a handle, behind a front of a few lines: Ray's default proxy
would cost several times the CPU of the model, and its HAProxy listens on every address of the machine."""

from __future__ import annotations

import json
import os
from typing import Any

import numpy as np
from aiohttp import web
from rival import PATH, arguments, read, warm, written

from mlsyslab.labs.serving import ray_cluster

CONFIG, PORT = arguments()


def application(cluster: ray_cluster.Cluster) -> Any:
    """The deployment, as its documentation writes it."""
    from ray import serve

    config, loopback = CONFIG, cluster.own
    max_batch, wait_s = config.max_batch, config.max_wait_s

    class Encoder:
        def __init__(self) -> None:
            if loopback:
                ray_cluster.listen_on_loopback()
            self.model = warm(config)

        @serve.batch(max_batch_size=max_batch, batch_wait_timeout_s=wait_s)
        async def __call__(self, tokens: list[np.ndarray]) -> list[np.ndarray]:
            return list(self.model(np.stack(tokens)))

    options = {"num_cpus": cluster.share("CPU", 1)}
    # Far more than a batch, so that its queue lies where its batcher is.
    deployment = serve.deployment(
        Encoder, name="encoder", max_ongoing_requests=1024, ray_actor_options=options,
        logging_config={"enable_access_log": False},
    )  # fmt: skip
    return deployment.bind()


def main() -> None:
    name = f"rival-{os.getpid()}"
    cluster = ray_cluster.start(name)
    from ray import serve

    serve.start(http_options={"location": "Disabled"})
    handle = serve.run(application(cluster), name=name, route_prefix=None)

    async def infer(request: web.Request) -> web.Response:
        logits = await handle.remote(read(json.loads(await request.read())))
        return web.Response(body=json.dumps(written(logits)), content_type="application/json")

    app = web.Application()
    app.router.add_post(PATH, infer)
    try:
        web.run_app(app, host="127.0.0.1", port=PORT, print=None, access_log=None)
    finally:
        cluster.end()


if __name__ == "__main__":
    main()
