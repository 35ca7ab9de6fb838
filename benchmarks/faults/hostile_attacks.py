"""Attacks on the files of a checkpoint, each of which `hostile_files.py` gives to a command."""

from __future__ import annotations

import json
import math
import os
import pickle
import pickletools
import random
import struct
import zipfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch

from toolkit.experts.state import manifest

Attack = Callable[[Path, random.Random], object]
"""Damages a file. It may use the files next to it."""
CONTROL = "a\0\x1b[31m\nok       all good\u2028\x85"
SLOW = "(a+)+(a+)+(a|a?)+$" + "a" * 40
"""A regular expression, and a text that takes it forever."""
DEEP: list[Any] = []
for _ in range(400):
    DEEP = [DEEP]
VALUES: tuple[Any, ...] = (None, True, -1, 0, 0.5, 2**31, 2**63, 10**400, 1e308, math.nan, math.inf, [], [[]], [None])
VALUES += ("", "2", ["x"], {}, {"a": 1}, CONTROL, SLOW, DEEP, "x" * 100_000, "\ud800", "a\0b", "../sibling/text")
"""Values of JSON that a field does not expect."""

# --- any file ----------------------------------------------------------------------------------------------------


def content(data: bytes) -> Attack:
    return lambda file, _: file.write_bytes(data)


def cut(share: float) -> Attack:
    return lambda file, _: os.truncate(file, int(file.stat().st_size * share))


def replace(make: Callable[[Path], object]) -> Attack:
    """Delete the file, and make something else of its name."""

    def attack(file: Path, _: random.Random) -> None:
        file.unlink()
        make(file)

    return attack


def each(attack: Callable[[str, Any], Attack], **values: Sequence[Any]) -> dict[str, Attack]:
    """Return `attack(name, value)` for each name and each of its values."""
    return {f"{name} {value!r:.40}": attack(name, value) for name, of in values.items() for value in of}


def mutated(data: bytes, draw: random.Random) -> bytes:
    """Overwrite, repeat, insert or delete some bytes, or cut the rest."""
    changed = bytearray(data)
    for _ in range(draw.choice((1, 1, 2, 4))):
        at, count = draw.randrange(len(changed) or 1), draw.choice((1, 2, 4, 8, 40))
        new = (b"", b"\xff" * count, bytes(count), draw.randbytes(count), changed[at : at + count] * 2)
        changed[at : at + count] = draw.choice(new)
        if draw.random() < 0.1:
            del changed[at:]
    return bytes(changed)


def mutate_bytes(file: Path, draw: random.Random) -> None:
    file.write_bytes(mutated(file.read_bytes(), draw))


NOT_REGULAR = {
    "pipe": replace(os.mkfifo),
    "folder": replace(os.mkdir),
    "link to a device": replace(lambda file: file.symlink_to("/dev/zero")),
    "link to a file outside": replace(lambda file: file.symlink_to("../sibling/text")),
}

# --- JSON, the header of a safetensors file, a manifest with its digest, metadata --------------------------------


def edit(change: Callable[[Any], object]) -> Attack:
    """Change the value in a file in place."""

    def attack(file: Path, _: random.Random) -> None:
        raw = file.read_bytes()
        if file.name == ".metadata":
            change(value := pickle.loads(raw))
            file.write_bytes(pickle.dumps(value))
        elif file.suffix == ".safetensors":
            size = int.from_bytes(raw[:8], "little")
            change(value := json.loads(raw[8 : 8 + size]))
            file.write_bytes(header(json.dumps(value).encode()) + raw[8 + size :])
        else:
            change(value := json.loads(raw))
            if file.name == manifest.NAME:
                value["digest"] = manifest.digest({name: each for name, each in value.items() if name != "digest"})
            file.write_text(manifest.canonical(value))

    return attack


def places(value: Any) -> Iterator[tuple[Any, Any]]:
    """Yield each container in a JSON value, and each of its keys."""
    keys = range(len(value)) if isinstance(value, list) else list(value) if isinstance(value, dict) else ()
    for key in keys:
        yield value, key
        yield from places(value[key])


