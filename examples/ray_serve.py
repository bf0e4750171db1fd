"""A folder of bundles in Ray Serve on this machine: replicas scale from zero, without torch.

pip install ./bundles '.[serve,ray]'
python examples/ray_serve.py models --port 8000
serve run cgserve.ray_replicas:app folder=/srv/models gpus=0.5        # on a cluster: needs no file of yours
"""

from __future__ import annotations

import argparse

from ray import serve

from cgserve.ray_replicas import app


def main() -> None:
    parser = argparse.ArgumentParser(description="Serve a folder of bundles with Ray Serve.")
    parser.add_argument("folder", help="<model>/<version>/model.cgb")
    parser.add_argument("--port", type=int, default=8000)
    parser.add_argument("--gpus", type=float, default=0, help="a replica's share of a GPU (default: 0, the CPU)")
    parser.add_argument("--replicas", type=int, default=2, help="at most (default: 2)")
    args = parser.parse_args()
    serve.start(http_options={"port": args.port})
    serve.run(app({"folder": args.folder, "gpus": str(args.gpus), "replicas": str(args.replicas)}), blocking=True)


if __name__ == "__main__":
    main()
