"""Code and versions that a run is made with, and whether all ranks were started with the same."""

from __future__ import annotations

import hashlib
import os
import platform
import shlex
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Sequence
from contextlib import suppress
from functools import cache
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import accelerate
import torch

from toolkit.errors import UserError
from toolkit.experts.parallel.collectives import gather_objects, world_size
from toolkit.run.config.run import RunConfig
from toolkit.run.config.settings import leaves
from toolkit.run.folder import CODE_BEGINS, recorded_config
from toolkit.run.hardware import hardware
from toolkit.run.tracking.secrets import mask_text
from toolkit.version import __version__

LONGEST_DIFF = 1_000_000
"""Characters of `git diff` that are kept."""
INSTALLED = (f"{os.sep}site-packages{os.sep}", f"{os.sep}dist-packages{os.sep}")
OF_A_MACHINE = {"run_dir", "data_dir", "num_processes", "python"}
"""What ranks may have of their own: folders of their machine, and a release of Python."""


def _git(*args: str) -> str | None:
    """The output of a git command in the repository of the running script; None without git or a repository."""
    script = Path(sys.argv[0] or ".")
    folder = script.parent if script.is_file() else Path.cwd()
    try:
        done = subprocess.run(
            ["git", "-C", str(folder), *args], capture_output=True, timeout=10, stdin=subprocess.DEVNULL, check=True
        )
    except (OSError, subprocess.SubprocessError):
        return None
    return done.stdout.decode(errors="replace").strip()


def git_revision() -> str | None:
    """The commit of the running script, with `-modified` where tracked files differ from it."""
    revision = _git("rev-parse", "HEAD")
    if revision is None:
        return None
    return f"{revision}-modified" if _git("status", "--porcelain", "--untracked-files=no") else revision


def versions() -> dict[str, Any]:
    return {
        "toolkit": __version__,
        "torch": torch.__version__,
        "accelerate": accelerate.__version__,
        "python": platform.python_version(),
    }


def check_same_start(name: str, config: RunConfig) -> None:
    """Raise UserError, the same on every rank, unless all run one recipe with one config, code and libraries.

    Ranks with other settings would train on together, or wait for each other for ever. A collective.
    """
    if world_size() == 1:
        return
    settings = {**dict(leaves(recorded_config(name, config))), **versions()}
    mine = {what: value for what, value in settings.items() if what not in OF_A_MACHINE}
    (first, imported), *others = gather_objects((mine, _imported_versions() | _digests_of_code()))
    for rank, (theirs, their_imported) in enumerate(others, start=1):
        pairs = [(what, first.get(what), theirs.get(what)) for what in first | theirs]
        # What one rank alone has imported so far tells nothing.
        pairs += [(what, is_here, their_imported[what]) for what, is_here in imported.items() if what in their_imported]
        for what, ours, others_value in pairs:
            if ours != others_value:
                remedy = f"so was rank {rank} started, and rank 0 with {ours}: start all processes alike"
                raise UserError(field=what, value=others_value, remedy=remedy)


def _imported_versions() -> dict[str, str]:
    """The version of each library that is imported so far, by its name in `import`.

    Looking up all installed ones takes a third of a second; that of a module without a `__version__`, a millisecond.
    """
    found: dict[str, str] = {}
    for name, module in list(sys.modules.items()):
        if "." in name or name.startswith("_") or name in sys.stdlib_module_names:
            continue
        # Not `getattr`, for which some modules import others, or warn.
        if isinstance(its_own := getattr(module, "__dict__", {}).get("__version__"), str):
            found[name] = its_own
            continue
        with suppress(PackageNotFoundError):
            found[name] = version(name)
    return found


def _digests_of_code() -> dict[str, str]:
    """The digests of the running script, of each module that is imported so far and not installed, and of the toolkit.

    A file is named by its place among the modules, which does not depend on where its machine has them.
    """
    own, of_python = f"{Path(__file__).parents[1]}{os.sep}", f"{Path(os.__file__).parent}{os.sep}"
    files: dict[str, str] = {}
    for name, module in list(sys.modules.items()):
        file = getattr(module, "__dict__", {}).get("__file__")
        # What is compiled for a machine differs by machine, and an environment would take seconds to read.
        if not isinstance(file, str) or not file.endswith(".py") or any(part in file for part in INSTALLED):
            continue
        if os.path.isabs(file) and not file.startswith((own, of_python)):
            depth = name.count(".") + (2 if os.path.basename(file) == "__init__.py" else 1)
            files["/".join(file.split(os.sep)[-depth:])] = file
    script = os.path.abspath(sys.argv[0])
    files[os.path.basename(script)] = script
    found = {f"code of {name}": _digest([Path(file)]) for name, file in files.items() if os.path.isfile(file)}
    return found | {"code of the toolkit": _digest_of_toolkit()}


@cache
def _digest_of_toolkit() -> str:
    return _digest(sorted(Path(__file__).parents[1].rglob("*.py")))


def _digest(files: Sequence[Path]) -> str:
    digest = hashlib.sha256()
    for file in files:
        content = file.read_bytes()
        digest.update(f"{file.name}/{len(content)}/".encode())
        digest.update(content)
    return digest.hexdigest()[:12]


def gpu_names() -> str:
    """Such as `8 x NVIDIA H100 80GB HBM3`; "" without a GPU."""
    names = Counter(torch.cuda.get_device_name(index) for index in range(torch.cuda.device_count()))
    return ", ".join(f"{count} x {name}" for name, count in names.items())


def code_snapshot() -> str:
    """Command line, versions, hardware, git revision and uncommitted changes, without secrets."""
    lines = [
        f"{CODE_BEGINS}{time.strftime('%Y-%m-%d %H:%M:%S %z')}",
        f"command: {shlex.join(sys.orig_argv)}",
        *(f"{name}: {version}" for name, version in versions().items()),
        f"hardware: {'; '.join(filter(None, (hardware(), gpu_names())))}",
        f"git revision: {git_revision() or 'no repository'}",
    ]
    if status := _git("status", "--porcelain"):
        lines += ["", "git status:", status]
    if diff := _git("diff", "HEAD", "--no-color", "--no-ext-diff"):
        lines += ["", "git diff:", diff if len(diff) <= LONGEST_DIFF else diff[:LONGEST_DIFF] + "\n(cut)"]
    return mask_text("\n".join(lines)) + "\n\n"