def mutate_json(file: Path, draw: random.Random) -> None:
    """Replace one to three values, or change bytes."""

    def change(value: Any) -> None:
        found = list(places(value))
        for container, key in draw.sample(found, min(len(found), draw.choice((1, 1, 2, 3)))):
            container[key] = draw.choice(VALUES)

    if draw.random() < 0.2 and file.suffix == ".json":
        mutate_bytes(file, draw)
    else:
        edit(change)(file, draw)


def field(name: str, value: Any) -> Attack:
    return edit(lambda found: found.update({name: value}))


def record(name: str, value: Any) -> Attack:
    """Set all entries of an object of `adapter_record.json`."""
    return edit(lambda found: found.update({name: dict.fromkeys(found[name], value)}))


JSON = NOT_REGULAR | {
    "null": content(b"null"),
    "list": content(b"[1]"),
    "not UTF-8": content(b'{"a": "\xff"}'),
    "100,000 levels": content(b"[" * 100_000),
    "300 MB": content(b"{" + b" " * 300_000_000 + b"}"),
}
INDEX = JSON | each(
    field,
    weight_map=[[1], {"a": ".."}, {"a": "../sibling/text"}, {"a": "a\0b"}, {CONTROL: CONTROL}, {"\ud800": "\udcff"}],
)
INDEX["100,000 missing files"] = field("weight_map", {f"a{number}": f"b{number}" for number in range(100_000)})
MODEL_CONFIG = JSON | each(
    field,
    num_local_experts=(10**400, math.nan, 2**31, "8", [8]),
    num_hidden_layers=(10**9, -1),
    hidden_size=(10**18, {"a": 1}),
    num_attention_heads=(0,),
    vocab_size=(10**15,),
    model_type=(["mixtral"], "../../sibling", "x" * 10**6),
    auto_map=({"AutoConfig": "evil.py--C", "AutoModel": "evil.M"},),
    vision_config=({"num_hidden_layers": 10**9},),
    layer_types=(["full_attention"] * 10**6,),
)
ADAPTER_CONFIG = JSON | each(
    field,
    r=(2**60, 0),
    lora_alpha=(10**400, 1e308, 0),
    rank_pattern=({"q_proj": 0}, {"q_proj": 10**400}, {SLOW: 4}),
    target_modules=(SLOW, [None]),
    target_parameters=(["." * 1000, "", "experts."],),
    base_model_name_or_path=("a\0b", "../sibling", "x" * 100_000),
    peft_version=("9" * 10**6,),
    model_config=({"a": 1},),
)
RECORD = JSON | each(record, norms=("a", [10**400] * 8, [math.nan] * 8, [], [[1.0, 2.0], [3.0]]), scaling=(10**400,))
RECORD |= each(field, differ=([5, None],), trained_of_base=(5,))
MANIFEST = JSON | each(
    field,
    files=({}, [1], {"a\0b": {"bytes": 3, "sha256": "a"}}, {"..": {"bytes": 9, "sha256": "a"}}),
    placement=(None, {"a": {"slots": "b"}}, {"a": {"slots": [[10**400]]}}),
)

# --- safetensors -------------------------------------------------------------------------------------------------


def header(text: bytes, size: int | None = None) -> bytes:
    return struct.pack("<Q", len(text) if size is None else size) + text


def of_experts(head: Mapping[str, Any]) -> str:
    return next(name for name in head if "experts." in name)


def entry(name: str, value: Any) -> Attack:
    """Change what the header says of a matrix of experts."""
    return edit(lambda head: head[of_experts(head)].update({name: value}))


def renamed(_: str, new: Any) -> Attack:
    """Rename a matrix of experts."""
    return edit(lambda head: head.update({new: head.pop(of_experts(head))}))


