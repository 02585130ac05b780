"""What happens before the first step. In the order of a start:

environment.py  refuses wrong variables of launchers and people
elastic.py      which of the launcher's ranks train; the others wait
host.py         what a rank sets on its host: CPUs, queues to its GPU, allocators, open files
init.py         joins the launcher's world of processes: how the ranks of one start find each other
attention.py    which kernels attention uses, by the rules
checks.py       reads the configuration; checks memory, data, folder and alarms, before anything is
                built
announce.py     what a start writes down: what is trained and how it is laid out, what changed, what
                may be an oversight

timing.py       where the time of a start goes
"""
