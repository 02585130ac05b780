"""What tools/import_hf.py and tools/export.py are made of: our folders and Hugging Face's, both
ways, a tensor at a time.

config.py             fields of config.json and names of tensors
tokenizer.py          the tokenizer's files
tensor_files.py       safetensors files: read one tensor, write in files of bounded size
checkpoint_reader.py  a checkpoint without a run: which one, and its global tensors
new_folder.py         a folder that is there whole or not at all
"""
