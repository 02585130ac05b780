"""A checkpoint of an earlier version (fixtures/step-00000002: pp 2 × tp 2, two steps) still loads
the same numbers, in any layout."""

import hashlib
import json

import pytest

from runtime.checkpoint.verify import parse_trainer, verify_checkpoint
from tests import ROOT
from tests.runs import global_state, write_config

FIXTURE = ROOT / "tests/fixtures" / "step-00000002"
HASHES = json.loads(FIXTURE.with_suffix(".json").read_text())  # made by the version that wrote it


@pytest.mark.parametrize(("world", "layout"), [(1, {}), (4, {"tp": 2})])
def test_it_loads_bit_for_bit(ranks, data, tmp_path, world, layout):
    verify_checkpoint(FIXTURE)
    saved = parse_trainer(FIXTURE).model
    config = write_config(tmp_path, data, model=saved, parallel=layout)
    state = ranks.run(global_state, world, [config], str(FIXTURE))[0]
    found = {n: hashlib.sha256(t.numpy().tobytes()).hexdigest()[:16] for n, t in state.items()}
    assert found == HASHES
