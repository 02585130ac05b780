"""Text from a trained model: `python -m tools.generate --checkpoint DIR --prompt TEXT`.

__main__.py      the command
load_model.py    the weights, whole or cut over tp, from a checkpoint or an exported folder
loop.py          a token of every row at a time
sampling.py      the next token from the logits: temperature, top-k, top-p
continuation.py  tokens to text while they come
cache.py         keys and values of the tokens so far
"""
