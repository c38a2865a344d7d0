"""Serve a model with Ray Serve: each replica has an engine with OpenAI's API.

    serve run examples.ray_serve:app
    python examples/ray_serve.py --replicas 2 --port 8000

Ray's proxy spreads requests over the replicas. The recipe of a request and all other options of
``vlmfast serve`` work as they do there.
"""

from __future__ import annotations

import argparse
import os
from typing import Any

from ray import serve


def build_app() -> Any:
    """The application of one replica, which loads its model when it starts."""
    from vlmfast import VLM
    from vlmfast.serve.app import Server, create_app
    from vlmfast.serve.config import ServerConfig

    model = os.environ.get("VLMFAST_MODEL", "tiny")
    config = ServerConfig(
        model=model,
        recipe=os.environ.get("VLMFAST_RECIPE", "none"),
        api_keys=tuple(filter(None, os.environ.get("VLMFAST_API_KEY", "").split(","))),
        allowed_hosts=tuple(filter(None, os.environ.get("VLMFAST_HOSTS", "").split(","))),
    )
    return create_app(Server(config, lambda: VLM.from_pretrained(model)))


def deployment(replicas: int = 1, cpus: float = 1, gpus: float = 0) -> Any:
    """The deployment, one engine a replica."""
    options = {"num_cpus": cpus, "num_gpus": gpus}
    ingress = serve.ingress(build_app)()
    return serve.deployment(ingress, name="vlmfast").options(
        num_replicas=replicas, ray_actor_options=options, max_ongoing_requests=64
    )


app = deployment().bind()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--replicas", type=int, default=1)
    parser.add_argument("--cpus", type=float, default=1, help="of each replica")
    parser.add_argument("--gpus", type=float, default=0, help="of each replica")
    parser.add_argument("--host", default="127.0.0.1")
    parser.add_argument("--port", type=int, default=8000)
    args = parser.parse_args()
    serve.start(http_options={"host": args.host, "port": args.port})
    serve.run(deployment(args.replicas, args.cpus, args.gpus).bind(), blocking=True)


if __name__ == "__main__":
    main()
