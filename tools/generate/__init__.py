"""Generates text with a trained model: `python -m tools.generate --checkpoint DIR --prompt TEXT`.

__main__.py      the command
load_model.py    loads the weights, whole or sharded over tp, from a checkpoint or exported folder
loop.py          the generation loop, one token per step, drawn by temperature and top-k
cache.py         the key/value cache
"""
