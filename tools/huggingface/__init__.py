"""The parts of tools/import_hf.py and tools/export.py, which convert between Lattice checkpoints
and Hugging Face folders.

config.py             maps the fields of config.json and the names of tensors, also of experts
agreement.py          refuses files of a folder that contradict each other
tokenizer.py          the tokenizer's files
checkpoint_reader.py  reads a checkpoint's global tensors without a run
folder_reader.py      reads a Hugging Face folder in the same way
new_folder.py         creates a folder, or a checkpoint of weights, completely or not at all
"""
