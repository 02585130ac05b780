"""From text to batches. Owns the tokenizer, the prepared folder, and which tokens make sample i.

    sources.py    python-stdlib | files | Hugging Face data set -> documents (id, text), streamed
    files.py      which files of a folder or a glob are read, and why the others are not
    readers.py    one file, compressed or not -> its text, or its rows
    heldout.py    documents -> which of them, or which ends of them, are held out for evaluation
    tokenizer.py  document -> token ids, and back; which library does it depends on the file:
                  sentencepiece_codec.py (ours is trained there, and exact), tokenizers_codec.py
                  (tokenizer.json)
    prepare.py    documents -> worker processes -> shards (once, offline: `python -m tools.prepare`)
    shards.py     one token shard: a safetensors file, written as a stream, read through a mapping
    dataset.py    a prepared folder: one long sequence of tokens per split, read where it is needed
    sampler.py    (seed, sample index) -> (source, epoch, window): pure functions, no state
    loader.py     samples -> batches of one data-parallel rank, read ahead; its state is one number
    config.py     the `data` section of a run's YAML

Imports nothing of Lattice but `errors` and `settings`. Only loader.py imports torch; sources.py
imports `datasets` when it reads from the hub, and readers.py pyarrow when it reads parquet, so that
a preparation worker starts in a fraction of a second.
"""