def tensors(shapes: Mapping[str, Sequence[int]], dtype: str = "U8", bits: int = 8) -> Attack:
    """Replace all tensors by random bytes."""
    head, end = {}, 0
    for name, shape in shapes.items():
        begin, end = end, end + math.prod(shape) * bits // 8
        head[name] = {"dtype": dtype, "shape": list(shape), "data_offsets": [begin, end]}
    return lambda file, draw: file.write_bytes(header(json.dumps(head).encode()) + draw.randbytes(end))


def all_nan(file: Path, _: random.Random) -> None:
    raw = file.read_bytes()
    size = 8 + int.from_bytes(raw[:8], "little")
    file.write_bytes(raw[:size] + b"\xff" * (len(raw) - size))


def repeat_name(file: Path, _: random.Random) -> None:
    raw = file.read_bytes()
    size = int.from_bytes(raw[:8], "little")
    text = raw[8 : 8 + size].strip()
    file.write_bytes(header(text[:-1] + b"," + text[1:]) + raw[8 + size :])


def terabyte(file: Path, draw: random.Random) -> None:
    """Write a sparse file."""
    tensors({f"{MLP}.experts.up": [0]})(file, draw)
    entry("shape", [2**40])(file, draw)
    entry("data_offsets", [0, 2**40])(file, draw)
    os.truncate(file, file.stat().st_size + 2**40)


def mutate_header(file: Path, draw: random.Random) -> None:
    if draw.random() < 0.5:
        mutate_json(file, draw)
    else:
        raw = file.read_bytes()
        file.write_bytes(mutated(raw[:3000], draw) + raw[3000:])


def sealed(attack: Attack) -> Attack:
    """Attack a file of a run, and write its new digest to the manifest."""

    def both(file: Path, draw: random.Random) -> None:
        attack(file, draw)
        seal = {file.name: manifest.seal(file)}
        edit(lambda found: found["files"].update(seal))(file.with_name(manifest.NAME), draw)

    return both


MLP = "model.layers.0.block_sparse_moe"
ADAPTERS = "base_model.model.model.layers.0.mlp.experts"
HEADERS = {
    "header of 2**62 bytes": content(header(b"{}", 2**62)),
    "header of 99 MB, missing": content(header(b"{}", 99_000_000)),
    "header of 99 MB of spaces": content(header(b"{}" + b" " * 99_000_000)),
    "header null": content(header(b"null")),
    "header of 50,000 levels": content(header(b'{"a":' * 50_000)),
    "no tensors": content(header(b"{}")),
    "7 bytes": content(bytes(7)),
    "cut in the header": cut(0.01),
    "cut in the data": cut(0.9),
    "name twice": repeat_name,
    "NaN": all_nan,
}
TYPES = {
    f"type {dtype}": tensors({f"{MLP}.experts.{expert}.w1.weight": (16, 24) for expert in range(8)}, dtype, bits)
    for dtype, bits in {"F4": 4, "F8_E8M0": 8, "BOOL": 8, "U64": 64, "C64": 64, "F16": 16}.items()
}
ENTRIES = each(
    entry,
    data_offsets=([0, 288], [-288, 0], [2**62, 2**62 + 288], [288, 0]),
    shape=([2**62, 2**62], [2**63, 2, 384], [-24, -16], [math.nan], [1] * 5000 + [24, 16], [384]),
    dtype=("F31", 3, "F64"),
) | each(
    renamed,
    name=("", CONTROL, "x" * 10**7, "experts." * 20_000 + "0.w1.weight", f"model.layers.{'1.' * 50_000}w1.weight"),
    expert=(f"{MLP}.experts.{10**30}.w1.weight", f"{MLP}.experts.\u0663.w1.weight"),
)
SHAPES = {
    "scalars": tensors({f"{MLP}.experts.up": (), f"{MLP}.experts.3.w1": (), f"{MLP}.gate.weight": ()}),
    "million experts": tensors({f"{MLP}.experts.up": (1_000_000,)}),
    "router without columns": tensors({f"{MLP}.gate.weight": (8, 0), f"{MLP}.experts.up": (8, 2)}),
    "10,000 tensors": tensors({f"layers.{number}.mlp.experts.0.w1.weight": (1,) for number in range(10_000)}),
    "terabyte": terabyte,
}
ADAPTER_SHAPES = {
    f"adapters of shape {shape}": tensors(
        {f"{ADAPTERS}{inner}.lora_{side}.weight": shape for inner in ("", ".base_layer") for side in "AB"}
    )
    for shape in ((), (32,), (0, 16), (16, 0), (8, 2, 2, 16))
}
ADAPTER_SHAPES["1,000 levels"] = tensors({f"{ADAPTERS}{'.base_layer' * 1000}.lora_A.weight": (32, 16)})
ADAPTER_SHAPES["scalars"] = tensors({f"{ADAPTERS}.0.w1.lora_{side}.weight": () for side in "AB"})

