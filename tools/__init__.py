"""Commands beside training, `python -m tools.NAME --help` each. A folder is a command and its
parts, but for huggingface/, which import_hf and export share; ranks.py is the pool of processes
that parity and the tests compute on, command.py how a command ends.

Before a run      tokenizer, prepare     text → tokens → token shards
                  plan, rehearse         what a job will need; any rank of it, carried out here
                  timeline               a schedule, drawn
                  preflight              are the nodes fit?
                  launch                 torchrun's launcher, with everything imported once
For its editors   schema                 what a configuration file may hold: completion, checks
While and after   report, plot, profile  a run as a page, as a picture; what a trace says
                  verify                 is a checkpoint whole?
                  generate               text from the model
                  import_hf, export      Hugging Face, in and out
To trust it       parity                 every layout against one device
                  compile_kernels        the kernels, for every GPU, without one
"""
