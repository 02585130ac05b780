"""Finds what is wrong with the machines of a run while it trains.

products.py    what is put around the products of linear layers, to time or check them
slow_ranks.py  times each rank's own computing, and names the ranks that are slow
straggler.py   which ranks are slow, from the times of all ranks
examine.py     on a suspicion, computes the step again: is a machine, or the model, to blame?
compare.py     compares the products of two computations
replicas.py    compares copies that must be equal
excluded.py    excluded.json: the nodes that the next start leaves out
"""