# --- pickles -----------------------------------------------------------------------------------------------------


class Runs:
    """Writes a file next to the folder of the checkpoint when it is unpickled."""

    def __reduce__(self) -> tuple[object, tuple[str, str]]:
        return open, ("../sibling/ran", "w")


PICKLES = {
    "calls open": pickle.dumps(Runs()),
    "calls os.system": b"cos\nsystem\n(S'touch ../sibling/ran'\ntR.",
    "calls a module of torch": b"\x80\x04\x8c\x13torch.serialization\x8c\x08os.mkdir\x93\x8c\x0e../sibling/ran\x85R.",
    "sets Metadata.a": b"\x80\x04ctorch.distributed.checkpoint.metadata\nMetadata\n}\x8c\x01a\x8c\x01bsb.",
    "sets PosixPath.__fspath__": b"\x80\x04cpathlib\nPosixPath\nN(X\x0a\0\0\0__fspath__cpathlib\nPosixPath\nd\x86b.",
    "memo index 2**30": b"\x80\x04Nr\0\0\0\x40.",
    "memo index 2**60": b"Np1152921504606846976\n.",
    "bytes of 2**40": b"\x80\x04\x8e\0\0\0\0\0\1\0\0a.",
    "buffer of 2**40": b"\x80\x05\x96\0\0\0\0\0\1\0\0.",
    "text of 2**60": b"\x80\x04\x8d" + bytes(7) + b"\x10.",
    "text of 4 GB": b"\x80\x02X\xff\xff\xff\xffa.",
    "frame of 2**60": b"\x80\x04\x95" + bytes(7) + b"\x10.",
    "integer of a million digits": b"I" + b"9" * 10**6 + b"\n.",
    "200,000 levels": b"\x80\x04" + b"]" * 200_000 + b"a" * 199_999 + b".",
    "hash of 2**60 elements": b"\x80\x02})" + b"q\x01h\x01\x86" * 60 + b"Ns.",
    "empty": b"",
}


def mutated_pickle(data: bytes, draw: random.Random) -> bytes:
    """Replace opcodes, repeat others, change their arguments, or change bytes."""
    starts = [place or 0 for _, _, place in pickletools.genops(data)] + [len(data)]
    changed, how = bytearray(data), draw.randrange(4)
    for _ in range(draw.choice((1, 2, 5))):
        one, other = draw.randrange(len(starts) - 1), draw.randrange(len(starts) - 1)
        begin, end = starts[one], starts[one + 1]
        if how == 0:
            changed[begin : begin + 1] = draw.choice(pickletools.opcodes).code.encode("latin-1")
        elif how == 1:
            changed[begin:begin] = data[starts[other] : starts[other + 1]]
        elif how == 2:
            changed[begin + 1 : end] = draw.randbytes(end - begin - 1)
    return bytes(changed) if how < 3 else mutated(data, draw)


def mutate_pickle(file: Path, draw: random.Random) -> None:
    file.write_bytes(mutated_pickle(file.read_bytes(), draw))


# --- torch.save --------------------------------------------------------------------------------------------------


def saved(value: Any, **options: Any) -> Attack:
    return lambda file, _: torch.save(value, file, **options)


