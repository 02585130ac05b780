"""Every setting that there is."""

from dataclasses import fields

from declare import settings_class
from settings.load import KEYS, KINDS


def every_key() -> list[tuple[str, str]]:
    """Section and key, those of all kinds too: ("model", "sliding_window.window")."""
    found = []
    for section, keys in KEYS.items():
        kinds = KINDS.get(section, {})
        found += [(section, key) for key in keys if key not in kinds]
        for kind, folder in kinds.items():
            own = settings_class(folder, kind)
            found += [(section, f"{kind}.{each.name}") for each in (fields(own) if own else ())]
    return found
