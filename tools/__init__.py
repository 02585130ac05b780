"""Commands other than training; each has `python -m tools.NAME --help`.

A folder is one command and its parts, except huggingface/, which import_hf and export share.
command.py ends a command cleanly.

Before a run      tokenizer, prepare     text → tokens → token shards
                  plan, rehearse         predict a job's needs; execute any rank of it here, and
                                         check its streams, memory and overlap
                  timeline               draw a schedule
                  preflight              check that the nodes are fit
                  launch                 start a run on one machine, importing everything once
                  torchrun               torchrun, importing everything once on each node
                  slurm_next             what becomes of a Slurm job (slurm/train_70b.sh asks)
For editors       schema                 schema of configuration files, for completion and checks
During and after  report, profile        a run as a page, its loss as a picture; a trace's summary
                  verify                 check that a checkpoint is intact
                  objects                copy checkpoints to an object store, and back
                  alarm                  send an alarm about a run from outside of it
                  generate               generate text from the model
                  evaluate               score the model on tasks
                  average                average the weights of checkpoints
                  import_hf, export      convert from and to Hugging Face folders
To trust it       compile_kernels        compile the kernels for every GPU, without having one
"""
