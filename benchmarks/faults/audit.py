"""Detection rate of `toolkit audit` on planted faults, and alarms on healthy models and adapters.

    python benchmarks/faults/audit.py                       everything, in about five minutes
    python benchmarks/faults/audit.py --only "router|NaN"   faults whose kind matches; writes nothing

Each kind of fault of `planted_models.py` is planted in a saved model of eight families, and of `planted_adapters.py` in
trained adapters of four families. Faults that need a base are audited with `--against` it, and so are adapters. A fault
is found if a finding of a check that `Fault.checks` lists exists, and named if such findings name no layer without the
fault, and the layer if it is only one. A kind that changes nothing in a family, such as the type of one expert in a
stacked tensor, is not counted.

Healthy are the models of all families of `benchmarks.support.families`, by themselves and against a base: itself, in
bf16, and with noise of a fifth of the standard deviation; the models of `odd_models.py`, such as upcycled and pruned
ones; and adapters of several ranks, targets and scalings. Any finding is an alarm. Writes
benchmarks/results/audit_faults.json; exit code 1 if a fault is missed or an alarm is false.
"""

from __future__ import annotations

import argparse
import json
import re
import shutil
import sys
import tempfile
import warnings
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch
import transformers
from safetensors.torch import load_file, save_file
from torch import Tensor

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT))

from benchmarks.faults import odd_models, planted_adapters, planted_models
from benchmarks.faults.planted_adapters import Adapters, save_adapters, save_base
from benchmarks.faults.planted_models import Fault, Model
from benchmarks.report import markdown, write_report
from benchmarks.support.families import build, moe_families
from toolkit.audit.checks import audit
from toolkit.audit.findings import Finding
from toolkit.integrations.peft import layouts

NOT_SUPPORTED = {"doge"}
"""Families whose experts are embeddings."""
WEIGHTS, CONFIG = "model.safetensors", "config.json"
NOISE = 0.2
"""Standard deviation of the noise relative to that of a tensor."""


class Result(NamedTuple):
    """A fault that was planted in a model or in adapters of a family."""

    fault: Fault
    family: str
    is_found: bool
    is_named: bool


def write(folder: Path, source: Path, file: str, tensors: Mapping[str, Tensor]) -> Path:
    """Write a copy of the folder `source` with other tensors."""
    shutil.rmtree(folder, ignore_errors=True)
    shutil.copytree(source, folder)
    save_file({name: value.contiguous() for name, value in tensors.items()}, folder / file)
    return folder


def changed(before: Mapping[str, Tensor], after: Mapping[str, Tensor]) -> list[str]:
    """Return the names of tensors that only one has, or that differ."""
    return [name for name in before.keys() | after.keys() if not _equal(before.get(name), after.get(name))]


def _equal(one: Tensor | None, other: Tensor | None) -> bool:
    return one is not None and other is not None and one.dtype == other.dtype and torch.equal(one, other)


def layers_in(text: str) -> set[int]:
    """Return the numbers of the layers that a name, or the beginning of a message, has."""
    found = re.search(r"\blayers?(?:\(s\) |\.)(\d[\d, -]*)", text)
    numbers = set()
    for run in re.findall(r"\d+(?:-\d+)?", found[1] if found else ""):
        first, _, last = run.partition("-")
        numbers |= set(range(int(first), int(last or first) + 1))
    return numbers


def judge(fault: Fault, family: str, findings: Sequence[Finding], names: Sequence[str]) -> Result:
    """Return whether a check of `fault` has a finding, and whether it is of the layers of the changed `names`."""
    wanted = [finding for finding in findings if finding.check in fault.checks.split()]
    layers = set().union(*map(layers_in, names))
    said = set().union(*(layers_in(finding.message) for finding in wanted))
    is_named = said <= layers and (bool(said) or len(layers) != 1)
    if not wanted or not is_named:
        said_all = [f"{finding.check}: {finding.message}" for finding in findings]
        print(f"{family}: {fault.kind}: {'not named' if wanted else 'not found'}: {said_all[:3]}", file=sys.stderr)
    return Result(fault, family, bool(wanted), bool(wanted) and is_named)


def plant_in_models(folder: Path, faults: Sequence[Fault]) -> Iterator[Result]:
    for family in planted_models.FAMILIES:
        base = folder / family
        built = build(family, **planted_models.SIZES)
        for name, value in built.state_dict().items():
            if name.endswith("e_score_correction_bias"):  # begins at zero
                value.normal_()
        built.save_pretrained(base)
        assert not audit(base, base).findings
        tensors = load_file(base / WEIGHTS)
        for fault in faults:
            torch.manual_seed(0)
            model = Model(family, {name: value.clone() for name, value in tensors.items()})
            fault.plant(model)
            if names := changed(tensors, model.tensors):
                planted = write(folder / "planted", base, WEIGHTS, model.tensors)
                yield judge(fault, family, audit(planted, base if fault.needs_base else None).findings, names)


def plant_in_adapters(folder: Path, faults: Sequence[Fault]) -> Iterator[Result]:
    for family in planted_adapters.FAMILIES:
        base = save_base(folder / "base" / family, family)
        saved = save_adapters(base, folder / "adapters" / family)
        assert not audit(saved, base).findings
        tensors, settings = load_file(saved / layouts.WEIGHTS), json.loads((saved / layouts.CONFIG).read_text())
        for fault in faults:
            adapters = Adapters({name: value.clone() for name, value in tensors.items()}, dict(settings))
            fault.plant(adapters)
            planted = write(folder / "planted", saved, layouts.WEIGHTS, adapters.tensors)
            (planted / layouts.CONFIG).write_text(json.dumps(adapters.settings))
            if not adapters.has_record:
                (planted / layouts.RECORD).unlink()
            names = changed(tensors, adapters.tensors) or list(tensors)  # settings are of all
            yield judge(fault, family, audit(planted, base).findings, names)


