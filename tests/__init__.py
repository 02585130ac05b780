"""The tests: folders are named as the rooms of the code that they test, and hold what only their
tests need. In this folder is what several rooms share, and the tests of the repository itself."""

from pathlib import Path

ROOT = Path(__file__).parent.parent
