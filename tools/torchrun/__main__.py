"""torchrun whose ranks need not import the program.

    python -m tools.torchrun [torchrun's options] train.py CONFIG.yaml [section.key=value …]

    torchrun           ┬ rank 0: imports, joins, trains ─ dies     ┬ rank 0: imports, joins, trains
                       └ rank 1: imports, joins, trains ─ stopped  └ rank 1: imports, joins, trains

    tools.torchrun     ┬ rank 0: joins, trains ─ dies              ┬ rank 0: joins, trains
     └ server: imports └ rank 1: joins, trains ─ stopped           └ rank 1: joins, trains

One process of each node, Python's fork server (multiprocessing), imports the program once and lives
as long as torchrun's agent. Each start of a rank is a fork of it. The agent, its rendezvous, its
options and its signals are torch's. A change of the program's files takes effect when this command
is started again, not when its ranks are.
"""

import multiprocessing
import os
import sys
from pathlib import Path

from torch.distributed.elastic.multiprocessing.errors import record
from torch.distributed.run import parse_args, run

from runtime.output import guard_output


@record
def main() -> None:
    options = parse_args(sys.argv[1:])
    script = Path(options.training_script).absolute()
    if options.module or options.no_python or not script.is_file():
        sys.exit(f"error: {options.training_script} is not a script; give the path of train.py")
    # run it by its path in a process that Python's multiprocessing starts
    options.run_path, options.training_script = True, str(script)
    options.start_method = "forkserver"
    # torchrun sets this for its ranks, but it is read when torch is imported, which is before
    os.environ["OMP_NUM_THREADS"] = os.environ.get("OMP_NUM_THREADS") or "1"
    multiprocessing.set_forkserver_preload(["tools.torchrun.program"])
    run(options)


if __name__ == "__main__":
    guard_output()
    main()
