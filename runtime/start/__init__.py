"""What happens before the first step. In the order of a start:

environment.py       refuses wrong variables of launchers and people
spares.py            which of the launcher's ranks train; the others wait
connections.py       how many queues the host has to a GPU, by the layout
init_distributed.py  joins the launcher's world of processes
numa.py              binds a rank to the CPUs next to its GPU
rendezvous.py        how the ranks of one start find each other
attention.py         which kernel attention uses, and whether the device has it
preconditions.py     checks memory, data, folder and alarms, before anything is built
doubts.py            settings that a start warns of
notices.py           what a start says about its configuration (called by metrics/metrics.py)
topology.py          which mesh axes lie inside a node, and what it costs where tp does not

parts.py             the parts of a start, and when they end
times.py             writes them down
"""
