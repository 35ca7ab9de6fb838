"""A file of flags, `--config FILE`: YAML or JSON, keys as on the command line, groups nested or with a dot."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

from toolkit.errors import UserError

NO_FLAGS = ("recipe", "data_identity")
"""Keys of a run's config.json beside its flags: the recipe's name, and what `toolkit.run.data` knows of the data."""
MASK = "***"
"""Stands in the config.json of a run where a secret was, or what may be one."""


def flags_of_file(path: Path) -> list[tuple[str, list[str]]]:
    """Pairs of a flag and the words of its value, `("--optimizer.weight-decay", ["0.1"])`, in the order of the file.

    The config.json of a run is such a file; its `NO_FLAGS` are left out. Raises UserError for a file that can't be read
    or is no mapping, and for a flag that is there twice.
    """
    import yaml

    try:
        text = path.expanduser().read_text(encoding="utf-8-sig")
        if path.suffix == ".json":  # whose tabs YAML refuses
            values = json.loads(text, object_pairs_hook=_once, parse_int=str, parse_float=str, parse_constant=str)
        else:
            values = yaml.load(text, Loader=_words_loader())
        if not isinstance(values, dict):
            raise UserError("has no flags: write a line for each, such as `epochs: 3`.")
        flags = list(_flat({key: value for key, value in values.items() if key not in NO_FLAGS}))
        _once((name.removeprefix("--"), None) for name, _ in flags)  # one may be nested, and the other have a dot
    except OSError as error:
        raise UserError(f"--config {path}: cannot be read ({error.strerror}): give a YAML or JSON file.") from None
    except UserError as error:  # a ValueError, too
        raise UserError(f"--config {path}: {error}") from None
    except (ValueError, yaml.YAMLError) as error:
        place = getattr(error, "problem_mark", None)
        line = getattr(error, "lineno", None) or (place.line + 1 if place else "1")
        raise UserError(f"--config {path}: line {line} is neither YAML nor JSON: correct it.") from None
    except RecursionError:
        raise UserError(f"--config {path}: is nested too deeply: write a line for each flag.") from None
    return flags


def _words_loader() -> type:
    """A loader of YAML to which every scalar is the word that was written: others read `no` as false, and `1e-3` as no
    number. Only a null is None, so that a quoted "" is a text without letters.
    """
    import yaml

    class Words(yaml.BaseLoader):
        def compose_node(self, parent: Any, index: Any) -> Any:
            is_alias = self.check_event(yaml.AliasEvent)
            node = super().compose_node(parent, index)
            if is_alias and isinstance(node, yaml.MappingNode):  # a few lines of those within those have no end
                raise UserError(f"line {node.start_mark.line + 1}: a group that is named twice: write both out.")
            return node

        def construct_scalar(self, node: Any) -> str | None:
            is_null = node.style is None and node.value in ("null", "~", "")
            return None if is_null else str(super().construct_scalar(node))

        def construct_mapping(self, node: Any, deep: bool = False) -> dict[str, Any]:
            _once((str(key.value), None) for key, _ in node.value)
            return super().construct_mapping(node, deep)

    return Words


def _once(pairs: Iterable[tuple[Any, Any]]) -> dict[str, Any]:
    """`pairs` as a mapping. Raises UserError for a key that is there twice, of which one would be ignored."""
    pairs = list(pairs)
    names = [str(key).replace("_", "-") for key, _ in pairs]
    for name in names:
        if names.count(name) > 1:
            raise UserError(f"{name}: is there twice: leave one out.")
    return dict(pairs)


def _flat(values: Mapping[str, Any], prefix: str = "--") -> Iterator[tuple[str, list[str]]]:
    for key, value in values.items():
        name = prefix + str(key).replace("_", "-")
        if isinstance(value, dict):
            yield from _flat(value, f"{name}.")
        else:
            items = value if isinstance(value, list) else [value]
            if any(isinstance(item, dict | list) for item in items):
                raise UserError(f"{name}: a list or group within a list: write its values one after the other.")
            words = [_word(item) for item in items]
            if any(word.startswith(MASK) for word in words):
                raise UserError(f"{name} {words[0]}: was masked when this file was written: write what it stands for.")
            yield name, words


def _word(value: Any) -> str:
    return "none" if value is None else str(value).lower() if isinstance(value, bool) else str(value)
