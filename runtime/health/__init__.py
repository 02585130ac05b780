"""Finds what is wrong with the machines of a run while it trains.

excluded.py    excluded.json: the nodes that the next start leaves out
"""
