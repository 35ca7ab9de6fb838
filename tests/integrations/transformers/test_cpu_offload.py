"""CPU offload of frozen experts equals experts on the device, and prefetch avoids host syncs."""

from importlib.util import find_spec
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from accelerate import Accelerator

from benchmarks.support.families import config, randomize_routers, tokens
from benchmarks.support.processes import run_distributed
from tests.integrations.peft.models import add_adapters
from tests.integrations.transformers.training import adamw
from tests.support.emulated_device import EmulatedDevice, emulate
from tests.support.gpu import Gpu, stage_sends, use_gpu
from toolkit.experts.moving import migrate
from toolkit.experts.parallel import collectives
from toolkit.experts.placement.placement import ExpertPlacement, contiguous
from toolkit.experts.sharding.find import experts_modules
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
MOVED = {1: ExpertPlacement(((3, 1, 7, 0, 5, 2, 6, 4),)), 2: ExpertPlacement(((2, 5, 0, 7), (1, 6, 4, 3)))}
# Rank 0 of 2 only receives in place, which keeps the version of a parameter in main memory.
MOVED_ON_CPU = {1: contiguous(8, 1), 2: ExpertPlacement(((6, 5, 0, 7), (2, 1, 4, 3)))}
DEVICES = ["emulated", pytest.param("gpu", marks=pytest.mark.gpu)]


def train(
    folder: Path, device: EmulatedDevice | Gpu, *, offload: Any, quantize: Any = None, recompute: bool = False
) -> dict[str, Any]:
    """Train adapters for four clipped steps with migrations; return losses, copies, host syncs and the state dict."""
    with experts_in_files(offload=offload, quantize=quantize):
        model: Any = causal_lm(folder, experts_implementation=use_toolkit_kernel())
    if recompute:
        model.gradient_checkpointing_enable({"use_reentrant": False})
    model = add_adapters(model, r=2)
    accelerator = Accelerator(cpu=isinstance(device, EmulatedDevice))
    ranks, rank = collectives.world_size(), collectives.rank()
    experts = ExpertParallel(accelerator, ep_size=ranks)
    wrapped, optimizer = experts.prepare(model, adamw(model))
    for module in experts_modules(model).values():
        devices = {name: module.get_parameter(name).device.type for name in TABLES}
        assert devices == dict.fromkeys(TABLES, "cpu" if offload else device.device.type)
    losses, copied, waits = [], [], []
    fill = cpu_offload.LayersOnHost._copy

    def copy(layers: Any, held: Any, layer: int, *rest: Any) -> None:
        copied.append((len(losses), layer, held is layers._held[1]))
        fill(layers, held, layer, *rest)

    exchange, send = migrate._Payload._operation, dist.send

    def operation(payload: Any, *args: Any) -> Any:
        result = exchange(payload, *args)
        assert result.tensor.device.type == device.device.type  # required by NCCL
        return result

    def checked_send(rows: Any, **options: Any) -> None:
        assert rows.device.type == device.device.type
        send(rows, **options)

    with (
        mock.patch.object(cpu_offload.LayersOnHost, "_copy", copy),
        mock.patch.object(migrate._Payload, "_operation", operation),
    ):
        for step in range(4):
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
            if step == 0:
                place_experts(model, MOVED[ranks], optimizer)
            if step == 1:
                offloaded = experts_modules(model).values() if offload else ()
                for module in offloaded:
                    module.cpu()
                with mock.patch.object(migrate._Payload, "_operation", exchange):
                    place_experts(model, MOVED_ON_CPU[ranks], optimizer)
                for module in offloaded:
                    module.to(device.device)
    with mock.patch.object(dist, "send", checked_send):
        state = {name: value.cpu() for name, value in whole_state_dict(model).items()}
    experts.save(folder / "saved")
    place_experts(model, MOVED[ranks], optimizer)
    experts.load(folder / "saved")
    assert all(torch.equal(value.cpu(), state[name]) for name, value in whole_state_dict(model).items())
    return {"losses": losses, "copied": copied, "waits": waits, "state": state, "offload": offload}


def train_all(folder: Path, name: str) -> list[dict[str, Any]]:
    """Train in several ways, each without and with offload."""
    if collectives.world_size() > 1:
        stage_sends()
    device = emulate() if name == "emulated" else use_gpu()
    with device:
        ways: list[dict[str, Any]] = [{"offload": "memory"}]
        if collectives.world_size() == 1:
            ways.append({"offload": "memory", "recompute": True})
            if find_spec("bitsandbytes"):
                ways.append({"offload": folder, "quantize": "4bit"})
        return [train(folder, device, **each) for way in ways for each in (way | {"offload": None}, way)]


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("processes", [1, 2])
def test_cpu_offload_with_prefetch_equals_experts_on_device(tmp_path: Path, processes: int, device: str):
    torch.manual_seed(0)
    settings = config("qwen3_moe")
    settings.num_hidden_layers = LAYERS
    randomize_routers(causal_lm(settings)).save_pretrained(tmp_path)
    found = run_distributed(train_all, processes, tmp_path, device)[0]
    for expected, offloaded in zip(found[::2], found[1::2], strict=True):
        # A GPU library may choose another kernel.
        close = {"rtol": 0, "atol": 0} if device == "emulated" else {"rtol": 1e-4, "atol": 1e-6}
        torch.testing.assert_close(offloaded["losses"], expected["losses"], **close)
        torch.testing.assert_close(offloaded["state"], expected["state"], **close)
        assert expected["copied"] == []
        if device == "emulated" or offloaded["offload"] == "memory":  # on a GPU, reads of files are synced
            assert offloaded["waits"] == []
        # Without migration, the forward pass prefetches all layers but two, and the backward pass the two others.
        copied = [(layer, ahead) for step, layer, ahead in offloaded["copied"] if step == 3]
        assert copied == [(2, True), (3, True), (1, True), (0, True)]
