"""The parts of tools/import_hf.py and tools/export.py, which convert between Lattice checkpoints
and Hugging Face folders.

config.py             maps the fields of config.json and the names of tensors
agreement.py          refuses files of a folder that contradict each other
experts.py            the same for mixtures of experts
tokenizer.py          the tokenizer's files
tensor_files.py       safetensors files: reads single tensors, writes files of bounded size
checkpoint_reader.py  reads a checkpoint's global tensors without a run
families.py           what other families of models compute that this model does not
new_folder.py         creates a folder, or a checkpoint of weights, completely or not at all
"""
