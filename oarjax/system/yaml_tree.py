"""Read YAML of bounded size: every key once, dates as text, and aliases only as far as what they stand for is small."""

from __future__ import annotations

import re
from typing import Any, ClassVar

import yaml

LONGEST = 1_000_000
"""Characters of a file."""

LARGEST = 20_000
"""Values of a file, those that aliases repeat counted again."""


class YamlError(ValueError):
    """Text that is not YAML, or more than it should be; says where and why."""


class _Loader(yaml.SafeLoader):
    """SafeLoader, but a date is text, as is meant, and 1e-8, a text to YAML 1.1, is a number."""

    yaml_implicit_resolvers: ClassVar = {
        first: [(tag, pattern) for tag, pattern in resolvers if not tag.endswith(":timestamp")]
        for first, resolvers in yaml.SafeLoader.yaml_implicit_resolvers.items()
    }


_Loader.add_implicit_resolver(
    "tag:yaml.org,2002:float", re.compile(r"[-+]?(?:[0-9]+\.?[0-9]*|\.[0-9]+)[eE][-+]?[0-9]+\Z"), list("-+.0123456789")
)


def read_yaml(text: str) -> Any:
    """Read one YAML document.

    Raises:
        YamlError: it is none, has a key twice in a mapping, or is too large.
    """
    if len(text) > LONGEST:
        raise YamlError(f"longer than {LONGEST:,} characters")
    try:
        loader = _Loader(text)
        node = loader.get_single_node()
        if node is None:
            return None
        _measure(node, {})
        return loader.construct_document(node)
    except YamlError:
        raise
    except yaml.YAMLError as error:
        raise YamlError(f"not valid YAML: {error}") from None
    except RecursionError:
        raise YamlError("nested too deeply") from None
    except (ValueError, KeyError, TypeError, AttributeError, IndexError, OverflowError) as error:  # of a tag as !!bool
        raise YamlError(f"not valid YAML: a value does not fit its tag ({error})") from None


def _measure(node: yaml.Node, sizes: dict[int, int]) -> int:
    """Count the values of a node, each alias as often as it stands for something.

    Raises:
        YamlError: there are too many, an alias stands for itself, or a key stands twice in a mapping.
    """
    size = sizes.get(id(node), 0)
    if size < 0:
        raise YamlError(f"line {node.start_mark.line + 1}: an alias refers to itself")
    if size:
        return size
    sizes[id(node)] = -1
    children: list[yaml.Node] = []
    if isinstance(node, yaml.MappingNode):
        _reject_duplicates(node)
        children = [child for pair in node.value for child in pair]
    elif isinstance(node, yaml.SequenceNode):
        children = node.value
    size = 1 + sum(_measure(child, sizes) for child in children)
    if size > LARGEST:
        raise YamlError(f"line {node.start_mark.line + 1}: more than {LARGEST:,} values")
    sizes[id(node)] = size
    return size


def _reject_duplicates(node: yaml.MappingNode) -> None:
    """Reject a key that stands twice, which YAML would silently resolve to the last one."""
    lines: dict[str, int] = {}
    for key, _ in node.value:
        line, name = key.start_mark.line + 1, str(key.value)
        if name in lines:
            raise YamlError(f"{name} is set in line {lines[name]} and again in line {line}; keep one of them")
        lines[name] = line