def in_archive(change: Callable[[str, bytes], bytes], compression: int = zipfile.ZIP_STORED) -> Attack:
    """Change each part of the zip archive."""

    def attack(file: Path, _: random.Random) -> None:
        with zipfile.ZipFile(file) as archive:
            parts = {name: archive.read(name) for name in archive.namelist()}
        with zipfile.ZipFile(file, "w", compression) as archive:
            for name, data in parts.items():
                archive.writestr(name, change(name, data))

    return attack


def in_pickle(change: Callable[[bytes], bytes]) -> Attack:
    return in_archive(lambda name, data: change(data) if name.endswith("data.pkl") else data)


def pickled(data: bytes) -> Attack:
    return in_pickle(lambda _: data)


def mutate_archive(file: Path, draw: random.Random) -> None:
    if draw.random() < 0.3:
        mutate_bytes(file, draw)
    else:
        in_pickle(lambda data: mutated_pickle(data, draw))(file, draw)


ARCHIVES = NOT_REGULAR | {f"pickle {name}": pickled(data) for name, data in PICKLES.items()}
ARCHIVES |= {
    "cut": cut(0.5),
    "without the archive's end": cut(0.99),
    "pickle without an archive": content(PICKLES["calls open"]),
    "compressed to a thousandth": in_archive(
        lambda name, data: bytes(10**8) if name.endswith("data/0") else data, zipfile.ZIP_DEFLATED
    ),
    "storages of a byte": in_archive(lambda name, data: data[:1] if "/data/" in name else data),
    "storage offset 2**31": in_pickle(lambda data: data.replace(b"QK\0", b"QJ\xff\xff\xff\x7f", 1)),
}
OBJECTS = NOT_REGULAR | {
    "calls open": saved(Runs()),
    "list": saved([torch.ones(2)]),
    "keys are numbers and tuples": saved({0: torch.ones(2), (1, "a"): torch.ones(2), None: torch.ones(2)}),
    "key of control characters": saved({CONTROL: torch.ones(2, 2)}),
    "meta": saved({"a": torch.empty(2**40, device="meta")}),
    "sparse": saved({"a": torch.eye(3).to_sparse()}),
    "expanded to 2**60": saved({"a": torch.ones(1).expand(2**60)}),
    "expanded to the file's size": saved({f"a{number}": torch.ones(2).expand(400, 2) for number in range(500)}),
    "before zip": saved({"a": torch.ones(2)}, _use_new_zipfile_serialization=False),
}

# --- torch.distributed.checkpoint --------------------------------------------------------------------------------


def matrix(found: Any) -> Any:
    """Return the metadata of a matrix of experts."""
    return next(each for key, each in found.state_dict_metadata.items() if "experts." in key)


def of_chunk(name: str, value: Any) -> Attack:
    return edit(lambda found: setattr(matrix(found).chunks[0], name, value))


def of_matrix(name: str, value: Any) -> Attack:
    return edit(lambda found: setattr(matrix(found), name, value))


def dtype(_: str, value: Any) -> Attack:
    return edit(lambda found: setattr(matrix(found).properties, "dtype", value))


def place(name: str, value: Any) -> Attack:
    """Change where all chunks are."""
    return edit(lambda found: [vars(each).update({name: value}) for each in found.storage_data.values()])


def key(_: str, value: Any) -> Attack:
    return edit(lambda found: found.state_dict_metadata.update({value: matrix(found)}))


def claim_size(found: Any) -> None:
    """Claim a tensor of 2**45 bytes in a file that is not there."""
    tensor = matrix(found)
    tensor.size = tensor.chunks[0].sizes = torch.Size([2**43])
    for each in found.storage_data.values():
        each.relative_path, each.length = "missing.distcp", 2**45


def chunks(attack: Attack) -> Attack:
    return lambda file, draw: [attack(path, draw) for path in file.parent.glob("*.distcp")]