def alarms_of(name: str, folder: Path, base: Path | None = None) -> int:
    """Return 1 if the audit of a healthy folder has a finding."""
    findings = audit(folder, base).findings
    for finding in findings:
        print(f"{name}: alarm: {finding.check}: {finding.message}", file=sys.stderr)
    return bool(findings)


def healthy_model(family: str) -> Any:
    """Return a model with four layers, or with one if other settings of the family list its layers."""
    try:
        return build(family, num_hidden_layers=4, mlp_layer_types=["sparse"] * 4)
    except Exception:  # of many types, by family
        return build(family)


def audit_healthy_models(folder: Path) -> Iterator[int]:
    """Yield the alarms of each family, of at most four audits."""
    for family in sorted(set(moe_families()) - NOT_SUPPORTED):
        base = folder / family
        healthy_model(family).save_pretrained(base)
        tensors, draws = load_file(base / WEIGHTS), torch.Generator().manual_seed(0)
        bf16 = {name: value.bfloat16() if value.is_floating_point() else value for name, value in tensors.items()}
        noisy = {
            name: value + NOISE * value.std() * torch.randn(value.shape, generator=draws)
            if value.is_floating_point() and value.numel() > 1
            else value
            for name, value in tensors.items()
        }
        alarms = alarms_of(family, base) + alarms_of(family, base, base)
        for kind, values in (("bf16", bf16), ("noise", noisy)):
            alarms += alarms_of(f"{family}, {kind}", write(folder / "planted", base, WEIGHTS, values), base)
        yield alarms


def audit_odd_models(folder: Path) -> Iterator[int]:
    """Yield the alarms of each model of `odd_models.py`."""
    for family in planted_models.FAMILIES[:2]:
        base = folder / family
        build(family, **planted_models.SIZES).save_pretrained(base)
        tensors, config = load_file(base / WEIGHTS), json.loads((base / CONFIG).read_text())
        for kind, odd in odd_models.ODD.items():
            model, changes = Model(family, {name: value.clone() for name, value in tensors.items()}), dict(config)
            odd(model, changes)
            planted = write(folder / "planted", base, WEIGHTS, model.tensors)
            (planted / CONFIG).write_text(json.dumps(changes))
            yield alarms_of(f"{family}, {kind}", planted)
        for kind, write_form in odd_models.FORMS.items():
            planted = write(folder / "planted", base, WEIGHTS, tensors)
            (planted / WEIGHTS).unlink()
            write_form(planted, tensors)
            yield alarms_of(f"{family}, {kind}", planted, base)


def audit_healthy_adapters(folder: Path) -> Iterator[int]:
    """Yield the alarms of each adapter, without and with its base."""
    for family in planted_adapters.FAMILIES:
        base = save_base(folder / "base" / family, family)
        for number, settings in enumerate(planted_adapters.HEALTHY):
            saved = save_adapters(base, folder / "healthy" / f"{family} {number}", **settings)
            yield alarms_of(f"{family}, {settings}", saved) + alarms_of(f"{family}, {settings}", saved, base)


def rows_of(kind: str, results: Sequence[Result]) -> list[dict[str, Any]]:
    """Return a row for each group of faults."""
    groups: dict[str, list[Result]] = {}
    for result in results:
        groups.setdefault(result.fault.group, []).append(result)
    return [
        {
            "in": kind,
            "faults": group,
            "kinds": len({result.fault.kind for result in of}),
            "planted": len(of),
            "found": sum(result.is_found for result in of),
            "named": sum(result.is_named for result in of),
        }
        for group, of in groups.items()
    ]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", metavar="PATTERN", help="only kinds of faults that match; writes nothing")
    options = parser.parse_args()
    torch.set_num_threads(1)  # the models are small
    transformers.logging.set_verbosity_error()
    transformers.logging.disable_progress_bar()
    warnings.filterwarnings("ignore", module="transformers|peft")
    of_models, of_adapters = (
        [fault for fault in faults if re.search(options.only or "", fault.kind)]
        for faults in (planted_models.FAULTS, planted_adapters.FAULTS)
    )
    if not of_models + of_adapters:
        parser.error(f"--only {options.only}: matches no kind of fault")
    with tempfile.TemporaryDirectory(prefix="audit-") as folder:
        in_models = list(plant_in_models(Path(folder, "models"), of_models))
        in_adapters = list(plant_in_adapters(Path(folder, "adapters"), of_adapters))
        rows = rows_of("models", in_models) + rows_of("adapters", in_adapters)
        if options.only:
            print(markdown(rows), end="")
            return int(any(row["planted"] > row["found"] for row in rows))
        families = list(audit_healthy_models(Path(folder, "healthy")))
        odd = list(audit_odd_models(Path(folder, "odd")))
        adapters = list(audit_healthy_adapters(Path(folder, "healthy adapters")))
    facts = {
        "kinds in models": len(planted_models.FAULTS),
        "kinds in adapters": len(planted_adapters.FAULTS),
        "healthy families": len(families),
        "alarms of families": sum(families),
        "odd healthy models": len(odd),
        "alarms of odd models": sum(odd),
        "healthy adapters": len(adapters),
        "alarms of adapters": sum(adapters),
        "not found": [f"{each.family}: {each.fault.kind}" for each in in_models + in_adapters if not each.is_found],
        "not named": [f"{each.family}: {each.fault.kind}" for each in in_models + in_adapters if not each.is_named],
    }
    write_report("audit_faults", rows, **facts)
    return int(bool(facts["not found"]) or sum(families) + sum(odd) + sum(adapters) > 0)


if __name__ == "__main__":
    sys.exit(main())
