"""Read and write the YAML of configurations: PyYAML's safe subset, without its pitfalls.

A repeated key is an error (in YAML the last one wins); 1e-5 is a number and 010 is ten (as in YAML
1.2; in 1.1, 010 is eight); 10:13 and 2026-01-31 are text (not a base-60 number, not a date). An
alias may repeat a single value, but not a list or mapping, because nine lines of such aliases can
expand to a billion items. `parse` reads back exactly what `dump` has written.
"""

import re
from typing import Any

import yaml

MAX_CHARACTERS = 2**17  # in a file; real configurations have a few thousand


class NotYaml(ValueError):
    """The text cannot be read; the message says where and why."""


def parse(text: str, comments: bool = True) -> Any:
    """Parse `text`. Raises NotYaml, without `comments` also where something follows the value."""
    try:
        loader = _Loader(text)
        node = loader.get_single_node()
        value = loader.construct_document(node) if node else None
    except RecursionError:
        raise NotYaml("is nested too deeply") from None
    except yaml.YAMLError as error:
        said = str(error).replace('in "<unicode string>", ', "in ")
        raise NotYaml(f"is not YAML: {' '.join(said.split())}") from None
    except (ValueError, OverflowError) as error:  # for example, a number of thousands of digits
        raise NotYaml(f"holds a value that cannot be read: {str(error)[:100]}") from None
    rest = text[node.end_mark.index if node else 0 :].strip()
    if rest and not comments:
        raise NotYaml(f"is followed by {rest[:100]!r}")
    return value


def dump(value: Any) -> str:
    """Format `value` as YAML, with keys in their order."""
    return yaml.dump(value, Dumper=_Dumper, sort_keys=False)


class _Loader(yaml.SafeLoader):
    """Loads YAML by the rules of the module docstring."""

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
                    None, None, f"{key.value!r} is given twice", key.start_mark
                )
            seen.add(key.value)
        return super().construct_mapping(node, deep)

    def construct_int(self, node: Any) -> int:
        digits = self.construct_scalar(node).replace("_", "")
        return int(digits, 0 if digits.lstrip("-+")[1:2] in tuple("box") else 10)


_Loader.add_constructor("tag:yaml.org,2002:int", _Loader.construct_int)


class _Dumper(yaml.SafeDumper):
    """Quotes text that _Loader would read as something else."""

    def ignore_aliases(self, data: Any) -> bool:
        return True


def _resolvers() -> dict[Any, Any]:
    """Return PyYAML's rules for the type of unquoted text, by its first character, without those
    for dates and numbers (numbers are added below)."""
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
    ("tag:yaml.org,2002:int", r"[-+]?(0b[01_]+|0x[0-9a-fA-F_]+|0o[0-7_]+|[0-9][0-9_]*)"),
    (
        "tag:yaml.org,2002:float",
        r"[-+]?([0-9][0-9_]*(\.[0-9_]*)?|\.[0-9][0-9_]*)([eE][-+]?[0-9]+)?|[-+]?\.(inf|Inf|INF)|\.(nan|NaN|NAN)",
    ),
)
for _kind in (_Loader, _Dumper):
    _kind.yaml_implicit_resolvers = _resolvers()
    for _tag, _pattern in _NUMBERS:
        _kind.add_implicit_resolver(_tag, re.compile(rf"^(?:{_pattern})$"), list("-+0123456789."))