DISTRIBUTED = NOT_REGULAR | {f"pickle {name}": content(data) for name, data in PICKLES.items()}
DISTRIBUTED |= {f"chunks: {name}": chunks(attack) for name, attack in NOT_REGULAR.items()}
DISTRIBUTED |= each(
    of_matrix, size=(torch.Size([-24, -16]), "ab", [10**200] * 2, torch.Size([2**60])), chunks=([], [1, 2], None)
)
DISTRIBUTED |= each(of_chunk, sizes=(torch.Size([24, 8]), torch.Size([2**60])), offsets=(torch.Size([1, 1]),))
DISTRIBUTED |= each(dtype, dtype=("float31", torch.qint8, torch.int32))
DISTRIBUTED |= each(
    place,
    offset=(-100, 2**60),
    length=(-100, "a"),
    relative_path=("../sibling/text", "a\0b", "missing.distcp"),
    transform_descriptors=(["evil"],),
)
DISTRIBUTED |= each(key, key=(3, CONTROL))
DISTRIBUTED |= {
    "2**45 bytes in a missing file": edit(claim_size),
    "no places": edit(lambda found: found.storage_data.clear()),
    "chunks: random bytes": chunks(lambda file, draw: file.write_bytes(draw.randbytes(file.stat().st_size))),
    "chunks: call open": chunks(lambda file, _: file.write_bytes(PICKLES["calls open"] + file.read_bytes())),
    "chunks: cut": chunks(cut(0.3)),
}

# --- formats -----------------------------------------------------------------------------------------------------


class Format(NamedTuple):
    """Files that commands read, and how they are damaged."""

    name: str
    file: str
    """Path below the checkpoints of `hostile_files.make_checkpoints`."""
    attacks: Mapping[str, Attack]
    mutation: Attack
    mutations: int
    commands: Sequence[str]
    """They take turns."""


AUDIT, AUDIT_FILE = ("audit {folder}",), ("audit {file}",)
CONVERT = "adapter convert {folder} {target} --base {made}/model --to "
ADAPTER = ("audit {folder} --against {made}/model", CONVERT + "vllm", CONVERT + "sglang")
CONFIG = (
    *AUDIT,
    "audit {made}/adapters --against {folder}",
    "adapter convert {made}/adapters {target} --to vllm --base {folder}",
)
OF_RUNS = NOT_REGULAR | {
    name: sealed(HEADERS[name]) for name in ("header null", "cut in the header", "name twice", "NaN")
}
FORMATS = (
    Format(
        "*.safetensors",
        "model/model-00001-of-00003.safetensors",
        NOT_REGULAR | HEADERS | ENTRIES | TYPES | SHAPES,
        mutate_header,
        5,
        AUDIT,
    ),
    Format("*.safetensors.index.json", "model/model.safetensors.index.json", INDEX, mutate_json, 3, AUDIT),
    Format("config.json", "model/config.json", MODEL_CONFIG, mutate_json, 4, CONFIG),
    Format("adapter_config.json", "adapters/adapter_config.json", ADAPTER_CONFIG, mutate_json, 4, ADAPTER),
    Format(
        "adapter_model.safetensors",
        "adapters/adapter_model.safetensors",
        NOT_REGULAR | ADAPTER_SHAPES,
        mutate_header,
        4,
        ADAPTER,
    ),
    Format("adapter_record.json", "adapters/adapter_record.json", RECORD, mutate_json, 3, ADAPTER[:1]),
    Format("*.bin", "bin/pytorch_model.bin", ARCHIVES, mutate_archive, 5, AUDIT),
    Format("*.pt", "pt/model.pt", OBJECTS, mutate_archive, 3, AUDIT_FILE),
    Format(".metadata, *.distcp", "dcp/.metadata", DISTRIBUTED, mutate_pickle, 8, AUDIT),
    Format("manifest.json", "run/manifest.json", MANIFEST, mutate_json, 3, AUDIT),
    Format("experts-*.safetensors", "run/experts-00000.safetensors", OF_RUNS, sealed(mutate_header), 3, AUDIT),
)
