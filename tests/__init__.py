"""The tests: folders are named as the rooms of the code that they test, and hold their helpers,
which other rooms may use. In this folder are helpers of no room, and tests of the repository
itself."""

from pathlib import Path

ROOT = Path(__file__).parent.parent
