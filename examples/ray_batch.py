"""Answer questions about many images with Ray Data, one model for each actor.

    python examples/ray_batch.py rows.jsonl answers --model tiny --recipe balanced --actors 2

``rows.jsonl`` has one JSON object a line, with the path of an ``image`` and a ``question``. The
answers are written to a folder of JSON lines. An actor that dies is started again.
"""

from __future__ import annotations

import argparse
from pathlib import Path

import ray

from vlmfast.integrations.ray import Answerer


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("rows", type=Path)
    parser.add_argument("out", type=Path)
    parser.add_argument("--model", default="tiny")
    parser.add_argument("--recipe", default="balanced")
    parser.add_argument("--actors", type=int, default=2)
    parser.add_argument("--cpus", type=float, default=1, help="of each actor")
    parser.add_argument("--gpus", type=float, default=0, help="of each actor")
    args = parser.parse_args()
    rows = ray.data.read_json(str(args.rows.absolute()), lines=True)
    answered = rows.repartition(4 * args.actors).map_batches(
        Answerer,
        fn_constructor_kwargs={
            "model": args.model,
            "recipe": args.recipe,
            "threads": max(int(args.cpus), 1),
            "max_new_tokens": 64,
        },
        batch_size=32,
        compute=ray.data.ActorPoolStrategy(size=args.actors),
        num_cpus=args.cpus,
        num_gpus=args.gpus,
        max_restarts=-1,
        max_task_retries=-1,
    )
    answered.write_json(str(args.out.absolute()))
    print(f"{args.out}: {ray.data.read_json(str(args.out.absolute())).count()} rows")


if __name__ == "__main__":
    main()
