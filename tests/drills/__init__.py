"""Runs that are killed, paused, stopped and shrunk, on purpose and at random. Most are slow."""

import sys

# for launchers and ranks that are all on this machine
ON_THIS_MACHINE = {
    "OMP_NUM_THREADS": "1",
    "GLOO_SOCKET_IFNAME": "lo0" if sys.platform == "darwin" else "lo",
}
