"""Frozen experts that stay in the host's memory are computed as on the device, and no ordinary step waits for them."""

from __future__ import annotations

from importlib.util import find_spec
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist

from tests.integrations.transformers.families import awaken, config, tokens
from tests.support.emulated_device import EmulatedDevice, emulate
from tests.support.gpu import Gpu, stage_sends, use_gpu
from tests.support.helpers import run_distributed
from toolkit.experts.moving import migrate
from toolkit.experts.parallel import collectives
from toolkit.experts.placement.placement import ExpertPlacement, contiguous
from toolkit.experts.sharding.find import require_experts
from toolkit.experts.state.state_dict import whole_state_dict
from toolkit.integrations.accelerate.expert_parallel import ExpertParallel
from toolkit.integrations.transformers import (
    causal_lm,
    cpu_offload,
    experts_in_files,
    place_experts,
    use_toolkit_kernel,
)

LAYERS = 4
TABLES = ("gate_up_proj", "down_proj")
MOVED = {
    1: ExpertPlacement(((3, 1, 7, 0, 5, 2, 6, 4),)),
    2: ExpertPlacement(((2, 5, 0, 7), (1, 6, 4, 3))),
}
DEVICES = ["emulated", pytest.param("gpu", marks=pytest.mark.gpu)]


def train(
    folder: Path, device: EmulatedDevice | Gpu, *, offload: Any, quantize: Any = None, recompute: bool = False
) -> dict[str, Any]:
    """Losses of five clipped steps of adapters, between which experts move, and what is saved and was copied then."""
    from accelerate import Accelerator
    from peft import LoraConfig, get_peft_model

    with experts_in_files(offload=offload, quantize=quantize):
        model: Any = causal_lm(folder, experts_implementation=use_toolkit_kernel())
    if recompute:
        model.gradient_checkpointing_enable({"use_reentrant": False})
    torch.manual_seed(1)
    names = [f"mlp.experts.{name}" for name in TABLES]
    model = get_peft_model(model, LoraConfig(r=2, target_modules=["q_proj"], target_parameters=names))
    optimizer: Any = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=1e-2)
    accelerator = Accelerator(cpu=isinstance(device, EmulatedDevice))
    ranks, rank = collectives.world_size(), collectives.rank()
    experts = ExpertParallel(accelerator, ep_size=ranks)
    wrapped, optimizer = experts.prepare(model, optimizer)
    for module in require_experts(model).values():
        where = {name: module.get_parameter(name).device.type for name in TABLES}
        assert where == dict.fromkeys(TABLES, "cpu" if offload else device.device.type)
    losses, copied, waits = [], [], []
    fill = cpu_offload.LayersOnHost._copy

    def copy(layers: Any, held: Any, layer: int, *rest: Any) -> None:
        copied.append((len(losses), layer, held is layers._held[1]))
        fill(layers, held, layer, *rest)

    exchange, send = migrate._Payload._operation, dist.send

    def operation(payload: Any, *args: Any) -> Any:
        result = exchange(payload, *args)
        assert result.tensor.device.type == device.device.type  # NCCL has no others
        return result

    def checked_send(rows: Any, **options: Any) -> None:
        assert rows.device.type == device.device.type
        send(rows, **options)

    with (
        mock.patch.object(cpu_offload.LayersOnHost, "_copy", copy),
        mock.patch.object(migrate._Payload, "_operation", operation),
    ):
        for step in range(5):
            samples = 4 // ranks
            ids = tokens(step, 4)[samples * rank : samples * (rank + 1)].to(device.device)
            begin = len(device.waits)
            loss = wrapped(input_ids=ids, labels=ids).loss
            accelerator.backward(loss)
            waits += [wait.place for wait in device.waits[begin:] if wait.place.startswith("toolkit/integrations")]
            accelerator.clip_grad_norm_(model.parameters(), 0.5)
            optimizer.step()
            optimizer.zero_grad()
            losses.append(loss.item())
            if step in (1, 2):
                place_experts(model, (MOVED[ranks], contiguous(8, ranks))[step % 2], optimizer)
    with mock.patch.object(dist, "send", checked_send):
        whole = {name: value.cpu() for name, value in whole_state_dict(model).items()}
    experts.save(folder / "saved")
    place_experts(model, MOVED[ranks], optimizer)
    experts.load(folder / "saved")
    again = whole_state_dict(model)
    assert all(torch.equal(value.cpu(), whole[name]) for name, value in again.items())
    return {"losses": losses, "copied": copied, "waits": waits, "whole": whole, "place": offload}


def compare(folder: Path, name: str) -> list[dict[str, Any]]:
    """What ranks find in several ways with experts on the device, and on the host."""
    if collectives.world_size() > 1:
        stage_sends()
    device = emulate() if name == "emulated" else use_gpu()
    with device:
        ways: list[dict[str, Any]] = [{"offload": "memory"}, {"offload": "memory", "recompute": True}]
        if collectives.world_size() == 1 and find_spec("bitsandbytes") is not None:
            ways.append({"offload": folder, "quantize": "4bit"})
        return [train(folder, device, **each) for way in ways for each in (way | {"offload": None}, way)]


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("processes", [1, 2])
def test_experts_of_the_hosts_memory_train_as_those_of_the_device_and_are_copied_ahead(
    tmp_path: Path, processes: int, device: str
):
    torch.manual_seed(0)
    settings = config("qwen3_moe")
    settings.num_hidden_layers = LAYERS
    awaken(causal_lm(settings)).save_pretrained(tmp_path)
    found = run_distributed(compare, processes, tmp_path, device)[0]
    for inside, outside in zip(found[::2], found[1::2], strict=True):
        # Another product of a GPU's library rounds otherwise.
        close = {"rtol": 0, "atol": 0} if device == "emulated" else {"rtol": 1e-4, "atol": 1e-6}
        torch.testing.assert_close(outside["losses"], inside["losses"], **close)
        torch.testing.assert_close(outside["whole"], inside["whole"], **close)
        assert inside["copied"] == []
        assert outside["waits"] == [] or (device == "gpu" and outside["place"] != "memory")  # of a file it waits
        # In a step from the third on that follows none that moved experts, each layer but two is copied on the way up,
        # while the one before it is computed, and the others on the way down.
        copied = [(layer, ahead) for step, layer, ahead in outside["copied"] if step == 4]
        assert copied == [(2, True), (3, True), (1, True), (0, True)]
