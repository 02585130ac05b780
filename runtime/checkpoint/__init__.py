"""Checkpoints: saved while training continues, whole or not there, and loaded on any layout.

saving.py          when to save
save_interval.py   how often to save, if the run decides
goodput.py         how much time saves and failures cost: closed forms
save.py            saves while training continues
save_errors.py     why a save failed, on all ranks and in the system's words
host_copies.py     where a save copies a rank's tensors
manifest.py        lists and verifies the contents of a checkpoint
tiling.py          whether pieces make up a whole tensor
trainer_state.py   trainer.json: how far the run was

load.py            finds the checkpoint that a run starts from, and loads it
history.py         checks that a checkpoint's run had the stages of the configuration
rollback.py        goes back to a checkpoint and skips the bad batches
progress.py        progress bars on a terminal, for what takes minutes

names.py           the names in a folder of checkpoints
run_folder.py      lists the checkpoints of a run, and writes `latest`
lease.py           allows one writer per run folder
lease_holder.py    who holds the lease, and whether that process is alive
"""
