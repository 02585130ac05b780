"""YAML as a configuration is written in it: the safe subset of PyYAML, and what is easily mistaken
is an error or plain text.

A key that stands twice is an error (YAML lets the last win); 1e-5 is a number (as in YAML 1.2);
10:13 and 2026-01-31 are text (not a number to base 60, not a date). An alias may repeat a single
value, but no list or mapping, of which nine lines can make a billion items. What is written with
`dump` is read back to the same.
"""

import re
from typing import Any

import yaml

MAX_CHARACTERS = 2**17  # of a file; the largest configuration anyone wrote has some thousands


class NotYaml(ValueError):
    """The text cannot be read; the message says where and why."""


def parse(text: str) -> Any:
    """The value that `text` says; raises NotYaml."""
    try:
        return yaml.load(text, _Loader)
    except RecursionError:
        raise NotYaml("is nested too deeply") from None
    except yaml.YAMLError as error:
        said = str(error).replace('in "<unicode string>", ', "in ")
        raise NotYaml(f"is not YAML: {' '.join(said.split())}") from None
    except (ValueError, OverflowError) as error:  # a number of thousands of digits
        raise NotYaml(f"holds a value that cannot be read: {str(error)[:100]}") from None


def dump(value: Any) -> str:
    """`value` as YAML, keys in their order."""
    return yaml.dump(value, Dumper=_Dumper, sort_keys=False)


class _Loader(yaml.SafeLoader):
    """The rules of the file's docstring."""

    def compose_node(self, parent: Any, index: Any) -> Any:
        alias = self.check_event(yaml.AliasEvent) and self.peek_event()
        node = super().compose_node(parent, index)
        if alias and not isinstance(node, yaml.ScalarNode):
            what = "an alias of a list or mapping; write it out"
            raise yaml.composer.ComposerError(None, None, what, alias.start_mark)
        return node

    def construct_mapping(self, node: Any, deep: bool = False) -> dict[Any, Any]:
        seen = set()
        for key, _ in node.value:
            if not isinstance(key, yaml.ScalarNode):
                continue
            if key.value in seen:
                raise yaml.constructor.ConstructorError(
                    None, None, f"{key.value!r} stands here twice", key.start_mark
                )
            seen.add(key.value)
        return super().construct_mapping(node, deep)


class _Dumper(yaml.SafeDumper):
    """Puts quotes around text that _Loader would take for something else."""

    def ignore_aliases(self, data: Any) -> bool:
        return True


def _resolvers() -> dict[Any, Any]:
    """What an unquoted text is, by its first character: PyYAML's list, changed as the docstring
    says."""
    changed = {}
    for first, rules in yaml.SafeLoader.yaml_implicit_resolvers.items():
        left_out = (
            "tag:yaml.org,2002:timestamp",
            "tag:yaml.org,2002:float",
            "tag:yaml.org,2002:int",
        )
        changed[first] = [(tag, pattern) for tag, pattern in rules if tag not in left_out]
    return changed


_NUMBERS = (
    ("tag:yaml.org,2002:int", r"[-+]?(0b[01_]+|0x[0-9a-fA-F_]+|0o?[0-7_]+|0|[1-9][0-9_]*)"),
    (
        "tag:yaml.org,2002:float",
        r"[-+]?([0-9][0-9_]*(\.[0-9_]*)?|\.[0-9][0-9_]*)([eE][-+]?[0-9]+)?|[-+]?\.(inf|Inf|INF)|\.(nan|NaN|NAN)",
    ),
)
for _kind in (_Loader, _Dumper):
    _kind.yaml_implicit_resolvers = _resolvers()
    for _tag, _pattern in _NUMBERS:
        _kind.add_implicit_resolver(_tag, re.compile(rf"^(?:{_pattern})$"), list("-+0123456789."))
