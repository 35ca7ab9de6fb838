"""`toolkit ray`: a recipe on the machines of a Ray cluster, on more or fewer of them as they come and go."""

from __future__ import annotations

import argparse
import time
from collections.abc import Mapping, Sequence
from datetime import timedelta
from pathlib import Path
from typing import Any

from toolkit.errors import UserError
from toolkit.run.arguments import Parser, positive

EXAMPLE = """
  toolkit ray recipes/mnist_moe.py full --workers 2:8 --run-dir /shared/runs/one
"""


def main(argv: Sequence[str]) -> int:
    """0 where the run is finished, 1 where it failed too often, 2 for bad input, 130 after Ctrl-C."""
    parser = Parser("toolkit ray", __doc__, epilog=EXAMPLE, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--workers", type=parse_workers, default="1", metavar="N or MIN:MAX", help="processes, one per CPU or GPU (1)"
    )
    parser.add_argument("--max-restarts", type=int, default=10, metavar="N", help="after lost or failed processes (10)")
    parser.add_argument(
        "--resize-every", type=positive, default=60.0, metavar="S", help="seconds between checks of the cluster (60)"
    )
    parser.add_argument("recipe", type=Path, help="a script with presets, such as recipes/mnist_moe.py")
    parser.add_argument("arguments", nargs="*", metavar="...", help="a preset, and flags of the recipe")
    args, flags = parser.parse_known_args(argv)
    words = [*args.arguments, *flags]

    from toolkit.commands.ray.ray_train import RayJob, check_installed, run_on_ray
    from toolkit.run.folder import RUNS
    from toolkit.run.recipe_script import load_recipe

    check_installed()
    recipe = load_recipe(args.recipe, words)
    if recipe.main is None:
        raise UserError(f"{args.recipe}: has no function main(config): see docs/train/recipes.md.")
    config = recipe.config(())
    if config.num_processes is not None:
        raise UserError(f"--num-processes {config.num_processes}: use --workers here.")
    folder = (config.run_dir or RUNS / args.recipe.stem / time.strftime("%Y%m%d-%H%M%S")).absolute()
    storage = str(folder) if config.storage is None else absolute(config.storage)
    job = RayJob(
        workers=args.workers,
        cpu=config.cpu,
        storage_path=storage.rpartition("/")[0],
        name=storage.rpartition("/")[2],
        max_restarts=args.max_restarts,
        resize_every_s=args.resize_every,
        process_timeout=timedelta(minutes=config.process_timeout),
    )
    what = {"recipe": str(args.recipe), "words": words, "folder": str(folder), "storage": config.storage is not None}
    return run_on_ray(train_recipe, what, job)


def parse_workers(text: str) -> tuple[int, int]:
    """Return `2:8` as (2, 8), and `4` as (4, 4), as the `type` of an argument."""
    fewest, _, most = text.partition(":")
    workers = int(fewest), int(most or fewest)
    if not 1 <= workers[0] <= workers[1]:
        raise argparse.ArgumentTypeError(f"{text}: take a number, or the fewest and the most, such as 2:8")
    return workers


def absolute(storage: str) -> str:
    """Return a URI as it is, and a path as an absolute one, without a slash at its end."""
    return (storage if "://" in storage else str(Path(storage).absolute())).rstrip("/")


def train_recipe(arguments: Mapping[str, Any], cpu: bool, machine: str) -> None:
    """Train in this process, as one of the workers on `machine`."""
    from toolkit.run.recipe_script import load_recipe

    folder = Path(arguments["folder"])
    if arguments["storage"]:  # then machines need not share the folder, and do not
        folder = folder / machine
    words = [*arguments["words"], "--run-dir", str(folder), *(["--cpu"] if cpu else [])]
    recipe = load_recipe(Path(arguments["recipe"]), words)
    assert recipe.main is not None
    recipe.main(recipe.config(()))
