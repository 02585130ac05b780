"""Checkpoints: saved while training continues, whole or not there, and loaded on any layout.

saving.py          when to save
save_interval.py   how often to save, if the run decides
save.py            saves while training continues
host_copies.py     where a save copies a rank's tensors

load.py            finds the checkpoint that a run starts from, and loads it
placed.py          tells DCP which part of a tensor a rank reads
history.py         checks that a checkpoint's run had the configuration's data stages
rollback.py        goes back to a checkpoint and skips the bad batches

folder.py          the names in a folder of checkpoints
tensor_files.py    the files of tensors: written by each rank, read by DCP
manifest.py        lists the contents of a checkpoint
verify.py          whether a checkpoint is what was saved, and its tensors are complete
progress.py        progress bars on a terminal, for what takes minutes

lease.py           allows one writer per run folder, which alone changes its checkpoints

What a saved state is, is in ../trainer_state.py.
"""
