"""From text to batches. Owns the tokenizer, the prepared folder, and the choice of tokens for
sample i.

    sources.py    python-stdlib | files | Hugging Face data set -> documents (id, text), streamed
    files.py      selects the files of a folder or a glob, and reports why others are left out
    contents.py   opens a file, decompressed; refuses by its first bytes what cannot be read
    readers.py    one file, compressed or not -> its text, or its rows
    heldout.py    selects the documents, or the ends of documents, held out for evaluation
    tokenizer.py  document -> token ids, and back; the library depends on the file:
                  sentencepiece_codec.py (also trains Lattice's own, which is lossless),
                  tokenizers_codec.py (tokenizer.json)
    token_ids.py    which token has which id, the same in all files of a tokenizer
    token_roles.py  which tokens open and close a document, by the files beside a tokenizer
    prepare.py    documents -> worker processes -> shards (once, offline: `python -m tools.prepare`)
    shards.py     one token shard: a safetensors file, read through a mapping
    dataset.py    a prepared folder: one long sequence of tokens per split, read on demand
    sampler.py    (seed, sample index) -> (source, epoch, window): pure functions, no state
    loader.py     samples -> batches of one data-parallel rank, prefetched; its state is one number
    config.py     the `data` section of a run's YAML

The only modules of Lattice imported here are `errors`, `declare` and `tokens`. Only loader.py
imports torch (and safetensors, when a shard is mapped); sources.py imports `datasets` only to read
from the hub, and pyarrow is imported only to read parquet or zstd, so that a preparation worker
starts in a fraction of a second.
"""
