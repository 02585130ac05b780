"""Read and write the YAML of configurations: PyYAML's safe subset, without its pitfalls.

A repeated key is an error (in YAML the last one wins); 1e-5 is a number and 010 is ten (as in YAML
1.2; in 1.1, 010 is eight); 10:13 and 2026-01-31 are text (not a base-60 number, not a date).
`parse` reads back exactly what `dump` has written.
"""

import re
from typing import Any

import yaml


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
    # a number of thousands of digits; `!!bool maybe` (KeyError), `!!timestamp x` (AttributeError)
    except (ValueError, KeyError, AttributeError, OverflowError) as error:
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

    def construct_mapping(self, node: Any, deep: bool = False) -> dict[Any, Any]:
        keys = [key.value for key, _ in node.value if isinstance(key, yaml.ScalarNode)]
        if len(keys) > len(set(keys)):
            twice = next(key for key in keys if keys.count(key) > 1)
            why = f"{twice!r} is given twice"
            raise yaml.constructor.ConstructorError(None, None, why, node.start_mark)
        return super().construct_mapping(node, deep)

    def construct_int(self, node: Any) -> int:
        digits = self.construct_scalar(node).replace("_", "")
        return int(digits, 0 if digits.lstrip("-+")[1:2] in tuple("box") else 10)


class _Dumper(yaml.SafeDumper):
    """Quotes text that _Loader would read as something else."""

    def ignore_aliases(self, data: Any) -> bool:
        return True


_INT = r"[-+]?(0b[01_]+|0x[0-9a-fA-F_]+|0o[0-7_]+|[0-9][0-9_]*)"
_FLOAT = (
    r"[-+]?([0-9][0-9_]*(\.[0-9_]*)?|\.[0-9][0-9_]*)([eE][-+]?[0-9]+)?"
    r"|[-+]?\.(inf|Inf|INF)|\.(nan|NaN|NAN)"
)
_TAG = "tag:yaml.org,2002:"
_Loader.add_constructor(f"{_TAG}int", _Loader.construct_int)
for _kind in (_Loader, _Dumper):
    # PyYAML's rules for the type of unquoted text, by its first character, but for these
    replaced = {f"{_TAG}timestamp", f"{_TAG}int", f"{_TAG}float"}
    _kind.yaml_implicit_resolvers = {
        first: [rule for rule in rules if rule[0] not in replaced]
        for first, rules in yaml.SafeLoader.yaml_implicit_resolvers.items()
    }
    for _name, _pattern in (("int", _INT), ("float", _FLOAT)):
        of = re.compile(rf"^(?:{_pattern})$")
        _kind.add_implicit_resolver(f"{_TAG}{_name}", of, list("-+0123456789."))
